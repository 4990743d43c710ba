"""Least recently used first, without an entry for everything there is: a small heap that is exact up to a horizon.

Whoever owns the rows scans them in numpy once per some thousand evictions; the oldest become the heap, and the last
of them the horizon. Rows that become evictable later join the heap only if they are that old. Entries may
be stale; the owner checks each row it is handed.
"""

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BATCH = 2048
NEVER, FOREVER = (-1, 0), (1 << 63, 0)

Scan = Callable[[], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Every row that could be evicted now: (rows, their last use)."""


class Coldest:
    """Rows by last use. `batch` bounds the heap, but for a factor of four."""

    __slots__ = ("_horizon", "_scan", "batch", "heap")

    def __init__(self, scan: Scan, batch: int = BATCH) -> None:
        self._scan = scan
        self.batch = batch
        self.heap: list[tuple[int, int]] = []
        self._horizon = NEVER  # the heap names every evictable row up to this (last use, row)

    def offer(self, row: int, used: int) -> None:
        """A row has become evictable."""
        if (used, row) > self._horizon:
            return
        heapq.heappush(self.heap, (used, row))
        if len(self.heap) > 4 * self.batch:
            self.heap.sort()
            del self.heap[self.batch :]
            self._horizon = self.heap[-1]

    def next(self) -> tuple[int, int] | None:
        """The oldest (last use, row), possibly stale; None when nothing can be evicted. Not yet taken."""
        if not self.heap and self._horizon < FOREVER:
            self._refill()
        return self.heap[0] if self.heap else None

    def take(self) -> None:
        """Remove what `next` returned."""
        heapq.heappop(self.heap)

    def reset(self) -> None:
        """Everything may have changed: scan anew when next asked."""
        self.heap.clear()
        self._horizon = NEVER

    def _refill(self) -> None:
        rows, used = self._scan()
        self._horizon = FOREVER
        if len(rows) > self.batch:
            near = used <= np.partition(used, self.batch - 1)[self.batch - 1]
            rows, used = rows[near], used[near]
            first = np.lexsort((rows, used))[: self.batch]
            rows, used = rows[first], used[first]
            self._horizon = (int(used[-1]), int(rows[-1]))
        self.heap = sorted(zip(used.tolist(), rows.tolist(), strict=True))  # a sorted list is a heap
