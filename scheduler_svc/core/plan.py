"""Building step frames: decode rows first, then chunks of running prefills, then admissions, under a token budget.

Needs no token values: it plans by `fed`, the length each slot will have when all frames sent so far have run. Pages
are taken here and nowhere else; a choice whose next page is not free is left out of the frame, after the pools were
relieved in this order: what waiting choices keep, unclaimed dumped slots, the running choice that is last in service.
"""

from dataclasses import dataclass, field

import numpy as np

from meshkit.frames import (
    PageAppend,
    PublishedPage,
    PublishedTail,
    SlotCopy,
    SlotFree,
    SlotInit,
    Spare,
    StepFrame,
    TailLoad,
    TailSave,
)
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core import finish
from scheduler_svc.core.request import Phase, Seq, pages_for, tokens_of
from scheduler_svc.core.seal import seal
from scheduler_svc.core.state import MS, Closing, Rank, Record, Row, State, Worker


@dataclass(slots=True, eq=False)
class Draft:
    """The frame being built."""

    step: int
    budget: int
    rows: list[list[Row]]  # per rank
    chunk_ids: list[list[list[int]]]  # per rank, one list per chunk row
    frees: list[SlotFree] = field(default_factory=list)
    inits: list[SlotInit] = field(default_factory=list)
    spares: list[Spare] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    appends: list[PageAppend] = field(default_factory=list)
    loads: list[TailLoad] = field(default_factory=list)
    saves: list[TailSave] = field(default_factory=list)
    publishes: list[PublishedPage] = field(default_factory=list)
    publish_tails: list[PublishedTail] = field(default_factory=list)


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
        draft.frees.append(finish.release(worker, closing))
    worker.closing.clear()
    _decode_rows(st, worker, draft)
    _chunk_rows(st, worker, draft)
    _admit(st, worker, draft)
    seal(st, worker, draft.publishes, draft.publish_tails)
    rows = [row for rank_rows in draft.rows for row in rank_rows]
    if not rows and not (
        draft.frees or draft.publishes or draft.publish_tails or worker.retire_pages or worker.retire_tails
    ):
        return None
    assert rows or not (draft.inits or draft.appends or draft.saves), "operations on slots come with rows"
    worker.step = draft.step
    record = Record(draft.step, rows, sum(row.n for row in rows if row.chunk), st.now)
    worker.inflight.append(record)
    st.total("steps")
    return _frame(worker, draft, record)


