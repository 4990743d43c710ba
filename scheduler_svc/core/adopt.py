"""A worker's dump: slots that go on for requests we know, slots that wait for theirs, and everything else freed.

A slot is adopted when it is bound to the grammar that its request has now, the ids its gateway has (or we had booked)
are a prefix of the slot's, and the missing ones are in the dump (none may miss if log-probabilities are wanted). It
goes on by a chunk row from its committed length, which is exact whether it was in prefill or in decode.
"""

import numpy as np

from meshkit.frames import DumpSlot, PublishedPage, PublishedTail
from meshkit.types import NO_LOGPROBS, PAGE_TOKENS, FinishReason
from scheduler_svc.core import finish
from scheduler_svc.core.prefix import Hold
from scheduler_svc.core.rebuild import rebuild
from scheduler_svc.core.request import Phase, Request, Seq, pages_for
from scheduler_svc.core.state import Closing, Orphan, Rank, State, Worker, emit
from scheduler_svc.core.tails import save_points


def finish_dump(st: State, worker: Worker) -> None:
    """The last chunk is here: open the pools, adopt, and start serving."""
    slots = [slot for dump in worker.dumps for slot in dump.slots]
    pages = [page for dump in worker.dumps for page in dump.pages]
    tails = [tail for dump in worker.dumps for tail in dump.tails]
    worker.dumps = []
    for rank in worker.ranks:
        _open_rank(st, worker, rank, slots, pages, tails)
    orphans = [_orphan(st, worker, slot) for slot in slots]
    worker.gen = max([worker.gen, *(s.slot_gen for s in slots), *(p.page_gen for p in pages)])
    worker.serving = True
    st.dumped[worker.name] = True
    for slot, orphan in zip(slots, orphans, strict=True):
        key = (slot.request_id, slot.choice)
        if key in worker.orphans:
            st.fault("choice_dumped_twice")
            _close_orphan(worker, worker.orphans.pop(key))
        worker.orphans[key] = orphan
    for req in list(st.requests.values()):
        claim(st, req)
    for key in list(worker.orphans):
        if key[0] in st.known and key[0] not in st.requests:  # ended elsewhere meanwhile
            st.count("slots_not_adopted")
            _close_orphan(worker, worker.orphans.pop(key))


