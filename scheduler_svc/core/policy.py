"""Which waiting choice is next, and how a step's prefill tokens are shared. Arithmetic over plain values; no placing.

fcfs serves by arrival, lpm prefers long cached prefixes within a bounded overtaking, priority also preempts (`urgent`).
Under each of them a smaller `priority` value is served first, and within a priority tenants take turns (`fair`).
Prefill tokens of a step go to the shortest remaining prefill first, so that a short prompt passes a huge one; the
oldest prefill has a share of every step, so that it ends, and a large one once it is late (`mixed`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.fair import FairShare
from scheduler_svc.core.queue import Lane, WaitQueue
from scheduler_svc.core.request import Seq

PolicyName = Literal["fcfs", "lpm", "priority"]
POLICIES: tuple[PolicyName, ...] = ("fcfs", "lpm", "priority")
Match = Callable[[Seq], int]
"""How many tokens of a waiting choice are cached."""

GRAIN = 16
"""Prefill tokens that a step always has room for, and that a choice gets in the step that places it."""
_PAGE_WORTH = 4  # lpm: a cached page is worth so many places in the queue, ...
_RESUMED = 8  # a resumed prefill is passed only by others that are so many times shorter
_PAGES_COUNTED = 64  # ... up to so many pages: nobody is passed by more than their product of younger ones


@dataclass(frozen=True, slots=True)
class Work:
    """A prefill that wants tokens of this step.

    `fresh`: placed in it, so it must get some. `resumed`: somebody is in the middle of reading its answer.
    """

    remaining: int
    start: int
    fresh: bool = False
    resumed: bool = False

    def cost(self, context_weight: float) -> float:
        """Of all that remains, in prefill tokens at no context."""
        return self.remaining * (1 + context_weight * (self.start + self.remaining / 2))

    def rank(self, context_weight: float) -> float:
        """The smallest goes first. Not simply those resumed: a huge one would hold up all short ones."""
        return self.cost(context_weight) / (_RESUMED if self.resumed else 1)


def tokens_for(cost: float, start: int, context_weight: float) -> int:
    """How many tokens from `start` on cost so much: n (1 + w (start + n / 2)) = cost."""
    base = 1 + context_weight * start
    if context_weight <= 0 or cost <= 0:
        return max(0, int(cost / base))
    return int(2 * cost / (base + (base * base + 2 * context_weight * cost) ** 0.5))


def split(budget: float, room: int, works: Sequence[Work], *, share: float, context_weight: float) -> list[int]:
    """Tokens of this step for each prefill, in order of service.

    `budget`: their cost in tokens at no context, of which the first has at least `share`; `room`: tokens in the frame.
    The shortest remaining one is next.
    """
    grants = [0] * len(works)
    left = max(budget, float(GRAIN))

    def give(i: int, cost: float) -> None:
        nonlocal left, room
        work, had = works[i], grants[i]
        n = tokens_for(min(cost, left), work.start + had, context_weight)
        n = min(max(n, 0 if had else 1) if cost > 0 else n, work.remaining - had, room)
        if n > 0:
            grants[i] += n
            room -= n
            left -= n * (1 + context_weight * (work.start + had + n / 2))

    for i, work in enumerate(works):
        if work.fresh:
            give(i, float(GRAIN))
    if works:
        give(0, share * budget)
    for _, i in sorted((work.rank(context_weight), i) for i, work in enumerate(works)):
        if left < 1 or not room:
            break
        give(i, left)
    return grants


class Turns:
    """The order in which waiting choices are looked at: by priority, then tenants in turn, then the policy's order."""

    __slots__ = ("_fair", "policy", "quantum")

    def __init__(self, policy: PolicyName, quantum: float) -> None:
        self.policy = policy
        self.quantum = quantum
        self._fair: dict[int, FairShare] = {}

    def candidates(
        self, queue: WaitQueue, most: int, weight: Callable[[Seq], float], match: Match | None = None
    ) -> Iterator[Seq]:
        """The next `most` waiting choices. `weight` is what each would cost its tenant; see `started`."""
        lanes = queue.lanes()
        for gone in [p for p in self._fair if p not in lanes]:
            del self._fair[gone]
        for priority, tenants in lanes.items():
            if most <= 0:
                return
            each = most if len(tenants) == 1 else max(2, 4 * most // len(tenants))
            ordered = {t: self._lane(lane, each, match) for t, lane in tenants.items()}
            fair = self._fair.setdefault(priority, FairShare(self.quantum))
            costs = {t: [weight(seq) for seq in seqs] for t, seqs in ordered.items()}
            nexts = {t: iter(seqs) for t, seqs in ordered.items()}
            for tenant in list(fair.order(costs, most)):  # charges while we yield must not change this frame's order
                most -= 1
                yield next(nexts[tenant])

    def started(self, seq: Seq, cost: float) -> None:
        """A choice is placed: its tenant pays what it will really compute."""
        fair = self._fair.get(seq.req.priority)
        if fair is not None:
            fair.charge(seq.req.tenant, cost)

    def _lane(self, lane: Lane, most: int, match: Match | None) -> list[Seq]:
        if self.policy != "lpm" or match is None:
            return lane.seqs[:most]
        window = list(islice(lane.seqs, 4 * most))

        def place(seq: Seq) -> tuple[int, int]:
            pages = min(match(seq) // PAGE_TOKENS, _PAGES_COUNTED)
            return seq.req.arrival - _PAGE_WORTH * pages, seq.choice

        return sorted(window, key=place)[:most]


def growth_pages(conservativeness: float, expected: float, max_tokens: int, emitted: int) -> int:
    """Pages to hold back for what a choice has yet to write: that share of its expected remaining ids."""
    remaining = min(max_tokens, max(expected, emitted)) - emitted
    return int(min(1.0, conservativeness) * max(0.0, remaining) / PAGE_TOKENS + 0.999) if conservativeness > 0 else 0
