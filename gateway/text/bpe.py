"""Byte-pair merging of one pretoken over token ids: the lowest merge rank first, ties from left to right.

`BytePairMerger.encode` takes the UTF-8 bytes of a pretoken. Short ones go through a plain scan; long ones through rank
buckets over a linked list, whose cost grows about linearly, so that one run of a million letters stays cheap. Both
give the same ids. Caching and splitting are the callers' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

_SHORT: Final = 24
"""Symbols up to which the quadratic scan is faster than building the linked list."""
_PAIR_BITS: Final = 32
_DEAD: Final = -1


class BytePairMerger:
    """Merge table of one vocabulary.

    `byte_ids[b]` is the id of the single-byte token b; `merges` maps (left id, right id) to (rank, id of the result).
    """

    def __init__(self, byte_ids: list[int], merges: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        assert len(byte_ids) == 256
        self._byte_ids = byte_ids
        self._rank: dict[int, int] = {}
        self._result: dict[int, int] = {}
        for (left, right), (rank, result) in merges.items():
            self._rank[left << _PAIR_BITS | right] = rank
            self._result[rank] = result
        self._no_rank = max(self._result, default=-1) + 1

    def encode(self, data: bytes) -> list[int]:
        """Token ids of one pretoken."""
        byte_ids = self._byte_ids
        symbols = [byte_ids[byte] for byte in data]
        if len(symbols) <= _SHORT:
            return self._merge_short(symbols)
        return self._merge_long(symbols)

    def _merge_short(self, symbols: list[int]) -> list[int]:
        """Merge in place: keep the rank of every adjacent pair, take the leftmost lowest until none is left."""
        rank_of = self._rank.get
        none = self._no_rank
        ranks = [rank_of(a << _PAIR_BITS | b, none) for a, b in pairwise(symbols)]
        while ranks:
            best = min(ranks)
            if best == none:
                break
            at = ranks.index(best)
            merged = self._result[best]
            symbols[at : at + 2] = [merged]
            del ranks[at]
            if at:
                ranks[at - 1] = rank_of(symbols[at - 1] << _PAIR_BITS | merged, none)
            if at < len(ranks):
                ranks[at] = rank_of(merged << _PAIR_BITS | symbols[at + 1], none)
        return symbols

    def _merge_long(self, symbols: list[int]) -> list[int]:
        """Merge through buckets: one list of candidate positions per rank, ranks in a heap.

        A bucket is worked off in ascending positions. When a merge makes a pair of a lower rank, the rest of the
        bucket goes back and the lower rank comes first, exactly as a heap of (rank, position) would have it.
        """
        size = len(symbols)
        rank_of = self._rank.get
        buckets: dict[int, list[int]] = {}
        for at, (a, b) in enumerate(pairwise(symbols)):
            rank = rank_of(a << _PAIR_BITS | b)
            if rank is not None:
                buckets.setdefault(rank, []).append(at)
        heap = sorted(buckets)
        following = list(range(1, size + 1))
        previous = list(range(-1, size - 1))
        while heap:
            rank = heappop(heap)
            merged = self._result[rank]
            positions = buckets.pop(rank)
            positions.sort()
            for index, at in enumerate(positions):
                left = symbols[at]
                right_at = following[at]
                if left == _DEAD or right_at == size:
                    continue
                if rank_of(left << _PAIR_BITS | symbols[right_at]) != rank:
                    continue
                symbols[at] = merged
                symbols[right_at] = _DEAD
                after = following[at] = following[right_at]
                lower = False
                if after < size:
                    previous[after] = at
                    lower = _offer(buckets, heap, rank_of(merged << _PAIR_BITS | symbols[after]), at, rank)
                before = previous[at]
                if before >= 0:
                    pair = symbols[before] << _PAIR_BITS | merged
                    lower = _offer(buckets, heap, rank_of(pair), before, rank) or lower
                if lower:
                    buckets[rank] = positions[index + 1 :]
                    heappush(heap, rank)
                    break
        return [symbol for symbol in symbols if symbol != _DEAD]


def _offer(buckets: dict[int, list[int]], heap: list[int], rank: int | None, at: int, current: int) -> bool:
    """Record the new pair at `at`; true when its rank comes before the rank being worked off."""
    if rank is None:
        return False
    bucket = buckets.get(rank)
    if bucket is None:
        buckets[rank] = [at]
        heappush(heap, rank)
    else:
        bucket.append(at)
    return rank < current
