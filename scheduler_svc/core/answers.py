"""Answers to Submit, remembered by (request_id, attempt); those of pending requests come when their grammar has.

The same key gets the same answer for a minute, also where the call that asked has gone meanwhile.
"""

from meshkit.core import Reply
from meshkit.frames import SubmitReply, Verdict
from meshkit.types import RequestId
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import MS, Known, State

MOST_CALLS = 8
"""Calls of one attempt that may wait: a gateway asks again only when its call before has ended."""


def remember(st: State, request_id: RequestId, attempt: int, reply: SubmitReply) -> None:
    """Repeat this answer for a while."""
    known = st.known.get(request_id)
    if known is None:
        known = st.known[request_id] = Known(attempt, {}, 0)
        while len(st.known) > st.limits.tombstones:
            st.known.popitem(last=False)
    known.attempt = max(known.attempt, attempt)
    known.answers[attempt] = reply
    if len(known.answers) > 8:  # older attempts are superseded by now
        del known.answers[min(known.answers)]
    known.expires_ns = st.now + st.limits.tombstone_ms * MS
    st.known.move_to_end(request_id)
    st.total(f"submits_{reply.verdict.name.lower()}")


def wait(st: State, req: Request, call: int) -> None:
    """This call gets the answer of the pending request."""
    req.calls.append(call)
    if len(req.calls) > MOST_CALLS:
        _reply(st, [req.calls.pop(0)], SubmitReply(Verdict.GRAMMAR_LATER, "this call was repeated too often", 1_000))


def answer(st: State, req: Request, reply: SubmitReply) -> None:
    """The verdict on a pending request, for all its calls."""
    remember(st, req.request_id, req.attempt, reply)
    _reply(st, req.calls, reply)
    req.calls = []


def cancelled(st: State, req: Request) -> None:
    """A pending request has gone without an answer: its calls are told, and the same key does not begin it anew."""
    known = st.known.get(req.request_id)
    if req.pending and (known is None or req.attempt not in known.answers):
        answer(st, req, SubmitReply(Verdict.CANCELLED, "cancelled while its grammar was compiled"))


def supersede(st: State, req: Request, attempt: int) -> None:
    """A higher attempt has come: whoever still waits for the older one is told."""
    _reply(st, req.calls, SubmitReply(Verdict.SUPERSEDED, f"attempt {attempt} is known"))
    req.calls = []


def _reply(st: State, calls: list[int], reply: SubmitReply) -> None:
    st.effects.extend(Reply(call, reply) for call in calls)