def _frame(worker: Worker, draft: Draft, record: Record) -> StepFrame:
    chunks = [(i, row) for i, row in enumerate(record.rows) if row.chunk]
    starts = np.array([row.start for _, row in chunks], np.int32)
    offsets = np.zeros(len(draft.rows) + 1, np.int32)
    np.cumsum([len(rank_rows) for rank_rows in draft.rows], out=offsets[1:])
    retire_pages, worker.retire_pages = tuple(worker.retire_pages), []
    retire_tails, worker.retire_tails = tuple(worker.retire_tails), []
    return StepFrame(
        step=draft.step,
        slots=np.array([row.seq.slot for row in record.rows], np.int32),
        rank_off=offsets,
        decode_only=not chunks,
        chunk_rows=np.array([i for i, _ in chunks], np.int32),
        chunk_starts=starts,
        chunk_lens=np.array([row.n for _, row in chunks], np.int32),
        chunk_write_froms=starts,
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
        publishes=tuple(draft.publishes),
        publish_tails=tuple(draft.publish_tails),
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
        if seq.phase is not Phase.DECODE or not _grow(st, worker, draft, seq, seq.fed + 1):
            continue
        _row(draft, Row(seq, seq.gen, False, seq.fed, 1, True))


def _chunk_rows(st: State, worker: Worker, draft: Draft) -> None:
    for seq in list(worker.running):
        if not draft.budget:
            break
        if seq.phase is Phase.PREFILL:
            _chunk(st, worker, draft, seq)


def _chunk(st: State, worker: Worker, draft: Draft, seq: Seq) -> None:
    """The next part of a prefill: as much as the budget allows, up to the fork point if siblings wait there."""
    last_prompt = len(seq.req.prompt) - 1
    if seq.followers and seq.fed == last_prompt:
        _fork(worker, draft, seq)
    n = min((last_prompt if seq.followers else seq.total) - seq.fed, draft.budget)
    if n <= 0 or not _grow(st, worker, draft, seq, seq.fed + n):
        return
    start, end = seq.fed, seq.fed + n
    rank = worker.ranks[seq.rank]
    boundary = len(seq.req.prompt) // PAGE_TOKENS * PAGE_TOKENS
    if start < boundary <= end and seq.base < 0 and not seq.forked and rank.tails.free:
        seq.base, seq.base_pos = rank.tails.take(), boundary
        draft.saves.append(TailSave(seq.slot, boundary, seq.base))
    _row(draft, Row(seq, seq.gen, True, start, n, end == seq.total))
    draft.chunk_ids[seq.rank].append(tokens_of(seq, start, end))


def _row(draft: Draft, row: Row) -> None:
    seq = row.seq
    draft.rows[seq.rank].append(row)
    draft.budget -= row.n
    seq.fed += row.n
    seq.flying += 1
    seq.planned_step = draft.step
    if row.sample:
        seq.sampling += 1
        seq.phase = Phase.DECODE


# ---- pages ----------------------------------------------------------------------------------------------------------


def _grow(st: State, worker: Worker, draft: Draft, seq: Seq, tokens: int) -> bool:
    """Give a placed choice pages for so many tokens; False if it must be left out of this frame."""
    need = pages_for(tokens) - len(seq.pages)
    if need <= 0:
        return True
    rank = worker.ranks[seq.rank]
    while len(rank.pages.free) < need:
        if finish.evict_kept(st, rank, None) or _evict_orphan(st, worker, rank, draft):
            continue
        if any(s.rank == seq.rank for s in worker.preempting):
            return False  # pages are on their way back
        rivals = [s for s in worker.running if s.rank == seq.rank and s.planned_step != draft.step]
        if not rivals or rivals == [seq]:
            return False
        victim = rivals[-1]
        finish.preempt(st, worker, victim, draft.frees)
        if victim is seq:
            return False
    _append(draft, seq, [rank.pages.take() for _ in range(need)])
    if seq.spare < 0:
        _give_spare(draft, rank, seq)
    return True


def _append(draft: Draft, seq: Seq, pages: list[int]) -> None:
    seq.pages.extend(pages)
    draft.appends.extend(PageAppend(seq.slot, page) for page in pages)


def _give_spare(draft: Draft, rank: Rank, seq: Seq) -> None:
    if rank.tails.free:
        seq.spare = rank.tails.take()
        draft.spares.append(Spare(seq.slot, seq.spare))


def _evict_orphan(st: State, worker: Worker, rank: Rank, draft: Draft) -> bool:
    """Free a dumped slot that nobody has claimed, once gateways had the time to."""
    for key, orphan in worker.orphans.items():
        if orphan.rank is rank and st.now - orphan.since_ns >= st.limits.resume_wait_ms * MS:
            del worker.orphans[key]
            st.count("orphans_evicted")
            tails = [t for t in (orphan.spare, orphan.base) if t >= 0]
            draft.frees.append(
                finish.release(worker, Closing(rank, orphan.slot, orphan.gen, list(orphan.pages), tails))
            )
            return True
    return False


# ---- admission ------------------------------------------------------------------------------------------------------


def _admit(st: State, worker: Worker, draft: Draft) -> None:
    """Place waiting choices in order. One whose KV does not fit yet may be passed by others, a bounded number of times.

    A choice goes to the rank with the most room over all workers; another worker's next frame takes what is its.
    """
    blocked: Seq | None = None
    for seq in st.queue.head(st.limits.scan):
        if not draft.budget or not _any_slot(st, worker, draft):
            return
        if seq.phase is not Phase.QUEUED or st.now < seq.req.hold_until_ns:
            continue
        if seq.req.all_kills >= st.limits.poison_kills:
            continue  # until it is known whether the losses were crashes
        choice = _best_rank(st, seq)
        if choice is None:
            if blocked is None:
                blocked = seq
                if seq.bypassed >= st.limits.bypass:
                    return
            continue
        target, rank = choice
        if target is not worker:
            continue
        if blocked is not None:
            blocked.bypassed += 1
        _place_group(st, worker, draft, rank, seq)
        if blocked is not None and blocked.bypassed >= st.limits.bypass:
            return


def _any_slot(st: State, worker: Worker, draft: Draft) -> bool:
    """A free slot on this worker; when requests wait for one, unclaimed dumped slots give way."""
    if any(rank.slots.free for rank in worker.ranks):
        return True
    return any(_evict_orphan(st, worker, rank, draft) for rank in worker.ranks)


def _room(rank: Rank, seq: Seq) -> int:
    """Pages this choice could have there: free, or kept by others who wait."""
    own = seq.kept.pages if seq.kept is not None and rank.keepers and seq in rank.keepers else []
    idle = sum(1 for p in own if not rank.pages.run[p - rank.pages.base])
    return len(rank.pages.free) + rank.pages.cached - idle


def _demand(st: State, worker: Worker, rank: Rank, seq: Seq) -> int:
    """Pages that must be there before it starts: its tokens', those of the frames in flight, one more; kept ones off.

    Never more than it can use at all, so that whatever fits an empty pool is served by one.
    """
    flight = st.limits.depth * worker.hello.max_verify
    need = min(seq.most_pages, pages_for(seq.total + flight) + 1)
    return need - (len(seq.kept.pages) if seq.kept is not None and seq in rank.keepers else 0)


def _best_rank(st: State, seq: Seq) -> tuple[Worker, Rank] | None:
    best: tuple[Worker, Rank] | None = None
    best_score = (-1, -1)
    for worker in st.workers.values():
        if not worker.serving:
            continue
        for rank in worker.ranks:
            if not rank.slots.free:
                continue
            room = _room(rank, seq)
            if room < _demand(st, worker, rank, seq):
                continue
            if seq.kept is not None and seq in rank.keepers:
                return worker, rank
            if (room, len(rank.slots.free)) > best_score:
                best, best_score = (worker, rank), (room, len(rank.slots.free))
    return best


def _place_group(st: State, worker: Worker, draft: Draft, rank: Rank, seq: Seq) -> None:
    """Place a choice; siblings that have emitted nothing either share its prefill, as many as have room."""
    extra = _room(rank, seq) - _demand(st, worker, rank, seq)
    fresh = not seq.emitted and seq.kept is None and len(seq.req.prompt) > 1
    _place(st, worker, draft, rank, seq)
    if fresh:
        for sibling in list(seq.req.choices):
            if extra <= 0 or not rank.slots.free:
                break
            if sibling.phase is not Phase.QUEUED or sibling.emitted or sibling.kept is not None:
                continue
            extra -= 1
            while not rank.pages.free and finish.evict_kept(st, rank, None):
                continue
            if not rank.pages.free:
                break
            _reserve_follower(st, worker, rank, seq, sibling)
    _chunk(st, worker, draft, seq)


def _place(st: State, worker: Worker, draft: Draft, rank: Rank, seq: Seq) -> None:
    st.queue.remove(seq)
    kept = seq.kept
    if kept is not None and seq not in rank.keepers:
        finish.drop_kept(st, seq)
        kept = None
    need = pages_for(seq.total) - (len(kept.pages) if kept is not None else 0)
    while len(rank.pages.free) < need:
        evicted = finish.evict_kept(st, rank, seq)
        assert evicted, "admission counted these pages as free or evictable"
    seq.worker, seq.rank = worker.name, rank.index
    worker.gen += 1
    seq.slot, seq.gen = rank.slots.take(), worker.gen
    seq.phase = Phase.PREFILL
    _give_spare(draft, rank, seq)
    pages: list[int] = []
    if kept is not None:
        seq.kept = None
        rank.keepers.remove(seq)
        for page in kept.pages:
            rank.pages.resume(page)
        rank.tails.resume(kept.tail)
        seq.base, seq.base_pos = kept.tail, kept.pos
        seq.length = seq.fed = seq.cached = kept.pos
        pages = kept.pages
        draft.loads.append(TailLoad(seq.slot, kept.tail))
        st.count("resumed_from_tail")
    seq.cached = min(seq.fed, len(seq.req.prompt))
    _append(draft, seq, pages + [rank.pages.take() for _ in range(need)])
    draft.inits.append(_init(seq))
    finish.add_running(worker, seq)


def _init(seq: Seq) -> SlotInit:
    params = seq.req.params
    return SlotInit(
        slot=seq.slot,
        slot_gen=seq.gen,
        request_id=seq.req.request_id,
        attempt=seq.req.attempt,
        choice=seq.choice,
        params=params,
        seed=seq.req.seed,
        start=seq.fed,
        n_emitted=len(seq.emitted),
        emitted=tuple(seq.emitted) if params.reads_output else (),
        prompt=tuple(seq.req.prompt.tolist()) if params.reads_prompt else (),
    )


# ---- n > 1 ----------------------------------------------------------------------------------------------------------


def _reserve_follower(st: State, worker: Worker, rank: Rank, leader: Seq, seq: Seq) -> None:
    """A slot and the page of the prompt's last token; everything before it will be the leader's."""
    st.queue.remove(seq)
    seq.worker, seq.rank = worker.name, rank.index
    seq.slot = rank.slots.take()
    seq.pages = [rank.pages.take()]
    seq.phase = Phase.FORKING
    seq.leader = leader
    leader.followers.append(seq)
    finish.add_running(worker, seq)


def _fork(worker: Worker, draft: Draft, leader: Seq) -> None:
    """All but the last prompt token are fed: siblings take ring, states and partial page, share the full pages."""
    rank = worker.ranks[leader.rank]
    at = leader.fed
    shared = leader.pages[: at // PAGE_TOKENS]
    partial = at % PAGE_TOKENS != 0
    for seq in leader.followers:
        worker.gen += 1
        seq.gen = worker.gen
        own = seq.pages
        for page in shared:
            rank.pages.share(page)
        if leader.base >= 0:
            rank.tails.share(leader.base)
            seq.base, seq.base_pos = leader.base, leader.base_pos
        seq.pages = []
        seq.length = seq.fed = at
        seq.cached = leader.cached
        seq.phase = Phase.PREFILL
        seq.leader, seq.forked = None, True
        draft.inits.append(_init(seq))
        _give_spare(draft, rank, seq)
        draft.copies.append(
            SlotCopy(leader.slot, seq.slot, leader.pages[at // PAGE_TOKENS], own[0])
            if partial
            else SlotCopy(leader.slot, seq.slot, -1, -1)
        )
        _append(draft, seq, shared + own)
        seq.planned_step = draft.step  # in this frame already: not to be preempted by it
    leader.followers = []
