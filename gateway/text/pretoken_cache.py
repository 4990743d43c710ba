"""A bounded cache from pretoken to token ids: text repeats its words, merging them again would cost most of the time.

The bound is on estimated bytes, so no input can grow it. Which pretokens are worth keeping is the tokenizer's choice.
"""

from __future__ import annotations

from typing import Final

_ENTRY_OVERHEAD: Final = 200


class PretokenCache:
    """Bounded map from pretoken to ids in two generations: when the young one is full it replaces the old one.

    A hit in the old generation moves the entry to the young one, so what is used stays. Races between threads can
    lose an entry, never give a wrong one.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._half = limit_bytes // 2
        self._young: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._young_bytes = 0

    def get(self, piece: str) -> list[int] | None:
        found = self._young.get(piece)
        if found is None and (found := self._old.get(piece)) is not None:
            self.put(piece, found)
        return found

    def put(self, piece: str, ids: list[int]) -> None:
        # A str takes at most 4 bytes a character, a list 8 a pointer; small ids beyond 256 are objects of 32 bytes.
        self._young_bytes += _ENTRY_OVERHEAD + 4 * len(piece) + 40 * len(ids)
        if self._young_bytes > self._half:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[piece] = ids
