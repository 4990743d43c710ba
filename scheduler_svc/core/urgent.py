"""Policy `priority`: running choices of lower priority give way to a waiting one that finds no slot or no pages.

The last in order of service goes first, and only as many as are needed; none goes where all that may would not do.
Their pages come back when their frames in flight are booked; until then nobody less urgent is admitted.
"""

from scheduler_svc.core import finish
from scheduler_svc.core.admit import best_offer, demand
from scheduler_svc.core.request import Phase, Seq
from scheduler_svc.core.room import room
from scheduler_svc.core.rows import Draft
from scheduler_svc.core.state import Rank, State, Worker


def give_way(st: State, worker: Worker, draft: Draft) -> None:
    """Preempt on this worker, before the frame's rows are planned, for the most urgent waiting choice."""
    draft.urgent = None
    seq = next((s for s in st.queue if st.now >= s.req.hold_until_ns and s.donor is None), None)
    if seq is None or not any(s.req.priority > seq.req.priority for s in worker.running):
        return
    if worker.preempting:
        draft.urgent = seq
        return
    if best_offer(st, seq) is not None:
        return
    for rank in worker.ranks:
        victims = _victims(st, worker, rank, seq)
        if victims:
            draft.urgent = seq
            for victim in victims:
                if victim.phase is not Phase.QUEUED:  # a follower went back with its leader
                    finish.preempt(st, worker, victim, draft.frees)
            st.count("preempted_for_priority")
            return


def _victims(st: State, worker: Worker, rank: Rank, seq: Seq) -> list[Seq]:
    """The fewest of the last in service, all less urgent, whose slots and pages would do; none if they would not."""
    pages = demand(st, worker, seq) - room(st, rank)
    slots = 1 - len(rank.slots.free)
    victims: list[Seq] = []
    for victim in reversed(worker.running):
        if pages <= 0 and slots <= 0:
            return victims
        if victim.req.priority <= seq.req.priority:
            break
        if victim.rank == rank.index:
            victims.append(victim)
            pages -= len(victim.pages)
            slots -= 1
    return victims if pages <= 0 and slots <= 0 else []
