"""The frame being built: rows, and the pages and spares that they need.

Pages are taken here and at admission, nowhere else. A choice whose next page is not free is left out of the frame,
after the pools were relieved in this order: pages that only the cache holds, unclaimed dumped slots, the running choice
that is last in service.
"""

from dataclasses import dataclass, field

import numpy as np

from meshkit.frames import (
    PageAppend,
    SlotCopy,
    SlotFree,
    SlotInit,
    Spare,
    TailLoad,
    TailSave,
)
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core import finish
from scheduler_svc.core.lanes import I64
from scheduler_svc.core.prefix import Hold
from scheduler_svc.core.request import Phase, Seq, pages_for
from scheduler_svc.core.room import make_room, take_tail
from scheduler_svc.core.state import MS, Closing, Rank, Row, State, Worker
from scheduler_svc.core.tails import Reason


@dataclass(slots=True, eq=False)
class Draft:
    """The frame being built."""

    step: int
    budget: int
    rows: list[list[Row]]  # per rank, behind those of `slots`
    chunk_ids: list[list[list[int]]]  # per rank, one list per chunk row
    frees: list[SlotFree] = field(default_factory=list)
    inits: list[SlotInit] = field(default_factory=list)
    spares: list[Spare] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    appends: list[PageAppend] = field(default_factory=list)
    loads: list[TailLoad] = field(default_factory=list)
    saves: list[TailSave] = field(default_factory=list)
    urgent: Seq | None = None  # a waiting choice for which others were preempted: nobody passes it
    slots: I64 = field(default_factory=lambda: np.empty(0, np.int64))  # decode rows of lanes, rising
    context: int = 0  # sum of their lengths
    loading: list[Hold] = field(default_factory=list)  # whose tails must stay until this frame is complete


def prefilling(worker: Worker) -> list[Seq]:
    """Its choices whose prompt is not through, in order of service; looks at none when all decode in lanes."""
    if worker.lanes.count == len(worker.running):
        return []
    return [seq for seq in worker.running if seq.phase is Phase.PREFILL]


def decode_load(draft: Draft) -> tuple[int, int]:
    """Rows so far and the sum of their contexts."""
    rows = [row for rank_rows in draft.rows for row in rank_rows]
    return len(draft.slots) + len(rows), draft.context + sum(row.start for row in rows)


def add_row(draft: Draft, row: Row) -> None:
    """A row of a placed choice: its tokens are fed once this frame has run."""
    seq = row.seq
    draft.rows[seq.rank].append(row)
    draft.budget -= row.n
    seq.fed += row.n
    seq.flying += 1
    seq.planned_step = draft.step
    if row.sample:
        seq.sampling += 1
        seq.phase = Phase.DECODE


def grow(st: State, worker: Worker, draft: Draft, seq: Seq, tokens: int) -> bool:
    """Give a placed choice pages for so many tokens; False if it must be left out of this frame."""
    need = pages_for(tokens) - len(seq.pages)
    if need <= 0:
        return True
    rank = worker.ranks[seq.rank]
    while len(rank.pages.free) < need:
        if make_room(st, worker, rank, need) or evict_orphan(st, worker, rank, draft):
            continue
        if any(s.rank == seq.rank for s in worker.preempting):
            return False  # pages are on their way back
        rivals = [s for s in worker.running if s.rank == seq.rank and s.planned_step != draft.step]
        if not rivals or (rivals == [seq] and not _has_twins(st, seq)):
            return False
        victim = rivals[-1]
        finish.preempt(st, worker, victim, draft.frees)
        if victim is seq:
            return False
    append(draft, seq, [rank.pages.take() for _ in range(need)])
    give_spare(st, worker, draft, seq)
    return True


def _has_twins(st: State, seq: Seq) -> bool:
    """Some of its pages are published under another number: placed anew it would need fewer."""
    assert seq.hold is not None
    published: list[int] = st.index.pools[seq.hold.pool].trie.page[seq.hold.rows].tolist()
    return published != seq.pages[: len(published)]


def append(draft: Draft, seq: Seq, pages: list[int]) -> None:
    seq.pages.extend(pages)
    if seq.lanes is not None:
        seq.lanes.room[seq.slot] = len(seq.pages) * PAGE_TOKENS
    draft.appends.extend(PageAppend(seq.slot, page) for page in pages)


def give_spare(st: State, worker: Worker, draft: Draft, seq: Seq) -> None:
    """A tail the worker may save into at every page boundary; not before a replay has become exact."""
    if seq.spare >= 0 or seq.fed < seq.write_from:
        return
    tail = take_tail(st, worker, worker.ranks[seq.rank], int(Reason.TURN))
    if tail >= 0:
        seq.spare, seq.spare_pos = tail, 0
        draft.spares.append(Spare(seq.slot, tail))


def evict_orphan(st: State, worker: Worker, rank: Rank, draft: Draft) -> bool:
    """Free a dumped slot that nobody has claimed, once gateways had the time to."""
    for key, orphan in worker.orphans.items():
        if orphan.rank is rank and st.now - orphan.since_ns >= st.limits.resume_wait_ms * MS:
            del worker.orphans[key]
            st.count("orphans_evicted")
            tails = [orphan.spare] if orphan.spare >= 0 else []
            closing = Closing(rank, orphan.slot, orphan.gen, orphan.pages, tails, orphan.hold)
            draft.frees.append(finish.release(st, closing))
            return True
    return False
