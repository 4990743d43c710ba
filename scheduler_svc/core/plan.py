"""Building step frames: decode rows first, then chunks of running prefills, then admissions, under a token budget.

Needs no token values: it plans by `fed`, the length each slot will have when all frames sent so far have run. What a
row needs is in `rows`, prefills are in `chunk`, admission in `admit`.
"""

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshkit.frames import PublishedTail, StepFrame
from scheduler_svc.core import finish, mixed
from scheduler_svc.core.admit import admit
from scheduler_svc.core.cost import Shape
from scheduler_svc.core.lanes import I64
from scheduler_svc.core.request import Phase, Seq, pages_for
from scheduler_svc.core.room import make_room
from scheduler_svc.core.rows import Draft, add_row, grow
from scheduler_svc.core.seal import seal_all
from scheduler_svc.core.state import Record, Row, State, Worker
from scheduler_svc.core.urgent import give_way

_NONE: Final = np.empty(0, np.int64)
_NOBODY: Final = np.empty(0, object)


def pump(st: State) -> None:
    """Fill every serving worker's hands up to the configured depth."""
    for worker in st.workers.values():
        while worker.serving and len(worker.inflight) < st.limits.depth and not _lone_prefill(st, worker):
            frame = build(st, worker)
            if frame is None:
                break
            st.send(worker.conn, worker.attach_id, frame)


def _lone_prefill(st: State, worker: Worker) -> bool:
    """The newest frame ends the prompts of all that runs, and nobody waits: what comes meanwhile joins the next one."""
    if not worker.inflight or len(st.queue):
        return False
    newest = worker.inflight[-1]
    alone = not newest.shape.rows and len(newest.rows) == len(worker.running) > 0
    return alone and all(row.sample for row in newest.rows)


def build(st: State, worker: Worker) -> StepFrame | None:
    """The next frame, booked as in flight; None when there is nothing to do."""
    if not (worker.running or len(st.queue) or worker.closing or worker.sealing or _has_orders(worker)):
        return None
    n_ranks = len(worker.ranks)
    draft = Draft(
        worker.step + 1,
        min(st.limits.chunk_tokens, worker.hello.max_step_tokens),
        [[] for _ in range(n_ranks)],
        [[] for _ in range(n_ranks)],
    )
    for closing in worker.closing:
        draft.frees.append(finish.release(st, closing))
    worker.closing.clear()
    seal_all(st, worker)
    if st.limits.policy == "priority":
        give_way(st, worker, draft)
    _decode_rows(st, worker, draft)
    sharing = mixed.share_of(st, worker, draft)
    admit(st, worker, draft, sharing)
    mixed.chunk_rows(st, worker, draft, sharing)
    for hold in draft.loading:
        st.index.release_tail(hold)
    rows = [row for rank_rows in draft.rows for row in rank_rows]
    n_rows = len(rows) + len(draft.slots)
    if not (n_rows or draft.frees or _has_orders(worker)):
        return None
    assert n_rows or not (draft.inits or draft.appends or draft.saves), "operations on slots come with rows"
    worker.step = draft.step
    record = _record(st, worker, draft, rows)
    worker.inflight.append(record)
    st.total("steps")
    return _frame(worker, draft, record)


def _has_orders(worker: Worker) -> bool:
    """Pages or tails to publish or to retire with the next frame."""
    return bool(worker.publishes or worker.publish_tails or worker.retire_pages or worker.retire_tails)


