"""Cuts text into pretokens the way the `pre_tokenizer` of a `tokenizer.json` says.

Understood: a Sequence (or a single one) of Split (behavior Isolated), Digits and, last, ByteLevel without prefix space.
Everything else is refused with `TokenizerFileError`, never approximated. The result is the list of pieces whose
concatenation is the input; mapping bytes to the byte-level alphabet is not done here.

The `tokenizers` library classifies characters by Unicode 16 (its Digits step by Unicode 17) while the `regex` package
follows newer editions. Characters assigned later are shown to the patterns as a noncharacter, so that the cut does not
depend on the installed `regex` release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import regex

REGEX_TIMEOUT_S: Final = 10.0
"""CPU bound of one pattern call; the known patterns are linear and stay far below it."""

_GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UNASSIGNED: Final = "\ufffe"
_AFTER_UNICODE_16: Final = (
    "558 58B-58C 5C8-5C9 88F B53-B54 C5C CDC 1ACF-1AF0 208F 209D-209F 20C1-20C4 2B96 2E60-2E63 A7CE-A7CF A7D2 A7D4 "
    "A7DD-A7F1 AB6C-AB6D FBC3-FBD2 FD90-FD91 FDC8-FDCE 107BB-107BF 10940-10959 10EC5-10EFB 11B0A-11B67 11DB0-11DF1 "
    "1246F 12475-1247F 12550-12686 16EA0-16ED3 16FF2-16FF6 187F8-187FF 18CD6-18CDA 18D09-191D2 1B123-1B128 1B168 "
    "1CCFA-1CCFC 1CEBA-1CEFD 1D127-1D128 1D1EB-1D1FF 1D250-1D281 1D6A6 1DB00-1DB1C 1DF1F-1DF24 1DF2B-1DFFF "
    "1E6C0-1E6FF 1F1AE 1F6D8-1F6D9 1F777-1F77A 1F7DA-1F7DB 1F7F1-1F7FF 1F8D0-1F8D8 1FA54-1FA57 1FA8A-1FA8E "
    "1FAC8-1FACD 1FADD 1FAEA-1FAEF 1FAF9-1FAFA 1FBFA 2B73A-2B73F 2B81E 2CEA2-2CEAD 323B0-33479 3D000-3FC3F"
)
_UNICODE_17_DIGITS: Final = "11DE0-11DE9 16FF4-16FF6"


class TokenizerFileError(ValueError):
    """A `tokenizer.json` that is broken or uses a part this tokenizer does not implement."""


class PretokenizerTimeoutError(RuntimeError):
    """A pattern of the tokenizer took longer than `REGEX_TIMEOUT_S` on some text."""


def _char_class(ranges: str) -> str:
    """The regex class of hexadecimal code point ranges such as `"558 58B-58C"`."""
    ends = [item.split("-") for item in ranges.split()]
    return "[" + "".join("-".join(f"\\U{int(end, 16):08x}" for end in pair) for pair in ends) + "]"


_NEWER: Final = regex.compile(_char_class(_AFTER_UNICODE_16))
_NEWER_THAN_DIGITS: Final = regex.compile(f"(?!{_char_class(_UNICODE_17_DIGITS)}){_char_class(_AFTER_UNICODE_16)}")


@dataclass(frozen=True, slots=True)
class _Step:
    """One isolating split: every match of `pattern` and every gap between matches becomes a piece."""

    pattern: regex.Pattern[str]
    hidden: regex.Pattern[str]

    def cut(self, text: str) -> list[str]:
        """Pieces of `text`, empty strings among them."""
        pieces: list[str] = self.pattern.split(text, timeout=REGEX_TIMEOUT_S)
        return pieces

    def cut_hiding_newer(self, text: str) -> list[str]:
        """As `cut`, with the characters of later Unicode editions shown as unassigned."""
        shown = self.hidden.sub(_UNASSIGNED, text)
        pieces: list[str] = []
        at = 0
        for piece in self.cut(shown):
            pieces.append(text[at : at + len(piece)])
            at += len(piece)
        return pieces


class Pretokenizer:
    """The compiled steps of one `pre_tokenizer` node."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    @classmethod
    def from_json(cls, node: Mapping[str, Any] | None) -> Pretokenizer:
        """Compile the `pre_tokenizer` node; raises `TokenizerFileError` on anything not understood."""
        if node is None:
            raise TokenizerFileError("tokenizer.json: pre_tokenizer is missing; a byte-level BPE needs ByteLevel")
        nodes = node.get("pretokenizers", []) if node.get("type") == "Sequence" else [node]
        if not nodes or nodes[-1].get("type") != "ByteLevel":
            raise TokenizerFileError("tokenizer.json: the last pre_tokenizer must be ByteLevel")
        steps = [step for part in nodes[:-1] for step in _compile(part)]
        return cls(steps + _byte_level(nodes[-1]))

    def split(self, text: str) -> list[str]:
        """Pretokens of `text`, none empty, in order. Raises `PretokenizerTimeoutError`."""
        plain = text.isascii() or _NEWER.search(text) is None
        pieces = [text]
        try:
            for step in self._steps:
                pieces = _cut_all(step.cut if plain else step.cut_hiding_newer, pieces)
        except TimeoutError as exc:
            raise PretokenizerTimeoutError(
                f"the tokenizer's pattern needed more than {REGEX_TIMEOUT_S:g} s on {len(text)} characters"
            ) from exc
        return [piece for piece in pieces if piece]


