"""Finds matches of regular expressions in streamed text, as `stop_strings` finds strings.

The expressions run as one nondeterministic automaton, a character at a time: time is linear in the text, whatever the
expression, and what may still become a match is known exactly. The match that ends first wins, the one that begins
first of those that end together; so the result depends on the text alone, and a quantifier's greed means nothing.
Anchors, look-around, back references and flags are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from gateway.text.stop_strings import StopStrings

MOST_STATES: Final = 512
"""Of all expressions of a request together, once repetitions are written out."""
HELD_CHARS: Final = 1_024
"""Text further back than that is released though a match may have begun there; such a match only cuts what is held."""
_KNOWN_CHARS: Final = 4_096  # remembered per atom
_ESCAPES: Final = re.compile(r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9])")
_REPEAT: Final = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}|\{,(\d+)\}")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)

Matches = Callable[[str], bool]


class PatternError(ValueError):
    """The expression is none, or not one of these."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One atom, or parts in a row, or one of several parts, or a part repeated."""

    kind: Literal["atom", "row", "either", "repeat"]
    atom: Matches | None = None
    parts: tuple[_Node, ...] = ()
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
    node: _Node


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

    def parse(self) -> _Node:
        node = self._either()
        assert self._at == len(self._text), "re would have refused it"
        return node

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _either(self) -> _Node:
        parts = [self._row()]
        while self._next() == "|":
            self._at += 1
            parts.append(self._row())
        return parts[0] if len(parts) == 1 else _Node("either", parts=tuple(parts))

    def _row(self) -> _Node:
        parts: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else _Node("row", parts=tuple(parts))

    def _one(self) -> _Node:
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

    def _group(self) -> _Node:
        if self._text.startswith("(?:", self._at):
            self._at += 3
        elif self._text.startswith("(?", self._at):
            raise self._unsupported(self._text[self._at : self._at + 3])
        else:
            self._at += 1
        node = self._either()
        self._at += 1
        return node

    def _atom(self, source: str) -> _Node:
        self._at += len(source)
        return _Node("atom", atom=_matcher(source))

    def _repeated(self, node: _Node) -> _Node:
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
        return _Node("repeat", parts=(node,), least=least, most=most)

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
            if len(known) >= _KNOWN_CHARS:
                known.clear()
            answer = known[char] = fullmatch(char) is not None
        return answer

    return matches


@dataclass(frozen=True, slots=True)
class _State:
    """Consumes a character that its atom matches; then those states are live, and that expression has matched."""

    atom: Matches
    after: tuple[int, ...]
    ends: str | None


class StopPatterns:
    """The automaton of all stop strings and expressions of a request; one for all its choices. `any` is true."""

    any = True

    def __init__(self, strings: Sequence[str], patterns: Sequence[StopPattern]) -> None:
        """Raises PatternError as `check_together`."""
        literals = [
            StopPattern(text, _Node("row", parts=tuple(_Node("atom", atom=char.__eq__) for char in text)))
            for text in strings
        ]
        check_together(patterns)
        built = _Builder()
        firsts = [built.add(it) for it in (*literals, *patterns)]
        self.states = built.finished()
        self.firsts = tuple(dict.fromkeys(state for first in firsts for state in built.reach(first)[0]))
        self._begins: dict[str, bool] = {}

    def begins(self, char: str) -> bool:
        """Whether a match may begin with this character."""
        answer = self._begins.get(char)
        if answer is None:
            if len(self._begins) >= _KNOWN_CHARS:
                self._begins.clear()
            answer = self._begins[char] = any(self.states[first].atom(char) for first in self.firsts)
        return answer

    def scanner(self) -> PatternScanner:
        return PatternScanner(self)


class _Builder:
    """Thompson's construction, from the end backwards: a node is built in front of what comes after it."""

    def __init__(self) -> None:
        self._atoms: list[Matches | None] = []
        self._next: list[list[int]] = []
        self._ends: list[str | None] = []

    def add(self, pattern: StopPattern) -> int:
        return self._build(pattern.node, self._state(None, [], pattern.text))

    def _state(self, atom: Matches | None, after: list[int], ends: str | None = None) -> int:
        self._atoms.append(atom)
        self._next.append(after)
        self._ends.append(ends)
        return len(self._atoms) - 1

    def _build(self, node: _Node, after: int) -> int:
        if node.kind == "atom":
            return self._state(node.atom, [after])
        if node.kind == "either":
            return self._state(None, [self._build(part, after) for part in node.parts])
        if node.kind == "row":
            for part in reversed(node.parts):
                after = self._build(part, after)
            return after
        (part,) = node.parts
        if node.most is None:
            loop = self._state(None, [after])
            self._next[loop].append(self._build(part, loop))
            after = loop
        else:
            end = after
            for _ in range(node.most - node.least):
                after = self._state(None, [self._build(part, after), end])
        for _ in range(node.least):
            after = self._build(part, after)
        return after

    def reach(self, state: int) -> tuple[tuple[int, ...], str | None]:
        """States with an atom that are live once this one is, and what has matched with it."""
        seen, queue, live, ends = {state}, [state], [], None
        for at in queue:
            if self._atoms[at] is not None:
                live.append(at)
                continue
            ends = ends or self._ends[at]
            for target in self._next[at]:
                if target not in seen:
                    seen.add(target)
                    queue.append(target)
        return tuple(live), ends

    def finished(self) -> dict[int, _State]:
        states = {}
        for number, atom in enumerate(self._atoms):
            if atom is not None:
                after, ends = self.reach(self._next[number][0])
                states[number] = _State(atom, after, ends)
        return states


class PatternScanner:
    """The search in one text; used as a `StopScanner` is. After a match it must not be fed again."""

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._live: dict[int, int] = {}  # state -> where the earliest match through it begins, from the held text on
        self._held = ""
        self.matched_text = ""
        """Of a match: what of it was still held."""

    def passes(self, text: str) -> bool:
        """Nothing is held back, and no match could begin in this text: `feed` would let it through."""
        return not self._live and not any(map(self._patterns.begins, text))

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that is safe to release, and the string or expression that matched right behind it, if one did."""
        states, whole = self._patterns.states, self._held + text
        live, released = self._live, 0
        for at, char in enumerate(text, len(self._held)):
            if not live and not self._patterns.begins(char):
                released = at + 1
                continue
            later: dict[int, int] = {}
            found: tuple[int, str] | None = None
            fresh = ((first, at) for first in self._patterns.firsts)
            for number, start in (*live.items(), *fresh):
                state = states[number]
                if not state.atom(char):
                    continue
                if state.ends is not None and (found is None or start < found[0]):
                    found = (start, state.ends)
                for target in state.after:
                    if start < later.get(target, at + 1):
                        later[target] = start
            if found is not None and armed:
                start = max(found[0], released)
                self._live, self._held, self.matched_text = {}, "", whole[start : at + 1]
                return whole[:start], found[1]
            live = later
            begins = min(live.values(), default=at + 1)
            released = max(released, begins, at + 1 - HELD_CHARS)
        self._held = whole[released:]
        self._live = {number: start - released for number, start in live.items()}
        return whole[:released], None

    def finish(self) -> str:
        """What was held back and has not become a match."""
        held, self._held, self._live = self._held, "", {}
        return held


def stop_search(strings: Sequence[str], patterns: Sequence[StopPattern]) -> StopStrings | StopPatterns:
    """What looks for both; strings alone are found faster. Raises PatternError."""
    return StopPatterns(strings, patterns) if patterns else StopStrings(strings)
