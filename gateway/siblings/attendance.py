"""Which listening sockets of a port have a process of their own that accepts: bookkeeping of the hub, no I/O.

A process counts from the moment it says that it serves until it says that it leaves, or its connection ends. One that
is frozen does not count meanwhile. What remains are orphans: the others accept there too.
"""

from collections.abc import Hashable


class Attendance:
    """Of `processes` sockets, numbered from 0. `who` is whatever tells one process from another."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._serving: dict[Hashable, int] = {}
        self._frozen: set[Hashable] = set()

    @property
    def orphans(self) -> tuple[int, ...]:
        """Numbers of the sockets at which nobody accepts who has no other, ascending."""
        attended = {number for who, number in self._serving.items() if who not in self._frozen}
        return tuple(number for number in range(self._processes) if number not in attended)

    @property
    def anybody(self) -> bool:
        """Whether any process accepts connections."""
        return len(self.orphans) < self._processes

    def serves(self, who: Hashable, number: int) -> None:
        """It accepts at this socket from now on. Raises ValueError for a number that there is not."""
        if not 0 <= number < self._processes:
            raise ValueError(f"socket {number} of {self._processes}")
        self._serving[who] = number

    def leaves(self, who: Hashable) -> None:
        """It accepts no more, or is gone; may be said of whoever never served."""
        self._serving.pop(who, None)
        self._frozen.discard(who)

    def freezes(self, who: Hashable) -> None:
        """It does not answer, though it is there; whether it serves or not."""
        self._frozen.add(who)

    def thaws(self, who: Hashable) -> None:
        """It answers again."""
        self._frozen.discard(who)

    def is_serving(self, who: Hashable) -> bool:
        return who in self._serving

    def is_frozen(self, who: Hashable) -> bool:
        return who in self._frozen
