"""Building step frames: decode rows first, then chunks of running prefills, then admissions, under a token budget.

Needs no token values: it plans by `fed`, the length each slot will have when all frames sent so far have run. What a
row needs is in `rows`, prefills are in `chunk`, admission in `admit`.
"""

import numpy as np

from meshkit.frames import PublishedTail, StepFrame
from scheduler_svc.core import finish, mixed
from scheduler_svc.core.admit import admit
from scheduler_svc.core.cost import Shape
from scheduler_svc.core.request import Phase
from scheduler_svc.core.rows import Draft, add_row, grow
from scheduler_svc.core.seal import seal_all
from scheduler_svc.core.state import Record, Row, State, Worker
from scheduler_svc.core.urgent import give_way


def pump(st: State) -> None:
    """Fill every serving worker's hands up to the configured depth."""
    for worker in st.workers.values():
        while worker.serving and len(worker.inflight) < st.limits.depth:
            frame = build(st, worker)
            if frame is None:
                break
            st.send(worker.conn, worker.attach_id, frame)


def build(st: State, worker: Worker) -> StepFrame | None:
    """The next frame, booked as in flight; None when there is nothing to do."""
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
    if not rows and not (
        draft.frees or worker.publishes or worker.publish_tails or worker.retire_pages or worker.retire_tails
    ):
        return None
    assert rows or not (draft.inits or draft.appends or draft.saves), "operations on slots come with rows"
    worker.step = draft.step
    record = Record(draft.step, rows, _shape(rows), st.now)
    worker.inflight.append(record)
    st.total("steps")
    return _frame(worker, draft, record)


def _shape(rows: list[Row]) -> Shape:
    """What the cost model is told of a frame."""
    chunks = [row for row in rows if row.chunk]
    return Shape(
        rows=len(rows) - len(chunks),
        row_context=sum(row.start for row in rows if not row.chunk),
        chunk_tokens=sum(row.n for row in chunks),
        chunk_work=sum(row.n * (row.start + row.n // 2) for row in chunks),
    )


def _frame(worker: Worker, draft: Draft, record: Record) -> StepFrame:
    chunks = [(i, row) for i, row in enumerate(record.rows) if row.chunk]
    offsets = np.zeros(len(draft.rows) + 1, np.int32)
    np.cumsum([len(rank_rows) for rank_rows in draft.rows], out=offsets[1:])
    retire_pages, worker.retire_pages = tuple(worker.retire_pages), []
    retire_tails, worker.retire_tails = tuple(worker.retire_tails), []
    publishes, worker.publishes = tuple(worker.publishes.values()), {}
    publish_tails = tuple(PublishedTail(tail, page) for tail, page in worker.publish_tails.items())
    worker.publish_tails = {}
    return StepFrame(
        step=draft.step,
        slots=np.array([row.seq.slot for row in record.rows], np.int32),
        rank_off=offsets,
        decode_only=not chunks,
        chunk_rows=np.array([i for i, _ in chunks], np.int32),
        chunk_starts=np.array([row.start for _, row in chunks], np.int32),
        chunk_lens=np.array([row.n for _, row in chunks], np.int32),
        chunk_write_froms=np.array([max(row.start, row.seq.write_from) for _, row in chunks], np.int32),
        chunk_samples=np.array([row.sample for _, row in chunks], np.uint8),
        chunk_ids=np.array([i for per_rank in draft.chunk_ids for ids in per_rank for i in ids], np.int32),
        retire_pages=retire_pages,
        retire_tails=retire_tails,
        frees=tuple(draft.frees),
        inits=tuple(draft.inits),
        spares=tuple(draft.spares),
        copies=tuple(draft.copies),
        appends=tuple(draft.appends),
        tail_loads=tuple(draft.loads),
        tail_saves=tuple(draft.saves),
        publishes=publishes,
        publish_tails=publish_tails,
    )


# ---- rows of placed choices -----------------------------------------------------------------------------------------


def _decode_rows(st: State, worker: Worker, draft: Draft) -> None:
    ready = [
        s for s in worker.running if s.phase is Phase.DECODE and len(s.emitted) + s.sampling < s.req.params.max_tokens
    ]
    if len(ready) > draft.budget:
        ready.sort(key=lambda s: s.planned_step)  # more rows than the budget allows: take turns
    for seq in ready:
        if not draft.budget:
            break
        if seq.phase is not Phase.DECODE or not grow(st, worker, draft, seq, seq.fed + 1):
            continue
        add_row(draft, Row(seq, seq.gen, False, seq.fed, 1, True))
