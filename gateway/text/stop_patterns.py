"""Finds matches of regular expressions in streamed text, as `stop_strings` finds strings.

The expressions run as one nondeterministic automaton, a character at a time: time is linear in the text, whatever the
expression, and what may still become a match is known exactly. The match that ends first wins, the one that begins
first of those that end together; so the result depends on the text alone, and a quantifier's greed means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.text.pattern_parser import KNOWN_CHARS, Matches, Node, StopPattern, check_together
from gateway.text.stop_strings import StopStrings

HELD_CHARS: Final = 1_024
"""Text further back than that is released though a match may have begun there; such a match only cuts what is held."""


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
            StopPattern(text, Node("row", parts=tuple(Node("atom", atom=char.__eq__) for char in text)))
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
            if len(self._begins) >= KNOWN_CHARS:
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

    def _build(self, node: Node, after: int) -> int:
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
