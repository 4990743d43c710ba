"""The waiting choices: in order of service (priority, arrival, choice), and in lanes of one priority and tenant.

Preempted and moved choices keep their arrival, so they wait in front of younger ones of their lane. Bounds are checked
by whoever admits new requests; choices that were accepted once always find room here. Which lane is next is policy's.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_svc.core.request import Phase, Seq


def _key(seq: Seq) -> tuple[int, int, int]:
    return seq.key


@dataclass(slots=True, eq=False)
class Lane:
    """Waiting choices of one priority and tenant, by arrival, and what they hold."""

    seqs: list[Seq] = field(default_factory=list)
    tokens: int = 0  # prompts and booked ids
    nbytes: int = 0


class WaitQueue:
    """Sorted list of queued choices, the bytes of their ids, and their lanes."""

    __slots__ = ("_held", "_lanes", "_seqs", "held", "nbytes", "tokens")

    def __init__(self) -> None:
        self._seqs: list[Seq] = []
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._held: dict[str, Lane] = {}  # by tenant
        self.held = 0  # choices that wait for a grammar: counted here, in no lane
        self.nbytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs)

    def head(self, n: int) -> list[Seq]:
        return self._seqs[:n]

    def lanes(self) -> dict[int, dict[str, Lane]]:
        """Lanes by priority, most urgent first, then by tenant. Only those that hold something."""
        by_priority: dict[int, dict[str, Lane]] = {}
        for (priority, tenant), lane in sorted(self._lanes.items()):
            by_priority.setdefault(priority, {})[tenant] = lane
        return by_priority

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """How many choices of this tenant wait, and their bytes."""
        lanes = [lane for (_, name), lane in self._lanes.items() if name == tenant]
        lanes += [self._held[tenant]] if tenant in self._held else []
        return sum(len(lane.seqs) for lane in lanes), sum(lane.nbytes for lane in lanes)

    def hold(self, seq: Seq) -> None:
        """A choice that cannot be admitted yet: its bytes count, it is next to nobody."""
        seq.phase = Phase.PENDING
        lane = self._held.setdefault(seq.req.tenant, Lane())
        insort(lane.seqs, seq, key=_key)
        lane.nbytes += seq.nbytes
        self.held += 1
        self.nbytes += seq.nbytes

    def unhold(self, seq: Seq) -> None:
        """Take it out again; its ids must not have changed since."""
        lane = self._held[seq.req.tenant]
        at = bisect_left(lane.seqs, seq.key, key=_key)
        assert lane.seqs[at] is seq, "a held choice is where its key says"
        del lane.seqs[at]
        lane.nbytes -= seq.nbytes
        if not lane.seqs:
            del self._held[seq.req.tenant]
        self.held -= 1
        self.nbytes -= seq.nbytes

    def held_seqs(self) -> list[Seq]:
        """All of them, for recounts."""
        return [seq for lane in self._held.values() for seq in lane.seqs]

    def add(self, seq: Seq) -> None:
        seq.phase = Phase.QUEUED
        seq.bypassed = 0
        insort(self._seqs, seq, key=_key)
        lane = self._lanes.setdefault((seq.req.priority, seq.req.tenant), Lane())
        insort(lane.seqs, seq, key=_key)
        lane.tokens += seq.total
        lane.nbytes += seq.nbytes
        self.tokens += seq.total
        self.nbytes += seq.nbytes

    def remove(self, seq: Seq) -> None:
        """Take out a queued choice; its ids must not have changed since `add`."""
        name = (seq.req.priority, seq.req.tenant)
        lane = self._lanes[name]
        for seqs in (self._seqs, lane.seqs):
            at = bisect_left(seqs, seq.key, key=_key)
            assert seqs[at] is seq, "the choice is not where its key says"
            del seqs[at]
        lane.tokens -= seq.total
        lane.nbytes -= seq.nbytes
        if not lane.seqs:
            del self._lanes[name]
        self.tokens -= seq.total
        self.nbytes -= seq.nbytes
