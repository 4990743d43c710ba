"""What one instance is believed to hold in its prefix cache: page keys in the order of their last use, bounded.

Keys are chained, and a chain is noted with its deepest page as the oldest: whatever is forgotten, what is left is
always a whole beginning of each chain, so that the longest known prefix is found by bisection.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

MOST_KEYS: Final = 1 << 16
"""Of one instance: 16 million tokens, some 12 MB."""


class Known(NamedTuple):
    """How much of a prompt is believed to be there, in pages."""

    pages: int
    sure: int  # of them, up to where a prompt was seen to end: a resume point was kept there
    stamp: int  # when the page at `sure` was last used


class KnownPages:
    """Least recently used keys go first."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self.most = most
        self._stamps: OrderedDict[bytes, int] = OrderedDict()  # oldest first; 2 * time + whether a prompt ended there
        self._now = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def find(self, keys: Sequence[bytes]) -> Known:
        """The longest known beginning of a chain."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._stamps:
                low = middle + 1
            else:
                high = middle
        for sure in range(low, 0, -1):
            stamp = self._stamps.get(keys[sure - 1], 0)
            if stamp & 1:
                return Known(low, sure, stamp >> 1)
        return Known(low, 0, 0)

    def note(self, keys: Sequence[bytes]) -> None:
        """A prompt goes there, and its pages with it."""
        stamps = self._stamps
        self._now += 1
        for key in reversed(keys[: self.most]):
            stamps[key] = 2 * self._now | stamps.get(key, 0) & 1
            stamps.move_to_end(key)
        while len(stamps) > self.most:
            stamps.popitem(last=False)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """The end of a chain that was noted did not get there, unless a prompt was seen to end with it."""
        for key in reversed(keys):
            if self._stamps.get(key, 1) & 1:
                return
            del self._stamps[key]

    def ends(self, key: bytes) -> None:
        """A prompt that ends with this page was computed: it can be resumed there."""
        if key in self._stamps:
            self._stamps[key] |= 1

    def forget_until(self, stamp: int) -> None:
        """What was last used at that time is gone, so all that was used before is as well."""
        while self._stamps and next(iter(self._stamps.values())) >> 1 <= stamp:
            self._stamps.popitem(last=False)

    def clear(self) -> None:
        self._stamps.clear()
