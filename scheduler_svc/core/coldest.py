"""Least recently used first, without an entry for everything there is: a small heap that is exact up to a horizon.

Whoever owns the rows scans them in numpy once per some thousand evictions; the oldest become the heap, and the use time
of the last of them the horizon. Rows that become evictable later join the heap only if they are that old. Entries may
be stale; the owner checks each row it is handed.
"""

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BATCH = 4096
FOREVER = (1 << 63) - 1

Scan = Callable[[], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Every row that could be evicted now: (rows, their last use)."""


class Coldest:
    """Rows by last use. `batch` bounds the heap (but for ties and a factor of four)."""

    __slots__ = ("_batch", "_heap", "_horizon", "_scan")

    def __init__(self, scan: Scan, batch: int = BATCH) -> None:
        self._scan = scan
        self._batch = batch
        self._heap: list[tuple[int, int]] = []
        self._horizon = -1  # the heap names every evictable row whose last use is not later than this

    def offer(self, row: int, used: int) -> None:
        """A row has become evictable."""
        if used > self._horizon:
            return
        heapq.heappush(self._heap, (used, row))
        if len(self._heap) > 4 * self._batch:
            self._heap.sort()
            self._horizon = self._heap[self._batch - 1][0]
            while len(self._heap) > self._batch and self._heap[-1][0] > self._horizon:
                self._heap.pop()

    def next(self) -> tuple[int, int] | None:
        """The oldest (last use, row), possibly stale; None when nothing can be evicted. Not yet taken."""
        if not self._heap and self._horizon < FOREVER:
            self._refill()
        return self._heap[0] if self._heap else None

    def take(self) -> None:
        """Remove what `next` returned."""
        heapq.heappop(self._heap)

    def reset(self) -> None:
        """Everything may have changed: scan anew when next asked."""
        self._heap.clear()
        self._horizon = -1

    def _refill(self) -> None:
        rows, used = self._scan()
        self._horizon = FOREVER
        if len(rows) > self._batch:
            self._horizon = int(np.partition(used, self._batch - 1)[self._batch - 1])
            near = used <= self._horizon
            rows, used = rows[near], used[near]
        self._heap = sorted(zip(used.tolist(), rows.tolist(), strict=True))  # a sorted list is a heap
