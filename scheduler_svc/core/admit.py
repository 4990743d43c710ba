"""Admission: which waiting choice goes where, and how much of its prompt it need not compute.

A choice goes to the rank where it is served soonest: the price of the prefill that is left there, plus the work already
waiting on that rank. What a rank has of its pages is shared, read-only; the prefill starts at a tail, or by an exact
replay, or at the beginning, whichever is cheapest. A choice whose prefix is just being computed by another waits for it
instead of computing it again, at most as long as its own prefill is predicted to take.
"""

from dataclasses import dataclass

import numpy as np

from meshkit.frames import TailLoad
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core import finish
from scheduler_svc.core.fork import init, reserve_follower
from scheduler_svc.core.grammar import refresh
from scheduler_svc.core.keymap import I64, key_columns
from scheduler_svc.core.mixed import Sharing
from scheduler_svc.core.policy import growth_pages
from scheduler_svc.core.prefix import Match
from scheduler_svc.core.request import Donor, Phase, Seq, pages_for
from scheduler_svc.core.reuse import Action, Decision, Prices, decide
from scheduler_svc.core.room import make_room, room
from scheduler_svc.core.rows import Draft, append, evict_orphan, give_spare, prefilling
from scheduler_svc.core.seal import key_of
from scheduler_svc.core.state import MS, Rank, State, Worker
from scheduler_svc.core.tails import NO_TAIL, Reason, save_points

UNKNOWN_LAYERS = 1 << 30
"""A worker that does not tell its number of layers gets no replays: they would never be cheaper."""
TOKEN_NS = 500_000.0
"""Guess of a prefill token's time until a worker's own are known; only waiting for a running prefill depends on it."""
DECODE_LOAD = 16
"""A running choice weighs as much as so many prefill tokens when ranks are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A rank that can take a choice now, and how the choice would start there."""

    worker: Worker
    rank: Rank
    match: Match
    decision: Decision


def admit(st: State, worker: Worker, draft: Draft, sharing: Sharing) -> None:
    """Place waiting choices in turn. One whose KV does not fit yet may be passed by others, a bounded number of times.

    Another worker's next frame takes what is its.
    """
    blocked: Seq | None = None
    if len(st.queue):
        _hold_back(st)
    for seq in st.turns.candidates(st.queue, st.limits.scan, lambda s: weight(st, s), lambda s: cached_tokens(st, s)):
        if not sharing.open() or not _any_slot(st, worker, draft):
            return
        if draft.urgent is not None and seq.req.priority > draft.urgent.req.priority:
            return
        if seq.phase is not Phase.QUEUED or st.now < seq.req.hold_until_ns:
            continue
        if seq.req.all_kills >= st.limits.poison_kills:
            continue  # until it is known whether the losses were crashes
        if seq.donor is not None and _still_waits(st, seq):
            continue
        offer = best_offer(st, seq)
        if offer is None:
            if blocked is None:
                blocked = seq
                if seq.bypassed >= st.limits.bypass:
                    return
            continue
        if _finds_donor(st, seq, offer):
            continue
        if offer.worker is not worker or not sharing.has_tokens_for(seq, offer.decision.start):
            continue
        if blocked is not None:
            blocked.bypassed += 1
        _place_group(st, draft, offer, seq)
        sharing.placed(seq)
        if blocked is not None and blocked.bypassed >= st.limits.bypass:
            return


def _any_slot(st: State, worker: Worker, draft: Draft) -> bool:
    """A free slot on this worker; when requests wait for one, unclaimed dumped slots give way."""
    if any(rank.slots.free for rank in worker.ranks):
        return True
    return any(evict_orphan(st, worker, rank, draft) for rank in worker.ranks)


# ---- where ----------------------------------------------------------------------------------------------------------


def columns_of(seq: Seq) -> I64:
    """Keys of all full pages of prompt and booked ids, as the index wants them; kept until there are more."""
    pages = seq.total // PAGE_TOKENS
    if seq.columns is None or len(seq.columns) < pages:
        seq.columns = key_columns([key_of(seq, i) for i in range(pages)])
    return seq.columns[:pages]


def servable_pages(seq: Seq) -> int:
    """Pages a choice may start behind: its last token at least is computed."""
    return (seq.total - 1) // PAGE_TOKENS


def prices(st: State, worker: Worker) -> Prices:
    """What prefill costs on this worker."""
    layers = st.model.layers if st.model is not None else 0
    return Prices(layers=layers or UNKNOWN_LAYERS, token_ns=worker.cost.token_ns or TOKEN_NS)


