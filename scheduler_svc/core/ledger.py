"""Who holds which page, tail and slot: pools of numbered places with reference counts.

Each place is in exactly one class: free, owned (a running choice refers to it), cached (only waiting choices do) or
quarantined (its worker has attached but not yet dumped). The class sizes are kept as counters and always add up to the
pool. What the places contain, and when a worker hears of it, is decided elsewhere.
"""

from collections.abc import Iterable


class Pool:
    """Places base..base+size-1 of one rank. A new pool is quarantined as a whole; `settle` opens it."""

    __slots__ = ("base", "cached", "free", "kept", "owned", "quarantined", "run", "size")

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.free: list[int] = []  # last in, first out
        self.run = [0] * size  # references by running choices
        self.kept = [0] * size  # references by waiting choices
        self.owned = 0
        self.cached = 0
        self.quarantined = size

    def settle(self, used: Iterable[int]) -> None:
        """End of quarantine: every mention in `used` is one running reference, all other places are free."""
        assert self.quarantined == self.size, "a pool settles once"
        self.quarantined = 0
        for place in used:
            i = place - self.base
            self.owned += self.run[i] == 0
            self.run[i] += 1
        self.free = [self.base + i for i in range(self.size - 1, -1, -1) if not self.run[i]]

    def take(self) -> int:
        """A free place, now owned by the caller."""
        place = self.free.pop()
        self.run[place - self.base] = 1
        self.owned += 1
        return place

    def share(self, place: int) -> None:
        """One more running reference to a place that is in use."""
        i = place - self.base
        assert self.run[i] or self.kept[i], "only a place in use can be shared"
        if not self.run[i]:
            self.cached -= 1
            self.owned += 1
        self.run[i] += 1

    def drop(self, place: int) -> bool:
        """One running reference less; True if the place is free now."""
        i = place - self.base
        assert self.run[i] > 0, "dropped more often than taken"
        self.run[i] -= 1
        if self.run[i]:
            return False
        self.owned -= 1
        if self.kept[i]:
            self.cached += 1
            return False
        self.free.append(place)
        return True

    def keep(self, place: int) -> None:
        """A running reference becomes a waiting one."""
        self.kept[place - self.base] += 1
        self.drop(place)

    def resume(self, place: int) -> None:
        """A waiting reference becomes a running one."""
        self.share(place)
        self.kept[place - self.base] -= 1

    def forget(self, place: int) -> bool:
        """One waiting reference less; True if the place is free now."""
        i = place - self.base
        assert self.kept[i] > 0, "forgotten more often than kept"
        self.kept[i] -= 1
        if self.kept[i] or self.run[i]:
            return False
        self.cached -= 1
        self.free.append(place)
        return True

    def adds_up(self) -> bool:
        """The cheap check: class sizes against the pool's size."""
        return len(self.free) + self.owned + self.cached + self.quarantined == self.size

    def recount(self, run: dict[int, int], kept: dict[int, int]) -> None:
        """The full check, against references found by walking the tables. AssertionError names the first difference."""
        assert self.adds_up(), f"pool at {self.base}: classes do not add up to {self.size}"
        if self.quarantined:
            assert not run and not kept, "a quarantined pool is not in use"
            return
        places = range(self.base, self.base + self.size)
        for place in places:
            i = place - self.base
            assert self.run[i] == run.get(place, 0), f"place {place}: {self.run[i]} owners, found {run.get(place, 0)}"
            assert self.kept[i] == kept.get(place, 0), f"place {place}: {self.kept[i]} kept, found {kept.get(place, 0)}"
        assert len(set(self.free)) == len(self.free), "a place is free twice"
        assert all(not self.run[p - self.base] and not self.kept[p - self.base] for p in self.free), "free yet in use"
        assert self.owned == sum(1 for r in self.run if r), "owned counter is off"
        assert self.cached == sum(1 for r, k in zip(self.run, self.kept, strict=True) if k and not r), "cached is off"
        assert all(p in places for p in (*run, *kept)), "a reference points outside its rank"
