"""A prompt under construction: ordinary text and marker tokens, kept apart until they are ids.

User text can never become a marker: markers enter by `mark` and `markup` only, and text between two markers is encoded
as one string without added tokens. What belongs in a prompt is decided by `chat_encoding` and `tool_encoding`.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.text.chat_messages import ChatError
from gateway.text.tokenizer import PromptTooLong, Tokenizer

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
THINK: Final = "<think>"
END_THINK: Final = "</think>"
DSML: Final = "｜DSML｜"
REMINDER: Final = "<｜latest_reminder｜>"
TASKS: Final = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
_MARKUP: Final = re.compile(f"({'|'.join(re.escape(token) for token in (THINK, END_THINK, DSML))})")


class MissingMarkerError(ChatError):
    """The model's vocabulary lacks a marker token that the request needs."""

    def __init__(self, token: str, param: str) -> None:
        super().__init__(f"this model's vocabulary has no token {token!r}, which {param} needs", param)
        self.token = token


class Prompt:
    """Pieces in order; adjacent text is joined."""

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._marks: list[tuple[str, str]] = []

    def text(self, text: str) -> None:
        """Append ordinary text; spellings of markers in it stay text."""
        self._texts[-1] += text

    def mark(self, token: str, param: str = "messages") -> None:
        """Append a marker token; `param` is the request field blamed if the vocabulary lacks it."""
        self._marks.append((token, param))
        self._texts.append("")

    def markup(self, text: str, param: str = "tools") -> None:
        """Append a text of ours in which `<think>`, `</think>` and `｜DSML｜` are markers."""
        for index, piece in enumerate(_MARKUP.split(text)):
            if index % 2:
                self.mark(piece, param)
            else:
                self.text(piece)

    def render(self) -> str:
        """The prompt as one string."""
        marks = [token for token, _ in self._marks] + [""]
        return "".join(text + mark for text, mark in zip(self._texts, marks))

    def encode(self, tokenizer: Tokenizer, limit: int | None = None) -> list[int]:
        """Token ids. Raises `MissingMarkerError`, and `PromptTooLong` once more than `limit` ids are certain."""
        marks = []
        for token, param in self._marks:
            token_id = tokenizer.id_of(token)
            if token_id is None:
                raise MissingMarkerError(token, param)
            marks.append(token_id)
        ids: list[int] = []
        for index, text in enumerate(self._texts):
            if text:
                try:
                    left = None if limit is None else max(0, limit - len(ids))
                    ids += tokenizer.encode(text, added_tokens=False, limit=left)
                except PromptTooLong as exc:
                    assert limit is not None
                    raise PromptTooLong(limit, len(ids) + exc.at_least) from None
            ids += marks[index : index + 1]
        if limit is not None and len(ids) > limit:
            raise PromptTooLong(limit, len(ids))
        return ids