def demand(st: State, worker: Worker, seq: Seq) -> int:
    """Pages that must be there before it starts: its tokens', those of the frames in flight, one more.

    Never more than it can use at all, so that whatever fits an empty pool is served by one.
    """
    flight = st.limits.depth * worker.hello.max_verify
    growth = _growth(st, seq) if st.limits.conservativeness else 0
    return min(seq.most_pages, pages_for(seq.total + flight) + 1 + growth)


def best_offer(st: State, seq: Seq) -> Offer | None:
    """The rank that would serve this choice soonest, of those with a slot and pages for it."""
    best: Offer | None = None
    best_score = (float("inf"), 0, 0)
    limit = servable_pages(seq)
    several = len(st.workers) > 1
    for worker in st.workers.values():
        if not worker.serving:
            continue
        need, price = demand(st, worker, seq), prices(st, worker)
        for rank in worker.ranks:
            if not rank.slots.free or room(st, rank) < need - limit:
                continue
            match = st.index.match(rank.pool, columns_of(seq), limit)
            decision = decide(match, seq.total, price)
            if spare_room(st, rank, match, decision) < need:
                continue
            wait = _load(worker, rank) * price.token_ns if several or len(worker.ranks) > 1 else 0.0
            score = (decision.price_ns + wait, -room(st, rank), -len(rank.slots.free))
            if score < best_score:
                best, best_score = Offer(worker, rank, match, decision), score
    return best


def spare_room(st: State, rank: Rank, match: Match, decision: Decision) -> int:
    """Pages there would be for this choice on that rank, the shared ones counted as its own."""
    rows = match.rows[: decision.pages]
    refs = st.index.pools[rank.pool].trie.refs[rows]
    return room(st, rank) - rank.held_back + int(np.count_nonzero(refs))


def _load(worker: Worker, rank: Rank) -> int:
    """Work waiting on a rank, in prefill tokens."""
    mine = [s for s in worker.running if s.rank == rank.index]
    return sum(s.total - s.fed for s in mine if s.phase is Phase.PREFILL) + DECODE_LOAD * len(mine)


def weight(st: State, seq: Seq) -> float:
    """What a waiting choice costs its tenant, in tokens; what ran before was paid for."""
    return 0.0 if seq.emitted else seq.total + st.outputs.expected(seq.req.params.max_tokens)


def cached_tokens(st: State, seq: Seq) -> int:
    """The longest prefix of a waiting choice that some rank has."""
    ranks = [rank for worker in st.workers.values() if worker.serving for rank in worker.ranks]
    limit, columns = servable_pages(seq), columns_of(seq)
    return PAGE_TOKENS * max((st.index.match(rank.pool, columns, limit).base for rank in ranks), default=0)


def _growth(st: State, seq: Seq) -> int:
    expected = st.outputs.expected(seq.req.params.max_tokens)
    return growth_pages(st.limits.conservativeness, expected, seq.req.params.max_tokens, len(seq.emitted))


def _hold_back(st: State) -> None:
    """Pages that running choices will want, by rank.

    A prefill has all of its own when it is placed, but one that was adopted may lack some: were they given to another
    that is placed now, it would take them from that one again, and so on without end.
    """
    for worker in st.workers.values():
        for rank in worker.ranks:
            rank.held_back = 0
        for seq in prefilling(worker):
            worker.ranks[seq.rank].held_back += max(0, pages_for(seq.total) - len(seq.pages))
        if st.limits.conservativeness:
            for seq in worker.running:
                worker.ranks[seq.rank].held_back += _growth(st, seq)


# ---- waiting for a running prefill ----------------------------------------------------------------------------------


def _still_waits(st: State, seq: Seq) -> bool:
    donor = seq.donor
    assert donor is not None
    if st.now < seq.wait_until_ns and donor.seq.gen == donor.gen and donor.seq.sealed * PAGE_TOKENS < donor.pos:
        return True
    seq.donor = None
    return False


def _finds_donor(st: State, seq: Seq, offer: Offer) -> bool:
    """True if a running prefill is about to compute pages that this choice shares: it saves a tail for it there."""
    limit = servable_pages(seq)
    if not limit or (seq.wait_until_ns and st.now >= seq.wait_until_ns):
        return False
    columns = columns_of(seq)
    best: Donor | None = None
    best_pos = offer.decision.start
    for worker in st.workers.values():
        for other in worker.running:
            if other.phase is not Phase.PREFILL or other.hold is None:
                continue
            pos = _common(columns[:limit], columns_of(other)) * PAGE_TOKENS
            if pos > max(best_pos, other.fed) and pos >= other.write_from:
                best, best_pos = Donor(other, other.gen, pos), pos
    if best is None:
        return False
    _add_point(best.seq, best.pos)
    seq.donor = best
    if not seq.wait_until_ns:
        own = prices(st, offer.worker).prefill(offer.decision.start, seq.total)
        seq.wait_until_ns = st.now + int(own)
    st.total("waits_for_prefill")
    return True


