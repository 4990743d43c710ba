"""Recounts: every pool, reference and list against what the tables say. For tests, the simulator and GetLoad."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from meshkit.types import PAGE_TOKENS, FinishReason
from scheduler_svc.core import rebuild
from scheduler_svc.core.grammar import unanswered
from scheduler_svc.core.ledger import Pool
from scheduler_svc.core.prefix import Hold
from scheduler_svc.core.request import Phase, Seq, pages_for
from scheduler_svc.core.seal import tails_of
from scheduler_svc.core.state import Rank, State, Worker


def adds_up(st: State) -> bool:
    """The cheap part, done at every step: class sizes of every pool, and what the index says of them."""
    for worker in st.workers.values():
        for rank in worker.ranks:
            if not (rank.pages.adds_up() and rank.tails.adds_up() and rank.slots.adds_up()):
                return False
            there = st.index.pools.get(rank.pool)
            if there is not None and (
                there.trie.n_pages != rank.pages.known
                or there.tails.n != rank.tails.known
                or (there.trie.idle > rank.pages.cached and not worker.closing)
            ):
                return False
    return True


def gauges(st: State) -> dict[str, int]:
    """Class sizes summed over ranks, and lengths of the queues."""
    out = {"waiting": len(st.queue) + st.queue.held, "waiting_bytes": st.queue.nbytes, "requests": len(st.requests)}
    out |= {"grammar_queue": st.grammars.pending, "grammars": len(st.grammars.by_key)}
    out["running"] = sum(len(w.running) for w in st.workers.values())
    for name in ("pages", "tails", "slots"):
        pools: list[Pool] = [getattr(rank, name) for w in st.workers.values() for rank in w.ranks]
        out[f"{name}_free"] = sum(len(p.free) for p in pools)
        out[f"{name}_owned"] = sum(p.owned for p in pools)
        out[f"{name}_cached"] = sum(p.cached for p in pools)
        out[f"{name}_quarantined"] = sum(p.quarantined for p in pools)
    return out


def recount(st: State) -> None:
    """Every place and every reference of the pools, in columns. AssertionError names the first difference."""
    for worker in st.workers.values():
        for rank in worker.ranks:
            _check_rank(st, worker, rank)
    found = {pool: np.zeros(len(there.trie.refs), np.int32) for pool, there in st.index.pools.items()}
    for hold in holds(st):
        found[hold.pool][hold.rows] += 1
    for pool, there in st.index.pools.items():
        assert (found[pool] == there.trie.refs)[there.trie.page >= 0].all(), f"{pool}: references of a page are off"
        idle = np.count_nonzero((there.trie.page >= 0) & (there.trie.refs == 0))
        assert idle == there.trie.idle, f"{pool}: the count of idle pages is off"


def check(st: State) -> None:
    """All there is: the recount, the index row by row, and every list. AssertionError names the first difference."""
    recount(st)
    for worker in st.workers.values():
        assert st.conns[worker.conn].owner is worker, "an attached worker owns its stream"
        _check_pending(worker)
        assert len(worker.inflight) <= st.limits.depth, "more frames in flight than the depth"
    rebuild.check(st.index, holds(st))
    _check_seqs(st)


def _check_rank(st: State, worker: Worker, rank: Rank) -> None:
    pages: list[int] = []
    tails: list[int] = []
    slots: list[int] = []
    for seq in (*worker.running, *worker.preempting):
        if seq.rank == rank.index:
            pages += seq.pages
            tails += tails_of(seq)
            slots += [seq.slot] if seq.slot >= 0 else []
    for closing in worker.closing:
        if closing.rank is rank:
            pages += closing.pages
            tails += closing.tails
            slots.append(closing.slot)
    for orphan in worker.orphans.values():
        if orphan.rank is rank:
            pages += orphan.pages
            tails += [orphan.spare] if orphan.spare >= 0 else []
            slots.append(orphan.slot)
    there = st.index.pools.get(rank.pool)
    assert (there is not None) == worker.serving, "a serving rank has a pool in the index"
    rank.slots.recount(slots, ())
    assert len(set(slots)) == len(slots), "a slot has two owners"
    if there is None:
        rank.pages.recount(pages, ())
        rank.tails.recount(tails, ())
        return
    rank.pages.recount(pages, there.trie.page[there.trie.page >= 0])
    rank.tails.recount(tails, (np.flatnonzero(there.tails.row >= 0) + there.tails.base).astype(np.int32))
    assert worker.closing or there.trie.idle <= rank.pages.cached, "an idle page is in use"


def _check_pending(worker: Worker) -> None:
    """What is to be published or retired with the next frame."""
    assert not set(worker.publishes) & set(worker.retire_pages), "a page is published and retired at once"
    assert not set(worker.publish_tails) & set(worker.retire_tails), "a tail is published and retired at once"
    for what, places in (("page", worker.retire_pages), ("tail", worker.retire_tails)):
        assert len(set(places)) == len(places), f"a {what} is retired twice"


def holds(st: State) -> Iterator[Hold]:
    """Everything that refers to the index."""
    for worker in st.workers.values():
        for seq in (*worker.running, *worker.preempting):
            if seq.hold is not None:
                yield seq.hold
        yield from (closing.hold for closing in worker.closing)
        yield from (orphan.hold for orphan in worker.orphans.values())


def _check_seqs(st: State) -> None:
    queued = list(st.queue)
    assert [s.key for s in queued] == sorted(s.key for s in queued), "the queue is out of order"
    held = st.queue.held_seqs()
    assert len(held) == st.queue.held, "held choices are miscounted"
    assert all(s.phase is Phase.PENDING and s.req.pending for s in held), "only choices without a grammar are held"
    assert st.queue.nbytes == sum(s.nbytes for s in (*queued, *held)), "the queue's bytes are off"
    placed: Counter[int] = Counter()
    for worker in st.workers.values():
        flying: Counter[int] = Counter()
        for record in worker.inflight:
            flying.update(id(seq) for seq, gen in record.named() if gen == seq.gen and seq.worker == worker.name)
        lanes = worker.lanes
        assert lanes.count == np.count_nonzero(lanes.on), "lanes are miscounted"
        for slot in np.flatnonzero(lanes.on).tolist():
            seq = lanes.seqs[slot]
            assert seq.lanes is lanes and seq.slot == slot and seq.gen == lanes.gen[slot], "a lane of another choice"
            assert seq.phase is Phase.DECODE and len(seq.pages) * PAGE_TOKENS == lanes.room[slot], "a lane is stale"
            assert lanes.emitted[slot] == len(seq.emitted), "a lane has lost ids"
        for seq in worker.running:
            assert seq.placed and seq.worker == worker.name, "a running choice is placed"
            _check_seq(seq, flying[id(seq)])
        for seq in worker.preempting:
            assert seq.phase is Phase.PREEMPTING and seq.flying == flying[id(seq)] > 0, "preempting waits for a frame"
        placed.update(id(s) for s in (*worker.running, *worker.preempting))
    placed.update(id(s) for s in (*queued, *held))
    _check_grammars(st)
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


def _check_grammars(st: State) -> None:
    """Every live constrained request is a user of its grammar, and no other; who waits is waited for."""
    table = st.grammars
    users = {rid: grammar for grammar in table.by_key.values() for rid in grammar.users}
    assert users == {rid: r.grammar for rid, r in st.requests.items() if r.grammar is not None}, "a grammar's users"
    for grammar in table.by_key.values():
        assert grammar.users or grammar.ticket, "a grammar that nobody needs is kept"
        asked = grammar.grammar_id or grammar.ticket or grammar.retry_ns
        assert asked or not unanswered(grammar), "nobody asks for a grammar"
        assert not grammar.ticket or table.by_ticket[grammar.ticket] is grammar, "a compile of another grammar"
    assert all(table.by_key.get(key) is g and g.retry_ns for key, g in table.busy.items()), "a stale busy grammar"
    assert len(table.by_ticket) == sum(bool(grammar.ticket) for grammar in table.by_key.values()), "lost compiles"
    for req in st.requests.values():
        assert req.pending or not req.calls, "an accepted request has calls that wait"
        assert not req.pending or all(not s.slot >= 0 for s in req.choices), "a pending request holds a slot"


def _check_seq(seq: Seq, flying: int) -> None:
    assert seq.flying == flying, f"{seq.flying} frames in flight name it, found {flying}"
    assert seq.phase is Phase.FORKING or len(seq.pages) >= pages_for(seq.fed), "fed beyond its pages"
    assert seq.length <= seq.fed, "committed more than was fed"
    assert seq.length < seq.total, "the last id has no KV yet"
    if seq.phase is not Phase.FORKING:
        assert seq.hold is not None and seq.sealed <= len(seq.pages), "more pages published than it has"
    assert len(seq.pages) <= max(seq.most_pages, pages_for(seq.total)), "more pages than it can ever need"