def _cut_all(cut: Callable[[str], list[str]], pieces: list[str]) -> list[str]:
    out: list[str] = []
    for piece in pieces:
        if piece:
            out += cut(piece)
    return out


def _isolating(pattern: str, *, hidden: regex.Pattern[str] = _NEWER) -> _Step:
    """A step whose `split` also returns the matches: the pattern becomes its only group."""
    try:
        compiled = regex.compile(f"({pattern})")
    except regex.error as exc:
        raise TokenizerFileError(f"tokenizer.json: Split pattern {pattern!r} does not compile: {exc}") from exc
    if compiled.groups != 1:
        raise TokenizerFileError(f"tokenizer.json: Split pattern {pattern!r} has capture groups; use (?:...)")
    if compiled.match(""):
        raise TokenizerFileError(f"tokenizer.json: Split pattern {pattern!r} matches the empty string")
    return _Step(compiled, hidden)


def _compile(node: Mapping[str, Any]) -> list[_Step]:
    """The steps of one node that is not the last."""
    kind = node.get("type")
    if kind == "Split":
        return [_isolating(_split_pattern(node))]
    if kind == "Digits":
        one = bool(node.get("individual_digits"))
        return [_isolating(r"\p{N}" if one else r"\p{N}+", hidden=_NEWER_THAN_DIGITS)]
    raise TokenizerFileError(f"tokenizer.json: pre_tokenizer {kind!r} is not supported (Split, Digits, ByteLevel are)")


def _split_pattern(node: Mapping[str, Any]) -> str:
    """The regular expression of a Split node. With Isolated, `invert` changes nothing: both sides are kept."""
    if node.get("behavior") != "Isolated":
        raise TokenizerFileError(
            f"tokenizer.json: Split behavior {node.get('behavior')!r} is not supported (Isolated is)"
        )
    pattern = node.get("pattern")
    if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
        return str(pattern["Regex"])
    if isinstance(pattern, Mapping) and isinstance(pattern.get("String"), str):
        return str(regex.escape(pattern["String"]))
    raise TokenizerFileError(f"tokenizer.json: Split pattern {pattern!r} is neither a Regex nor a String")


def _byte_level(node: Mapping[str, Any]) -> list[_Step]:
    if node.get("add_prefix_space"):
        raise TokenizerFileError("tokenizer.json: ByteLevel with add_prefix_space is not supported")
    return [_isolating(_GPT2_PATTERN)] if node.get("use_regex", True) else []