def dump_error(worker: Worker) -> str:
    """What is out of range in a complete dump; empty when nothing is."""
    hello = worker.hello
    seen: dict[int, bool] = {}
    for dump in worker.dumps:
        for slot in dump.slots:
            rank = slot.slot // hello.slots
            if not 0 <= slot.slot < hello.slots * hello.ranks or slot.slot in seen:
                return f"slot {slot.slot} is out of range or named twice"
            seen[slot.slot] = True
            if any(page // hello.pages != rank for page in slot.pages):
                return f"slot {slot.slot} has a page of another rank"
            if slot.spare >= 0 and (not hello.tails or slot.spare // hello.tails != rank):
                return f"slot {slot.slot} has a spare tail of another rank"
            if len(slot.pages) < pages_for(slot.length):
                return f"slot {slot.slot} has {len(slot.pages)} pages for {slot.length} tokens"
        if any(not 0 <= page.page < hello.pages * hello.ranks for page in dump.pages):
            return "a published page is out of range"
        if any(not 0 <= tail.tail < hello.tails * hello.ranks for tail in dump.tails):
            return "a published tail is out of range"
    return ""


def _open_rank(
    st: State,
    worker: Worker,
    rank: Rank,
    slots: list[DumpSlot],
    pages: list[PublishedPage],
    tails: list[PublishedTail],
) -> None:
    """Rebuild the index of one rank and open its pools. What the index does not take is retired, and free."""
    hello = worker.hello
    mine = [slot for slot in slots if slot.slot // hello.slots == rank.index]
    st.index.add_pool(
        rank.pool,
        first_page=rank.pages.base,
        pages=hello.pages,
        first_tail=rank.tails.base,
        tails=hello.tails,
        protected_tails=hello.tails // 2,
    )
    refused_pages, refused_tails = rebuild(
        st.index,
        rank.pool,
        [page for page in pages if page.page // hello.pages == rank.index],
        [tail for tail in tails if tail.tail // hello.tails == rank.index],
        st.now,
    )
    worker.retire_pages += refused_pages
    worker.retire_tails += refused_tails
    there = st.index.pools[rank.pool]
    rank.slots.settle(slot.slot for slot in mine)
    rank.pages.settle((page for slot in mine for page in slot.pages), there.trie.page[there.trie.page >= 0].tolist())
    rank.tails.settle(
        (slot.spare for slot in mine if slot.spare >= 0),
        (np.flatnonzero(there.tails.row >= 0) + rank.tails.base).tolist(),
    )


def _orphan(st: State, worker: Worker, slot: DumpSlot) -> Orphan:
    rank = worker.ranks[slot.slot // worker.hello.slots]
    return Orphan(
        rank=rank,
        slot=slot.slot,
        gen=slot.slot_gen,
        attempt=slot.attempt,
        length=slot.length,
        n_emitted=slot.n_emitted,
        finished=slot.finished,
        last_ids=slot.last_ids,
        pages=list(slot.pages),
        spare=slot.spare,
        spare_pos=slot.spare_pos if 0 <= slot.spare_pos <= slot.length else 0,
        since_ns=st.now,
        hold=_hold(st, rank, slot.pages),
        grammar_id=slot.grammar_id,
    )


def _hold(st: State, rank: Rank, pages: tuple[int, ...]) -> Hold:
    """Hold a dumped slot's chain down to its last published page; in between there may be twins of private ones."""
    trie = st.index.pools[rank.pool].trie
    hold = st.index.hold(rank.pool)
    rows = trie.row_of_page[np.array(pages, np.int32) - trie.base]
    known = np.flatnonzero(rows >= 0)
    if len(known):
        chain = [int(rows[known[-1]])]
        while (above := int(trie.parent[chain[-1]])) >= 0:
            chain.append(above)
        hold.rows = np.array(chain[::-1], np.int32)
        trie.acquire(hold.rows, st.now)
    return hold


def claim(st: State, req: Request) -> None:
    """Adopt or free the dumped slots of a request that is known now; those of choices it does not have are freed.

    They wait for one whose grammar is not there yet: it holds no slot.
    """
    if req.pending:
        return
    for worker in st.workers.values():
        if not worker.orphans:
            continue
        mine = [(key, o) for key, o in worker.orphans.items() if key[0] == req.request_id and o.attempt <= req.attempt]
        for key, orphan in mine:
            del worker.orphans[key]
            seq = next((s for s in req.choices if s.choice == key[1]), None)
            if seq is None or not _adopt(st, worker, orphan, seq):
                st.count("slots_not_adopted")
                _close_orphan(worker, orphan)


def _close_orphan(worker: Worker, orphan: Orphan) -> None:
    tails = [orphan.spare] if orphan.spare >= 0 else []
    worker.closing.append(Closing(orphan.rank, orphan.slot, orphan.gen, orphan.pages, tails, orphan.hold))


def drop_orphan(st: State, worker: Worker, key: tuple[bytes, int]) -> None:
    """Nobody claimed it in time."""
    st.count("orphans_expired")
    for known, orphan in list(worker.orphans.items()):
        if known == key:
            del worker.orphans[known]
            _close_orphan(worker, orphan)


def _missing_ids(seq: Seq, orphan: Orphan, limit: int) -> list[int] | None:
    """Ids the slot has emitted beyond ours; None if it cannot go on from ours."""
    have, missing = len(seq.emitted), orphan.n_emitted - len(seq.emitted)
    if not 0 <= missing <= min(limit, len(orphan.last_ids)):
        return None
    if missing and seq.req.params.top_logprobs != NO_LOGPROBS:
        return None
    known = len(orphan.last_ids) - missing  # of the dumped ids, those that we should have too
    overlap = min(known, have)
    if overlap and list(orphan.last_ids[known - overlap : known]) != seq.emitted[have - overlap :]:
        return None
    if orphan.length >= len(seq.req.prompt) + orphan.n_emitted:
        return None
    return list(orphan.last_ids[known:])


def _adopt(st: State, worker: Worker, orphan: Orphan, seq: Seq) -> bool:
    if seq.phase is not Phase.QUEUED or orphan.grammar_id != _grammar_id(seq):
        return False
    ids = _missing_ids(seq, orphan, st.limits.adopt_ids)
    if ids is None:
        return False
    finish.unplace(st, seq)
    st.count("slots_adopted")
    _place(worker, orphan.rank, orphan, seq)
    base = len(seq.emitted)
    seq.extend(ids)
    reason = finish.reason_for(st, seq) if seq.emitted else FinishReason.NONE
    if reason is not FinishReason.NONE:
        finish.end(st, seq, reason, base=base, ids=ids)
    elif orphan.finished:
        st.fault("finish_without_reason")
        finish.requeue(st, seq)
    elif ids:
        emit(st, seq, base, ids)
    return True


def _grammar_id(seq: Seq) -> bytes:
    """A slot bound to another one, as after an upgrade of the grammar service, would wait for masks that never come."""
    return seq.req.grammar.grammar_id if seq.req.grammar is not None else b""


def _place(worker: Worker, rank: Rank, orphan: Orphan, seq: Seq) -> None:
    seq.worker, seq.rank, seq.slot, seq.gen = worker.name, rank.index, orphan.slot, orphan.gen
    seq.pages = orphan.pages
    seq.length = seq.fed = orphan.length
    seq.spare, seq.spare_pos = orphan.spare, orphan.spare_pos
    seq.hold = orphan.hold
    seq.write_from = seq.sealed * PAGE_TOKENS
    seq.points = [p for p in save_points(seq.length, len(seq.req.prompt), ()) if p[0] >= seq.write_from]
    seq.phase = Phase.PREFILL
    finish.add_running(worker, seq)
    worker.sealing.append(seq)
