"""How placements end: finish, cancel, preemption, loss; and how a choice goes back to the queue.

Slots end once (LIVE -> CLOSING -> FREE). Places of a finished or cancelled slot return with the frame that frees it,
those of a preempted one when its last frame in flight is booked, because only then is its length known.
"""

from bisect import bisect_left, insort

from meshkit.frames import SlotFree, SubmitReply, Verdict
from meshkit.types import FinishReason
from scheduler_svc.core import answers, grammar
from scheduler_svc.core.outbox import Entry
from scheduler_svc.core.prefix import Hold
from scheduler_svc.core.request import Phase, Request, Seq
from scheduler_svc.core.seal import close_out
from scheduler_svc.core.state import Closing, Rank, State, Worker, emit


def _key(seq: Seq) -> tuple[int, int, int]:
    return seq.key


def add_running(worker: Worker, seq: Seq) -> None:
    insort(worker.running, seq, key=_key)


def remove_running(worker: Worker, seq: Seq) -> None:
    at = bisect_left(worker.running, seq.key, key=_key)
    assert worker.running[at] is seq, "a placed choice is in its worker's list"
    del worker.running[at]


def clear_placement(seq: Seq) -> None:
    """Forget where it ran; rows of frames in flight no longer match it."""
    if seq.lanes is not None:
        seq.lanes.leave(seq)
    seq.worker, seq.rank, seq.slot, seq.gen = "", 0, -1, 0
    seq.pages = []
    seq.length = seq.fed = seq.flying = seq.sampling = seq.planned_step = 0
    seq.spare, seq.spare_pos, seq.hold, seq.write_from = -1, 0, None, 0
    seq.points, seq.saved = [], []


def release(st: State, closing: Closing) -> SlotFree:
    """Return a closing slot's places; the caller's frame carries the SlotFree."""
    closing.rank.slots.drop(closing.slot)
    give_back(st, closing.rank, closing.pages, closing.tails, closing.hold)
    return SlotFree(closing.slot, closing.gen)


def give_back(st: State, rank: Rank, pages: list[int], tails: list[int], hold: Hold | None) -> None:
    """Drop a choice's references: published pages stay cached, private ones are free."""
    for page in reversed(pages):
        rank.pages.drop(page)
    for tail in tails:
        rank.tails.drop(tail)
    if hold is not None:
        st.index.release(hold, st.now)


def _unfork(st: State, worker: Worker, seq: Seq) -> None:
    """A follower whose slot the worker has not heard of gives its places back at once."""
    assert seq.leader is not None
    seq.leader.followers.remove(seq)
    seq.leader = None
    remove_running(worker, seq)
    rank = worker.ranks[seq.rank]
    rank.slots.drop(seq.slot)
    give_back(st, rank, seq.pages, [], None)
    clear_placement(seq)


def requeue_followers(st: State, worker: Worker, seq: Seq) -> None:
    for follower in list(seq.followers):
        _unfork(st, worker, follower)
        st.queue.add(follower)


def unplace(st: State, seq: Seq) -> None:
    """Take a choice from wherever it is: queue, slot or both. Afterwards it is in no list; its phase is DONE."""
    if seq.phase is Phase.QUEUED:
        st.queue.remove(seq)
    elif seq.phase is Phase.PENDING:
        st.queue.unhold(seq)
    elif seq.phase is not Phase.DONE:
        worker = st.workers[seq.worker]
        rank = worker.ranks[seq.rank]
        if seq.phase is Phase.FORKING:
            _unfork(st, worker, seq)
        elif seq.phase is Phase.PREEMPTING:
            worker.preempting.remove(seq)  # its slot_free has been sent: later frames may reuse its places
            give_back(st, rank, seq.pages, close_out(st, worker, seq), seq.hold)
        else:
            requeue_followers(st, worker, seq)
            remove_running(worker, seq)
            tails = close_out(st, worker, seq)
            assert seq.hold is not None
            worker.closing.append(Closing(rank, seq.slot, seq.gen, seq.pages, tails, seq.hold))
        clear_placement(seq)
    seq.phase = Phase.DONE


