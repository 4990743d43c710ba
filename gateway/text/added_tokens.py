"""Added tokens of a `tokenizer.json`: matched as a whole in raw text, before anything is split.

Leftmost first, the longest at each place. Stripping and single-word flags are refused. Whether a text may contain added
tokens at all is the tokenizer's caller's decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.text.pretokenizer import TokenizerFileError


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One entry of `added_tokens`: matched as a whole in raw text before any splitting."""

    id: int
    content: str
    special: bool
    normalized: bool


def added_token(entry: Mapping[str, Any]) -> AddedToken:
    """One entry of the file; raises `TokenizerFileError`."""
    for flag in ("lstrip", "rstrip", "single_word"):
        if entry.get(flag):
            raise TokenizerFileError(f"tokenizer.json: added token {entry.get('content')!r}: {flag} is not supported")
    token = AddedToken(entry["id"], entry["content"], bool(entry.get("special")), bool(entry.get("normalized", True)))
    if not token.content:
        raise TokenizerFileError(f"tokenizer.json: added token {token.id} is empty")
    return token


class AddedTokenFinder:
    """Finds added tokens in text: leftmost first, the longest at each place."""

    def __init__(self, tokens: list[AddedToken]) -> None:
        self._root: dict[str, Any] = {}
        for token in tokens:
            node = self._root
            for char in token.content:
                node = node.setdefault(char, {})
            node[""] = token.id

    def cut(self, text: str) -> list[str | int]:
        """Strings and ids in order; strings may be empty."""
        out: list[str | int] = []
        start = 0
        for at in self._candidates(text):
            if at < start:
                continue
            found, end = self._longest_at(text, at)
            if found is not None:
                out += [text[start:at], found]
                start = end
        out.append(text[start:])
        return out

    def _candidates(self, text: str) -> list[int]:
        """Ascending places where a token's first character stands."""
        places: list[int] = []
        for char in self._root:
            at = text.find(char)
            while at >= 0:
                places.append(at)
                at = text.find(char, at + 1)
        places.sort()
        return places

    def _longest_at(self, text: str, at: int) -> tuple[int | None, int]:
        node = self._root
        found, end = None, at
        for place in range(at, len(text)):
            child = node.get(text[place])
            if child is None:
                break
            node = child
            if "" in node:
                found, end = node[""], place + 1
        return found, end
