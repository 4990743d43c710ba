"""Finds stop strings in streamed text and holds back what may still become one.

An Aho-Corasick automaton over all stop strings: one step a character, whatever their number. The match that ends first
wins, the longest of those that end together; so the result depends on the text alone, not on how it was cut into
pieces. Which text is searched (content only, or everything) is the output parser's business.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The automaton; immutable, one for all choices of a request."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string would match everywhere"
        self.next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self.fail = [0] * len(self.next)
        self._link()
        self.firsts = frozenset(self.next[0])
        self.any = bool(strings)
        """Whether there is anything to search for."""

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            child = self.next[node].get(char)
            if child is None:
                child = len(self.next)
                self.next[node][char] = child
                self.next.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append(None)
            node = child
        self.match[node] = string

    def _link(self) -> None:
        """Failure links, breadth first; a node without a match of its own takes the one of its link."""
        queue = list(self.next[0].values())
        for node in queue:
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                queue.append(child)
            if self.match[node] is None:
                self.match[node] = self.match[self.fail[node]]

    def scanner(self) -> StopScanner:
        return StopScanner(self)

    def step(self, node: int, char: str) -> int:
        """The node after one more character."""
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)


class StopScanner:
    """The search in one text. After a match it must not be fed again."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""
        self.matched_text = ""
        """The stop string found."""

    def passes(self, text: str) -> bool:
        """Nothing is held back, and nothing in this text could begin a stop string: `feed` would let it through."""
        return self._node == 0 and self._stops.firsts.isdisjoint(text)

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that is safe to release, and the stop string found right behind it, if any.

        Unarmed, stop strings are passed over (fewer tokens than the request's minimum).
        """
        stops = self._stops
        node = self._node
        if self.passes(text):
            return text, None
        whole = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            node = stops.step(node, char)
            match = stops.match[node]
            if match is not None and armed:
                self._node, self._held, self.matched_text = 0, "", match
                return whole[: end - len(match)], match
        self._node = node
        safe = len(whole) - stops.depth[node]
        self._held = whole[safe:]
        return whole[:safe], None

    def finish(self) -> str:
        """What was held back and has not become a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