def _common(a: I64, b: I64) -> int:
    """Leading keys that are the same."""
    n = min(len(a), len(b))
    if not n or a[0, 0] != b[0, 0]:
        return 0
    same = (a[:n] == b[:n]).all(axis=1)
    return n if same.all() else int(same.argmin())


def _add_point(seq: Seq, pos: int) -> None:
    for i, (at, reasons) in enumerate(seq.points):
        if at == pos:
            seq.points[i] = (pos, reasons | int(Reason.BRANCH))
            return
    seq.points.append((pos, int(Reason.BRANCH)))
    seq.points.sort()


# ---- placing --------------------------------------------------------------------------------------------------------


def _place_group(st: State, draft: Draft, offer: Offer, seq: Seq) -> None:
    """Place a choice; siblings that have emitted nothing either share its prefill, as many as have room."""
    worker, rank = offer.worker, offer.rank
    extra = spare_room(st, rank, offer.match, offer.decision) - demand(st, worker, seq)
    last_prompt = len(seq.req.prompt) - 1
    # A slot is copied before tails are loaded, so there must be something to compute in between.
    fresh = not seq.emitted and offer.decision.start < last_prompt
    _place(st, draft, offer, seq)
    if fresh:
        for sibling in list(seq.req.choices):
            if extra <= 0 or not rank.slots.free:
                break
            if sibling.phase is not Phase.QUEUED or sibling.emitted:
                continue
            if not make_room(st, worker, rank, 1):
                break
            extra -= 1
            reserve_follower(st, worker, rank, seq, sibling)
            st.turns.started(sibling, st.outputs.expected(sibling.req.params.max_tokens))


def _place(st: State, draft: Draft, offer: Offer, seq: Seq) -> None:
    worker, rank, decision = offer.worker, offer.rank, offer.decision
    st.queue.remove(seq)
    hold = st.index.acquire(offer.match, decision.pages, decision.tail, st.now)
    shared = st.index.pools[rank.pool].trie.page[hold.rows]
    rank.pages.share_all(shared)
    need = pages_for(seq.total) - len(shared)
    made = make_room(st, worker, rank, need)
    assert made, "admission counted these pages as free or evictable"
    seq.worker, seq.rank, seq.hold = worker.name, rank.index, hold
    worker.gen += 1
    seq.slot, seq.gen = rank.slots.take(), worker.gen
    seq.phase = Phase.PREFILL
    seq.donor, seq.wait_until_ns = None, 0
    seq.length = seq.fed = decision.start
    seq.write_from = decision.write_from
    seq.cached = min(decision.start, len(seq.req.prompt))
    if seq.waited_ms < 0:
        seq.waited_ms = (st.now - seq.req.submitted_ns) // MS
    seq.points = _points(st, offer, seq)
    if decision.tail != NO_TAIL:
        draft.loads.append(TailLoad(seq.slot, decision.tail))
        draft.loading.append(hold)
    if decision.start:
        st.count("prefix_hits")
        if decision.action is Action.REPLAY:
            st.count("replays")
        st.total("cached_tokens", decision.start)
        if seq.emitted:
            st.count("resumed_from_tail")
    give_spare(st, worker, draft, seq)
    append(draft, seq, shared.tolist() + [rank.pages.take() for _ in range(need)])
    draft.inits.append(init(seq))
    refresh(st, seq.req.grammar, st.limits.refresh_ms * MS)
    finish.add_running(worker, seq)
    seq.planned_step = draft.step  # in this frame already: not to be preempted by it
    st.turns.started(seq, max(0.0, weight(st, seq) - decision.start))
    if st.limits.conservativeness:
        rank.held_back += _growth(st, seq)


def _points(st: State, offer: Offer, seq: Seq) -> list[tuple[int, int]]:
    """Where this prefill saves tails; a replay has none to offer before it is exact."""
    after, prompt = offer.decision.tails_after, len(seq.req.prompt)
    points = dict(save_points(after, prompt, st.index.branch_points(offer.match, len(columns_of(seq)))))
    if st.limits.tail_windows:
        points = {pos: reasons for pos, reasons in points.items() if reasons != Reason.INTERVAL}
        last = prompt // PAGE_TOKENS
        gap = max(1, last // (st.limits.tail_windows + 1)) * PAGE_TOKENS
        for pos in range(gap, last * PAGE_TOKENS, gap)[: st.limits.tail_windows]:
            if pos > after:
                points.setdefault(pos, int(Reason.INTERVAL))
    return sorted(points.items())