def _record(st: State, worker: Worker, draft: Draft, rows: list[Row]) -> Record:
    """What booking needs of the frame: for each rank its decode rows of lanes, then the others."""
    lanes, slots = worker.lanes, draft.slots
    if not rows:  # lanes alone, as in most steps: they stand in the order of their ranks already
        return Record(
            step=draft.step,
            rows=rows,
            rows_at=_NONE,
            slots=slots,
            slots_at=np.arange(len(slots)),
            gens=lanes.gen[slots],
            seqs=lanes.seqs[slots],
            shape=Shape(rows=len(slots), row_context=draft.context),
            sent_ns=st.now,
        )
    if not len(slots):  # none of lanes
        return Record(
            step=draft.step,
            rows=rows,
            rows_at=np.arange(len(rows)),
            slots=_NONE,
            slots_at=_NONE,
            gens=_NONE,
            seqs=_NOBODY,
            shape=_shape(draft, rows),
            sent_ns=st.now,
        )
    per_rank = np.bincount(slots // worker.hello.slots, minlength=len(worker.ranks))
    others = np.array([len(rank_rows) for rank_rows in draft.rows], np.int64)
    before = np.concatenate([[0], np.cumsum(per_rank + others)[:-1]])
    return Record(
        step=draft.step,
        rows=rows,
        rows_at=np.arange(len(rows)) + np.repeat(np.cumsum(per_rank), others),
        slots=slots,
        slots_at=np.arange(len(slots)) + np.repeat(before - np.cumsum(per_rank) + per_rank, per_rank),
        gens=lanes.gen[slots],
        seqs=lanes.seqs[slots],
        shape=_shape(draft, rows),
        sent_ns=st.now,
    )


def _shape(draft: Draft, rows: list[Row]) -> Shape:
    """What the cost model is told of a frame."""
    chunks = [row for row in rows if row.chunk]
    return Shape(
        rows=len(draft.slots) + len(rows) - len(chunks),
        row_context=draft.context + sum(row.start for row in rows if not row.chunk),
        chunk_tokens=sum(row.n for row in chunks),
        chunk_work=sum(row.n * (row.start + row.n // 2) for row in chunks),
    )


def _frame(worker: Worker, draft: Draft, record: Record) -> StepFrame:
    operations = _operations(worker, draft)
    if not record.rows:
        return StepFrame(
            step=draft.step,
            slots=record.slots.astype(np.int32),
            rank_off=_rank_offsets(worker, record.slots),
            decode_only=True,
            **operations,
        )
    chunks = [(i, row) for i, row in zip(record.rows_at.tolist(), record.rows, strict=True) if row.chunk]
    slots = np.empty(record.size, np.int32)
    slots[record.slots_at] = record.slots
    slots[record.rows_at] = [row.seq.slot for row in record.rows]
    return StepFrame(
        step=draft.step,
        slots=slots,
        rank_off=_rank_offsets(worker, slots),
        decode_only=not chunks,
        chunk_rows=np.array([i for i, _ in chunks], np.int32),
        chunk_starts=np.array([row.start for _, row in chunks], np.int32),
        chunk_lens=np.array([row.n for _, row in chunks], np.int32),
        chunk_write_froms=np.array([max(row.start, row.seq.write_from) for _, row in chunks], np.int32),
        chunk_samples=np.array([row.sample for _, row in chunks], np.uint8),
        chunk_ids=np.array([i for per_rank in draft.chunk_ids for ids in per_rank for i in ids], np.int32),
        **operations,
    )


def _rank_offsets(worker: Worker, slots: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Where the rows of each rank begin, and the end."""
    if len(worker.ranks) == 1:
        return np.array([0, len(slots)], np.int32)
    return np.searchsorted(slots // worker.hello.slots, np.arange(len(worker.ranks) + 1)).astype(np.int32)


def _operations(worker: Worker, draft: Draft) -> dict[str, Any]:
    """The rare columns of a frame, by their names, and only those that hold something."""
    found: dict[str, Collection[Any]] = {  # Any: each column has its own element type
        "retire_pages": worker.retire_pages,
        "retire_tails": worker.retire_tails,
        "frees": draft.frees,
        "inits": draft.inits,
        "spares": draft.spares,
        "copies": draft.copies,
        "appends": draft.appends,
        "tail_loads": draft.loads,
        "tail_saves": draft.saves,
        "publishes": worker.publishes.values(),
        "publish_tails": [PublishedTail(tail, page) for tail, page in worker.publish_tails.items()],
    }
    operations: dict[str, Any] = {name: tuple(values) for name, values in found.items() if values}
    worker.retire_pages, worker.retire_tails, worker.publishes, worker.publish_tails = [], [], {}, {}
    return operations


# ---- rows of placed choices -----------------------------------------------------------------------------------------


def _decode_rows(st: State, worker: Worker, draft: Draft) -> None:
    """All rows that can be, if there are budget and pages for all; else one after the other, in turn."""
    lanes = worker.lanes
    slots = lanes.ready() if lanes.count else _NONE
    others: list[Seq] = []
    if lanes.count < len(worker.running):
        others = [s for s in worker.running if s.phase is Phase.DECODE and s.lanes is None and _may_sample(s)]
    if len(slots) + len(others) > draft.budget or not _all_grow(st, worker, draft, slots, others):
        _in_turn(st, worker, draft)
        return
    if len(slots):
        draft.slots, draft.context = slots, int(lanes.fed[slots].sum())
        draft.budget -= len(slots)
        lanes.plan(slots, draft.step)
    for seq in others:
        add_row(draft, Row(seq, seq.gen, False, seq.fed, 1, True))


def _may_sample(seq: Seq) -> bool:
    return seq.n_emitted + seq.sampling < seq.req.params.max_tokens


def _all_grow(st: State, worker: Worker, draft: Draft, slots: I64, others: list[Seq]) -> bool:
    """Pages for one more token of each. False, and nothing done, if that would take a running choice's pages."""
    lanes = worker.lanes
    short = [*lanes.seqs[slots[lanes.fed[slots] >= lanes.room[slots]]]] if len(slots) else []
    short += [seq for seq in others if pages_for(seq.fed + 1) > len(seq.pages)]
    if not short:
        return True
    for rank in worker.ranks:
        need = sum(pages_for(seq.fed + 1) - len(seq.pages) for seq in short if seq.rank == rank.index)
        if need and not make_room(st, worker, rank, need):
            return False
    for seq in short:
        grown = grow(st, worker, draft, seq, seq.fed + 1)
        assert grown, "room was made for all"
    return True


def _in_turn(st: State, worker: Worker, draft: Draft) -> None:
    """In order of service, or in turn if the budget is too small; the last in service may lose its pages."""
    ready = [s for s in worker.running if s.phase is Phase.DECODE and _may_sample(s)]
    if len(ready) > draft.budget:
        ready.sort(key=lambda s: s.planned_step)
    for seq in ready:
        if not draft.budget:
            break
        if seq.phase is not Phase.DECODE or not grow(st, worker, draft, seq, seq.fed + 1):
            continue
        add_row(draft, Row(seq, seq.gen, False, seq.fed, 1, True))
