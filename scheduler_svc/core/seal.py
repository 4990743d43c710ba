"""Publishing: sealed pages under their keys, and the tails at their ends, so that others can start from there.

A page seals when its last token is booked. If its key is published already, the choice's own page stays private and is
freed with its slot; what it has of tails goes to the published twin. Published pages are never written again.
"""

from meshkit.frames import PublishedPage
from meshkit.pages import ROOT_KEY, next_page_key
from meshkit.types import NO_PAGE, PAGE_TOKENS
from scheduler_svc.core.request import Phase, Saved, Seq, tokens_of
from scheduler_svc.core.state import Rank, State, Worker
from scheduler_svc.core.tails import INTERVAL_TOKENS, Reason

_AT_ONCE = 2  # decoding choices sealed with one frame, ...
_SHARE = 64  # ... or such a part of those that wait: all are done well before they fill another page


def seal_all(st: State, worker: Worker) -> None:
    """Publish, with the next frame, what was booked since the last one.

    Choices that began together fill their pages together: of those that decode a few are sealed per frame, in turn,
    since each page's key is some ten microseconds of hashing, and a frame is waited for.
    """
    waiting, worker.sealing = worker.sealing, []
    most = max(_AT_ONCE, len(waiting) // _SHARE)
    for seq in waiting:
        if seq.worker != worker.name or seq.phase not in (Phase.PREFILL, Phase.DECODE):
            continue
        if seq.phase is Phase.DECODE:
            if not most:
                worker.sealing.append(seq)
                continue
            most -= 1
        seal(st, worker, seq)
        _keep_spare(st, worker, seq)


def seal(st: State, worker: Worker, seq: Seq) -> None:
    """Publish a placed choice's booked pages and the tails saved at their ends."""
    hold = seq.hold
    assert hold is not None, "a placed choice has a hold"
    have, full = len(hold.rows), seq.length // PAGE_TOKENS
    rank = worker.ranks[seq.rank]
    if full > have:
        keys = [key_of(seq, i) for i in range(have, full)]
        own = seq.pages[have:full]
        gens = list(range(worker.gen + 1, worker.gen + 1 + len(keys)))
        worker.gen += len(keys)
        parent = int(st.index.pools[hold.pool].trie.page[hold.parent]) if have else NO_PAGE
        published = st.index.publish(hold, keys, own, gens, st.now)
        for i, page in enumerate(published.pages):
            if i >= published.twins:
                worker.publishes[page] = PublishedPage(page, gens[i], parent, keys[i])
                rank.pages.keep(page)
            parent = page
        _tell_siblings(st, seq, have)
    end = len(hold.rows) * PAGE_TOKENS
    for saved in [s for s in seq.saved if s.pos <= end]:
        seq.saved.remove(saved)
        if not _attach(st, worker, rank, seq, saved):
            rank.tails.drop(saved.tail)


def _tell_siblings(st: State, seq: Seq, have: int) -> None:
    """Choices that were forked off have the same pages in their tables: they hold what is published of them, too."""
    hold = seq.hold
    assert hold is not None
    for other in seq.req.choices:
        held = other.hold
        if other is seq or held is None or held.pool != hold.pool or len(held.rows) != have:
            continue
        same = 0
        for ours, theirs in zip(seq.pages[have : len(hold.rows)], other.pages[have:], strict=False):
            if ours != theirs:
                break
            same += 1
        if same:
            st.index.pools[hold.pool].trie.acquire(hold.rows[have : have + same], st.now)
            held.rows = hold.rows[: have + same]


def _attach(st: State, worker: Worker, rank: Rank, seq: Seq, saved: Saved) -> bool:
    """Give a tail to the index; False if the page has one already and the caller keeps it."""
    assert seq.hold is not None
    kept, page = st.index.attach_tail(seq.hold, saved.pos // PAGE_TOKENS, saved.tail, saved.reasons, st.now)
    if kept:
        rank.tails.keep(saved.tail)
        rank.tails.drop(saved.tail)
        worker.publish_tails[saved.tail] = page
    return kept


def _keep_spare(st: State, worker: Worker, seq: Seq) -> None:
    """Every so many tokens the spare is published and the slot gets a new one; never while a frame may write it."""
    pos = seq.spare_pos
    if seq.spare < 0 or not pos or pos % INTERVAL_TOKENS or pos > seq.sealed * PAGE_TOKENS or not _settled(seq):
        return
    if _attach(st, worker, worker.ranks[seq.rank], seq, Saved(pos, seq.spare, int(Reason.INTERVAL))):
        seq.spare, seq.spare_pos = -1, 0


def _settled(seq: Seq) -> bool:
    """No frame in flight can cross a page boundary, at which the worker would save the spare anew."""
    return not seq.flying or seq.fed // PAGE_TOKENS * PAGE_TOKENS <= seq.spare_pos


def close_out(st: State, worker: Worker, seq: Seq) -> list[int]:
    """A choice leaves its slot: publish what is booked, its spare too. Returns the tails that stay its own."""
    if seq.hold is None:
        return tails_of(seq)
    seal(st, worker, seq)
    pos = seq.spare_pos
    if (
        seq.spare >= 0
        and 0 < pos <= seq.sealed * PAGE_TOKENS
        and _settled(seq)
        and _attach(st, worker, worker.ranks[seq.rank], seq, Saved(pos, seq.spare, int(Reason.TURN)))
    ):
        seq.spare, seq.spare_pos = -1, 0
    return tails_of(seq)


def tails_of(seq: Seq) -> list[int]:
    """Tails a placed choice owns: its spare and those it has saved but not yet published."""
    spare = [seq.spare] if seq.spare >= 0 else []
    return spare + [saved.tail for saved in seq.saved]


def key_of(seq: Seq, index: int) -> bytes:
    """Key of a choice's page: the prompt's travel with the request, later ones are computed as they seal."""
    prompt_keys = seq.req.page_keys
    if index < len(prompt_keys):
        return prompt_keys[index]
    while len(prompt_keys) + len(seq.gen_keys) <= index:
        at = len(prompt_keys) + len(seq.gen_keys)
        parent = seq.gen_keys[-1] if seq.gen_keys else prompt_keys[-1] if prompt_keys else ROOT_KEY
        ids = tokens_of(seq, at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
        seq.gen_keys.append(next_page_key(parent, ids, seq.req.namespace))
    return seq.gen_keys[index - len(prompt_keys)]
