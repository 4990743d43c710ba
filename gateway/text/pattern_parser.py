"""Regular expressions to stop at, read into a tree: literals, classes, groups, alternatives, repetitions.

`re` says whether an expression is sound and what an atom matches; here it is only taken apart. Anchors, look-around,
back references and flags are refused: what they look at is not in the text that a match consists of.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

MOST_STATES: Final = 512
"""Of all expressions of a request together, once repetitions are written out."""
KNOWN_CHARS: Final = 4_096
"""Characters whose answer is remembered, per atom."""
_ESCAPES: Final = re.compile(r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9])")
_REPEAT: Final = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}|\{,(\d+)\}")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)

Matches = Callable[[str], bool]


class PatternError(ValueError):
    """The expression is none, or not one of these."""


@dataclass(frozen=True, slots=True)
class Node:
    """One atom, or parts in a row, or one of several parts, or a part repeated."""

    kind: Literal["atom", "row", "either", "repeat"]
    atom: Matches | None = None
    parts: tuple[Node, ...] = ()
    least: int = 0
    most: int | None = None  # None: without end

    def size(self) -> int:
        """States, with repetitions written out."""
        if self.kind == "atom":
            return 1
        inner = sum(part.size() for part in self.parts)
        if self.kind == "repeat":
            times = self.least + 1 if self.most is None else self.most
            return inner * max(1, times) + 1
        return inner + len(self.parts)

    def is_nullable(self) -> bool:
        if self.kind == "repeat":
            return self.least == 0 or self.parts[0].is_nullable()
        if self.kind == "either":
            return any(part.is_nullable() for part in self.parts)
        return self.kind == "row" and all(part.is_nullable() for part in self.parts)


@dataclass(frozen=True, slots=True)
class StopPattern:
    """One expression, checked; or a string, which stands for itself."""

    text: str
    node: Node


@lru_cache(maxsize=256)
def parse_pattern(text: str) -> StopPattern:
    """Raises PatternError that says what is wrong or not supported, and where."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what may come to mean something else in a class
            re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"it is no regular expression: {error}") from None
    node = _Parser(text).parse()
    if node.size() > MOST_STATES:
        raise PatternError(f"its repetitions make {node.size()} states; allowed are {MOST_STATES}")
    if node.is_nullable():
        raise PatternError("it matches the empty text, which is everywhere")
    return StopPattern(text, node)


def check_together(patterns: Sequence[StopPattern]) -> None:
    """Raises PatternError where all of them are too much for one request."""
    size = sum(it.node.size() for it in patterns)
    if size > MOST_STATES:
        raise PatternError(f"together they make {size} states; allowed are {MOST_STATES}")


class _Parser:
    """Recursive descent over an expression that `re` has accepted."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Node:
        node = self._either()
        assert self._at == len(self._text), "re would have refused it"
        return node

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _either(self) -> Node:
        parts = [self._row()]
        while self._next() == "|":
            self._at += 1
            parts.append(self._row())
        return parts[0] if len(parts) == 1 else Node("either", parts=tuple(parts))

    def _row(self) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Node("row", parts=tuple(parts))

    def _one(self) -> Node:
        at, char = self._at, self._next()
        if char == "(":
            return self._group()
        if char == "[":
            found = _CLASS.match(self._text, at)
            assert found is not None, "re would have refused it"
            return self._atom(found[0])
        if char == "\\":
            escape = _ESCAPES.match(self._text, at)
            if escape is None:
                raise self._unsupported(self._text[at : at + 2])
            return self._atom(escape[0])
        if char in "^$":
            raise self._unsupported(char)
        return self._atom(char)

    def _group(self) -> Node:
        if self._text.startswith("(?:", self._at):
            self._at += 3
        elif self._text.startswith("(?", self._at):
            raise self._unsupported(self._text[self._at : self._at + 3])
        else:
            self._at += 1
        node = self._either()
        self._at += 1
        return node

    def _atom(self, source: str) -> Node:
        self._at += len(source)
        return Node("atom", atom=_matcher(source))

    def _repeated(self, node: Node) -> Node:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return node
        self._at = found.end()
        if found[0] in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
        elif found[4] is not None:
            least, most = 0, int(found[4])
        else:
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
        if self._next() == "?":  # lazy: the first end wins anyway
            self._at += 1
        elif self._next() == "+":
            raise self._unsupported(found[0] + "+")
        return Node("repeat", parts=(node,), least=least, most=most)

    def _unsupported(self, what: str) -> PatternError:
        return PatternError(
            f"{what!r} at {self._at} is not supported; literals, classes, groups, | and repetitions are"
        )


def _matcher(source: str) -> Matches:
    """Whether a character is what an atom of an expression stands for."""
    if len(source) == 1 and source != ".":
        return source.__eq__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fullmatch = re.compile(source).fullmatch
    known: dict[str, bool] = {}

    def matches(char: str) -> bool:
        answer = known.get(char)
        if answer is None:
            if len(known) >= KNOWN_CHARS:
                known.clear()
            answer = known[char] = fullmatch(char) is not None
        return answer

    return matches
