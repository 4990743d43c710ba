"""n > 1: siblings share one prefill, all on one rank; then each goes on in a slot of its own."""

import numpy as np

from meshkit.frames import SlotCopy, SlotInit
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core import finish
from scheduler_svc.core.prefix import Hold
from scheduler_svc.core.request import Phase, Seq
from scheduler_svc.core.rows import Draft, append, give_spare
from scheduler_svc.core.state import Rank, State, Worker


def init(seq: Seq) -> SlotInit:
    """What the worker needs to know of a choice that gets a slot."""
    params, grammar = seq.req.params, seq.req.grammar
    assert grammar is None or grammar.grammar_id, "a choice gets a slot once its grammar is there"
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
        emitted=tuple(seq.emitted) if params.reads_output or grammar is not None else (),
        prompt=tuple(seq.req.prompt.tolist()) if params.reads_prompt else (),
        grammar_id=grammar.grammar_id if grammar is not None else b"",
        thinking=seq.req.thinking,
        traceparent=seq.req.traceparent,
    )


def reserve_follower(st: State, worker: Worker, rank: Rank, leader: Seq, seq: Seq) -> None:
    """A slot and the page of the prompt's last token; everything before it will be the leader's."""
    st.queue.remove(seq)
    seq.worker, seq.rank = worker.name, rank.index
    seq.slot = rank.slots.take()
    seq.pages = [rank.pages.take()]
    seq.phase = Phase.FORKING
    seq.leader = leader
    seq.donor = None
    leader.followers.append(seq)
    finish.add_running(worker, seq)


def fork(st: State, worker: Worker, draft: Draft, leader: Seq) -> None:
    """All but the last prompt token are fed: siblings take ring, states and partial page, share the full pages."""
    rank = worker.ranks[leader.rank]
    at = leader.fed
    assert leader.hold is not None, "a placed choice has a hold"
    shared = leader.pages[: at // PAGE_TOKENS]
    partial = at % PAGE_TOKENS != 0
    for seq in leader.followers:
        worker.gen += 1
        seq.gen = worker.gen
        own = seq.pages
        rank.pages.share_all(np.array(shared, np.int32))
        seq.hold = _same(st, leader.hold)
        seq.pages = []
        seq.length, seq.fed = leader.length, at  # what is not booked yet is the leader's to publish
        seq.write_from = leader.write_from
        seq.cached = leader.cached
        seq.phase = Phase.PREFILL
        seq.leader = None
        draft.inits.append(init(seq))
        give_spare(st, worker, draft, seq)
        draft.copies.append(
            SlotCopy(leader.slot, seq.slot, leader.pages[at // PAGE_TOKENS], own[0])
            if partial
            else SlotCopy(leader.slot, seq.slot, -1, -1)
        )
        append(draft, seq, shared + own)
        seq.planned_step = draft.step  # in this frame already: not to be preempted by it
    leader.followers = []


def _same(st: State, hold: Hold) -> Hold:
    """Another hold of the same pages."""
    st.index.pools[hold.pool].trie.acquire(hold.rows, st.now)
    return Hold(hold.pool, hold.generation, hold.rows)
