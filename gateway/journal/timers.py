"""Timers of open requests as one heap; entries of finished requests are dropped lazily and do not pile up."""

import heapq
from collections.abc import Container
from enum import Enum

from meshkit.types import RequestId
from meshkit.uplink import NEVER


class Alarm(Enum):
    """What is due. An alarm whose time no longer matches the entry is ignored by the journal."""

    DEADLINE = 0
    SUBMIT = 1
    WAIT = 2


class Timers:
    """Min-heap of (time, sequence, alarm, request)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Alarm, RequestId]] = []
        self._sequence = 0

    def set(self, at_ns: int, alarm: Alarm, request_id: RequestId, live: Container[RequestId], live_count: int) -> None:
        """Add an alarm. `live` tells requests that are still open, for the clean-up."""
        self._sequence += 1
        heapq.heappush(self._heap, (at_ns, self._sequence, alarm, request_id))
        if len(self._heap) > 8 * live_count + 64:
            self._heap = [item for item in self._heap if item[3] in live]
            heapq.heapify(self._heap)

    def due(self, now_ns: int) -> list[tuple[int, Alarm, RequestId]]:
        """Take every alarm whose time has come, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, alarm, request_id = heapq.heappop(self._heap)
            found.append((at_ns, alarm, request_id))
        return found

    def next_ns(self) -> int:
        """When the next alarm is due."""
        return self._heap[0][0] if self._heap else NEVER

    def __len__(self) -> int:
        return len(self._heap)
