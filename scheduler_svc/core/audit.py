"""Recounts: every pool, reference and list against what the tables say. For tests, the simulator and GetLoad."""

from collections import Counter

from meshkit.types import PAGE_TOKENS, FinishReason
from scheduler_svc.core.finish import tails_of
from scheduler_svc.core.ledger import Pool
from scheduler_svc.core.request import Phase, Seq, pages_for
from scheduler_svc.core.state import Rank, State, Worker


def adds_up(st: State) -> bool:
    """The cheap part: class sizes of every pool."""
    return all(p.adds_up() for w in st.workers.values() for r in w.ranks for p in (r.pages, r.tails, r.slots))


def gauges(st: State) -> dict[str, int]:
    """Class sizes summed over ranks, and lengths of the queues."""
    out = {"waiting": len(st.queue), "waiting_bytes": st.queue.nbytes, "requests": len(st.requests)}
    out["running"] = sum(len(w.running) for w in st.workers.values())
    for name in ("pages", "tails", "slots"):
        pools: list[Pool] = [getattr(rank, name) for w in st.workers.values() for rank in w.ranks]
        out[f"{name}_free"] = sum(len(p.free) for p in pools)
        out[f"{name}_owned"] = sum(p.owned for p in pools)
        out[f"{name}_cached"] = sum(p.cached for p in pools)
        out[f"{name}_quarantined"] = sum(p.quarantined for p in pools)
    return out


def check(st: State) -> None:
    """AssertionError names the first difference between the tables and a recount."""
    for worker in st.workers.values():
        assert st.conns[worker.conn].owner is worker, "an attached worker owns its stream"
        for rank in worker.ranks:
            _check_rank(st, worker, rank)
        _check_published(worker)
        assert len(worker.inflight) <= st.limits.depth, "more frames in flight than the depth"
    _check_seqs(st)


def _check_rank(st: State, worker: Worker, rank: Rank) -> None:
    pages: Counter[int] = Counter()
    tails: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    for seq in (*worker.running, *worker.preempting):
        if seq.rank == rank.index:
            pages.update(seq.pages)
            tails.update(tails_of(seq))
            slots.update([seq.slot] if seq.slot >= 0 else [])
    for closing in worker.closing:
        if closing.rank is rank:
            pages.update(closing.pages)
            tails.update(closing.tails)
            slots[closing.slot] += 1
    for orphan in worker.orphans.values():
        if orphan.rank is rank:
            pages.update(orphan.pages)
            tails.update(t for t in (orphan.spare, orphan.base) if t >= 0)
            slots[orphan.slot] += 1
    kept_pages: Counter[int] = Counter()
    kept_tails: Counter[int] = Counter()
    for seq in rank.keepers:
        kept = seq.kept
        assert kept is not None and kept.worker == worker.name and kept.rank == rank.index, "a keeper keeps here"
        assert seq.phase is Phase.QUEUED and len(kept.pages) * PAGE_TOKENS == kept.pos, "kept pages end at the tail"
        kept_pages.update(kept.pages)
        kept_tails[kept.tail] += 1
    rank.pages.recount(pages, kept_pages)
    rank.tails.recount(tails, kept_tails)
    rank.slots.recount(slots, {})
    assert all(n == 1 for n in slots.values()), "a slot has two owners"


def _check_published(worker: Worker) -> None:
    assert len(worker.published) == len(worker.by_key), "a page key is published twice"
    for page, key in worker.published.items():
        pool = worker.ranks[page // worker.hello.pages].pages
        assert worker.by_key[key] == page, "key map and page map differ"
        assert pool.run[page - pool.base] or pool.kept[page - pool.base], "a published page is nobody's"
    for tail in worker.published_tails:
        pool = worker.ranks[tail // worker.hello.tails].tails
        assert pool.run[tail - pool.base] or pool.kept[tail - pool.base], "a published tail is nobody's"


def _check_seqs(st: State) -> None:
    queued = list(st.queue)
    assert [s.key for s in queued] == sorted(s.key for s in queued), "the queue is out of order"
    assert st.queue.nbytes == sum(s.nbytes for s in queued), "the queue's bytes are off"
    placed: Counter[int] = Counter()
    for worker in st.workers.values():
        flying: Counter[int] = Counter()
        for record in worker.inflight:
            flying.update(
                id(row.seq) for row in record.rows if row.gen == row.seq.gen and row.seq.worker == worker.name
            )
        for seq in worker.running:
            assert seq.placed and seq.worker == worker.name, "a running choice is placed"
            _check_seq(seq, flying[id(seq)])
        for seq in worker.preempting:
            assert seq.phase is Phase.PREEMPTING and seq.flying == flying[id(seq)] > 0, "preempting waits for a frame"
        placed.update(id(s) for s in (*worker.running, *worker.preempting))
    placed.update(id(s) for s in queued)
    for req in st.requests.values():
        assert req.choices, "a request without choices is forgotten"
        for seq in req.choices:
            done = seq.finish is not FinishReason.NONE
            assert placed[id(seq)] == (0 if done else 1), (
                f"a choice in phase {seq.phase.name} is in {placed[id(seq)]} lists"
            )
            assert st.rows.get((req.attach_id, seq.row, seq.row_gen)) is seq, "an open choice has its row"
            placed[id(seq)] = 0
    assert not any(placed.values()), "a list holds a choice of no request"
    assert len(st.rows) == sum(len(r.choices) for r in st.requests.values()), "a row of no request"


def _check_seq(seq: Seq, flying: int) -> None:
    assert seq.flying == flying, f"{seq.flying} frames in flight name it, found {flying}"
    assert seq.phase is Phase.FORKING or len(seq.pages) >= pages_for(seq.fed), "fed beyond its pages"
    assert seq.length <= seq.fed, "committed more than was fed"
    assert seq.length < seq.total, "the last id has no KV yet"
    assert len(seq.pages) <= max(seq.most_pages, pages_for(seq.total)), "more pages than it can ever need"
