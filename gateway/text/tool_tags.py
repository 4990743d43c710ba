"""Recognises one DSML tag in text whose `｜DSML｜` tokens are a character that no text can contain.

A tag is `<` or `</`, the marker, a known word, attributes and `>`. Reading is incremental: a tag that may still become
one is pending. Deviations whose meaning is clear pass (space before `>`, `/>`, missing or further attributes). What a
tag does where it stands is `tool_calls`' business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from gateway.text.prompt import DSML

MARK: Final = "\ud800"
"""Stands for the token `｜DSML｜`; a lone surrogate, which decoding never yields."""

MAX_TAG: Final = 1024
"""Characters after the marker within which a tag must end; bounds what is held back."""

Word = Literal["tool_calls", "invoke", "parameter"]
_WORDS: Final[tuple[Word, ...]] = ("tool_calls", "invoke", "parameter")
_SPELLED: Final = (f"</{DSML}", f"<{DSML}", DSML)
_ATTRIBUTES: Final = re.compile(r'(?:\s++\w++="[^"]*+")*+\s*+/?+')
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')
_KEY_WITH_QUOTES: Final = re.compile(r' name="(.*)" string="(true|false)"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag. `end` is the index behind it; `lead` its first characters, "" where the model left them out.

    `name` is None without such an attribute, `string` unless it is "true" or "false". `closed` is `/>`.
    """

    lead: Literal["<", "</", ""]
    word: Word
    end: int
    name: str | None = None
    string: bool | None = None
    closed: bool = False

    @property
    def opens(self) -> bool:
        return self.lead == "<"

    @property
    def closes(self) -> bool:
        return self.lead == "</"


@dataclass(frozen=True, slots=True)
class Pending:
    """Not decided yet; the next reading of the same tag starts at `scan`."""

    scan: int


def lead_of(text: str, start: int, mark: int) -> Literal["<", "</", ""]:
    """What stands before the marker at `mark`; characters before `start` do not count."""
    if mark - 2 >= start and text.startswith("</", mark - 2):
        return "</"
    return "<" if mark - 1 >= start and text[mark - 1] == "<" else ""


def open_end(text: str, start: int, *, spelled: bool = False) -> int:
    """Index from which the text may be the beginning of a tag's lead, or of a `spelled` marker; its length if not."""
    if spelled:
        for size in range(min(len(_SPELLED[0]) - 1, len(text) - start), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in _SPELLED):
                return len(text) - size
        return len(text)
    if text.endswith("</", start):
        return len(text) - 2
    return len(text) - text.endswith("<", start)


def read_tag(text: str, lead: Literal["<", "</", ""], mark: int, scan: int = 0) -> Tag | Pending | int:
    """The tag whose marker is at `mark`. An index instead: it is none, and what it spoiled ends there."""
    at = mark + 1
    word = next((word for word in _WORDS if text.startswith(word, at)), None)
    if word is None:
        rest = text[at : at + 10]
        return Pending(0) if any(word.startswith(rest) for word in _WORDS) else at
    at += len(word)
    if at == len(text):
        return Pending(0)
    if text[at] not in " \t\r\n/>":
        return mark + 1
    return _read_attributes(text, lead, word, at, scan)


def _read_attributes(text: str, lead: Literal["<", "</", ""], word: Word, at: int, scan: int) -> Tag | Pending | int:
    """From behind the word: to the first `>` up to which the attributes make sense."""
    limit = at + MAX_TAG
    scan = max(scan, at)
    while (close := text.find(">", scan, limit)) >= 0:
        inner = text[at:close]
        if MARK in inner:
            return at
        tag = _tag(lead, word, inner, close + 1)
        if tag is not None:
            return tag
        scan = close + 1
    if len(text) >= limit or text.find(MARK, at) >= 0:
        return at
    return Pending(len(text))


def _tag(lead: Literal["<", "</", ""], word: Word, inner: str, end: int) -> Tag | None:
    if _ATTRIBUTES.fullmatch(inner):
        found = dict(_ATTRIBUTE.findall(inner))
        string = {"true": True, "false": False}.get(found.get("string", ""))
        return Tag(lead, word, end, found.get("name"), string, inner.endswith("/"))
    quoted = _KEY_WITH_QUOTES.fullmatch(inner) if word == "parameter" else None
    return Tag(lead, word, end, quoted[1], quoted[2] == "true") if quoted else None