def requeue(st: State, seq: Seq) -> None:
    unplace(st, seq)
    st.queue.add(seq)


def forget(st: State, seq: Seq) -> None:
    """The choice is over for its gateway: its row is no longer known."""
    st.rows.pop((seq.req.attach_id, seq.row, seq.row_gen), None)
    seq.req.choices.remove(seq)
    if not seq.req.choices:
        st.requests.pop(seq.req.request_id, None)
        answers.cancelled(st, seq.req)
        grammar.leave(st, seq.req)


def close(st: State, seq: Seq) -> None:
    """End without a word to the gateway, which closed the choice itself or no longer exists."""
    unplace(st, seq)
    forget(st, seq)


def end(
    st: State,
    seq: Seq,
    reason: FinishReason,
    error: tuple[str, str] = ("", ""),
    base: int | None = None,
    ids: list[int] | None = None,
    logprobs: list[Entry] | None = None,
) -> None:
    """End a choice and tell its gateway, with the last ids if any. A detached choice waits for its resubmission."""
    unplace(st, seq)
    seq.finish, seq.error = reason, error
    if st.finished_ns:
        st.finish_gap_ns += 0.05 * (min(st.now - st.finished_ns, 10_000_000_000) - st.finish_gap_ns)
    st.finished_ns = st.now
    st.total(f"finished_{reason.name.lower()}")
    if emit(st, seq, len(seq.emitted) if base is None else base, ids or [], reason, error, logprobs):
        forget(st, seq)


def end_request(st: State, req: Request, code: str, message: str) -> None:
    """Typed error for every open choice. A Submit that still waits is accepted: the error follows."""
    if req.pending:
        answers.answer(st, req, SubmitReply(Verdict.ACCEPTED))
    for seq in list(req.choices):
        if seq.finish is FinishReason.NONE:
            end(st, seq, FinishReason.ERROR, (code, message))


def stops_of(st: State, seq: Seq) -> tuple[int, ...]:
    """Ids that end this choice at the worker."""
    eos = st.model.eos_ids if st.model is not None and not seq.req.params.ignore_eos else ()
    return (*seq.req.params.stop_ids, *eos)


def reason_for(st: State, seq: Seq) -> FinishReason:
    """Why the worker ended this choice, from its last id; NONE if there is no reason it could have."""
    params = seq.req.params
    if seq.emitted and len(seq.emitted) >= max(1, params.min_tokens) and seq.emitted[-1] in stops_of(st, seq):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(seq.emitted) >= params.max_tokens else FinishReason.NONE


def preempt(st: State, worker: Worker, seq: Seq, frees: list[SlotFree]) -> None:
    """Take a running choice out of its slot in the frame being built (`frees`); booked ids stay."""
    st.count("preemptions")
    if seq.phase is Phase.FORKING:
        _unfork(st, worker, seq)
        st.queue.add(seq)
        return
    requeue_followers(st, worker, seq)
    remove_running(worker, seq)
    worker.ranks[seq.rank].slots.drop(seq.slot)
    frees.append(SlotFree(seq.slot, seq.gen))
    if seq.lanes is not None:
        seq.lanes.leave(seq)
    seq.slot = -1
    seq.phase = Phase.PREEMPTING
    worker.preempting.append(seq)
    if not seq.flying:
        settle_preempted(st, worker, seq)


def settle_preempted(st: State, worker: Worker, seq: Seq) -> None:
    """Its last frame is booked: publish full pages and the spare tail, return the rest, queue."""
    rank = worker.ranks[seq.rank]
    worker.preempting.remove(seq)
    if seq.spare_pos > seq.length:
        st.fault("spare_beyond_length")
        seq.spare_pos = 0
    give_back(st, rank, seq.pages, close_out(st, worker, seq), seq.hold)
    clear_placement(seq)
    st.queue.add(seq)
