"""Who holds which page, tail and slot: pools of numbered places with reference counts.

Each place is in exactly one class: free, owned (a placed choice refers to it), cached (only the prefix index does) or
quarantined (its worker has attached but not yet dumped). The class sizes are kept as counters and always add up to the
pool. What the places contain, and when a worker hears of it, is decided elsewhere.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class Pool:
    """Places base..base+size-1 of one rank. A new pool is quarantined as a whole; `settle` opens it."""

    __slots__ = (
        "base",
        "cached",
        "free",
        "kept",
        "kept_view",
        "known",
        "owned",
        "quarantined",
        "run",
        "run_view",
        "size",
    )

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.free: list[int] = []  # last in, first out
        self.run = np.zeros(size, np.int32)  # references by placed choices
        self.kept = np.zeros(size, np.int8)  # 1 = the prefix index knows it
        self.owned = 0
        self.cached = 0
        self.known = 0  # places the index knows, owned ones included
        self.quarantined = size
        # One element through a memoryview costs a third of one through an array.
        self.run_view, self.kept_view = self.run.data, self.kept.data

    def settle(self, used: Iterable[int], kept: Iterable[int] = ()) -> None:
        """End of quarantine: every mention in `used` is one running reference, `kept` are known to the index."""
        assert self.quarantined == self.size, "a pool settles once"
        self.quarantined = 0
        for place in used:
            self.run_view[place - self.base] += 1
        for place in kept:
            self.kept_view[place - self.base] = 1
        self.known = int(np.count_nonzero(self.kept))
        self.owned = int(np.count_nonzero(self.run))
        self.cached = int(np.count_nonzero((self.run == 0) & (self.kept == 1)))
        idle = np.flatnonzero((self.run == 0) & (self.kept == 0))
        self.free = (idle[::-1] + self.base).tolist()

    def take(self) -> int:
        """A free place, now owned by the caller."""
        place = self.free.pop()
        self.run_view[place - self.base] = 1
        self.owned += 1
        return place

    def share(self, place: int) -> None:
        """One more running reference to a place that is in use."""
        i = place - self.base
        assert self.run_view[i] or self.kept_view[i], "only a place in use can be shared"
        if not self.run_view[i]:
            self.cached -= 1
            self.owned += 1
        self.run_view[i] += 1

    def share_all(self, places: NDArray[np.int32]) -> None:
        """`share` for many distinct places at once."""
        at = places - self.base
        idle = int(np.count_nonzero(self.run[at] == 0))
        assert not idle or (self.run[at] + self.kept[at] > 0).all(), "only a place in use can be shared"
        self.run[at] += 1
        self.cached -= idle
        self.owned += idle

    def drop(self, place: int) -> bool:
        """One running reference less; True if the place is free now."""
        i = place - self.base
        assert self.run_view[i] > 0, "dropped more often than taken"
        self.run_view[i] -= 1
        if self.run_view[i]:
            return False
        self.owned -= 1
        if self.kept_view[i]:
            self.cached += 1
            return False
        self.free.append(place)
        return True

    def keep(self, place: int) -> None:
        """The index knows a place that is in use."""
        i = place - self.base
        assert self.run_view[i] > 0, "only a place in use can be kept"
        assert not self.kept_view[i], "kept twice"
        self.kept_view[i] = 1
        self.known += 1

    def forget(self, place: int) -> bool:
        """The index no longer knows it; True if the place is free now."""
        i = place - self.base
        assert self.kept_view[i], "forgotten more often than kept"
        self.kept_view[i] = 0
        self.known -= 1
        if self.run_view[i]:
            return False
        self.cached -= 1
        self.free.append(place)
        return True

    def adds_up(self) -> bool:
        """The cheap check: class sizes against the pool's size."""
        return len(self.free) + self.owned + self.cached + self.quarantined == self.size

    def recount(self, run: Sequence[int], kept: Sequence[int] | NDArray[np.int32]) -> None:
        """The full check, against references found by walking the tables: one mention each.

        AssertionError names the first difference.
        """
        assert self.adds_up(), f"pool at {self.base}: classes do not add up to {self.size}"
        found, known = self._count(run), self._count(kept)
        if self.quarantined:
            assert not found.any() and not known.any(), "a quarantined pool is not in use"
            return
        for ours, theirs, what in ((self.run, found, "owners"), (self.kept, known, "kept")):
            if (ours != theirs).any():
                i = int(np.flatnonzero(ours != theirs)[0])
                raise AssertionError(f"place {self.base + i}: {ours[i]} {what}, found {theirs[i]}")
        free = self._count(self.free)
        assert (free <= 1).all(), "a place is free twice"
        assert not ((free > 0) & ((self.run > 0) | (self.kept > 0))).any(), "free yet in use"
        assert self.owned == np.count_nonzero(self.run), "owned counter is off"
        assert self.cached == np.count_nonzero((self.run == 0) & (self.kept > 0)), "cached is off"
        assert self.known == np.count_nonzero(self.kept), "the count of what the index knows is off"

    def _count(self, places: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
        at = np.asarray(places, np.int64) - self.base
        assert not len(at) or (at.min() >= 0 and at.max() < self.size), "a reference points outside its rank"
        return np.bincount(at, minlength=self.size)
