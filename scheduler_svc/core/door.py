"""At the door: limits per tenant and the forecast, applied to a request that nobody has accepted yet.

A resubmission is a promise made before and is never refused here. Reads the tables; changes only what it has learnt.
"""

from itertools import chain

from meshkit.frames import Submit, SubmitReply, Verdict
from scheduler_svc.core.forecast import Ahead, Newcomer, Site, ahead_of, delay_ns, retry_after_ms
from scheduler_svc.core.mixed import target_ns
from scheduler_svc.core.request import Phase, pages_for
from scheduler_svc.core.room import room
from scheduler_svc.core.state import State, Worker

_LITTLE = 16  # a sixteenth of the queue is little


def refuse(st: State, sub: Submit, choices: int, nbytes: int) -> SubmitReply | None:
    """Too much of one tenant, or too late for its deadline; None lets it in."""
    if sub.attempt > 1:
        return None
    return _over_limit(st, sub, choices, nbytes) or _too_late(st, sub, choices)


def queue_full(st: State, tenant: str, choices: int, nbytes: int) -> bool:
    """Whether so much more is too much. Who has little waiting finds a reserve when others have filled the queue."""
    limits, queue = st.limits, st.queue
    count, size = len(queue) + queue.held + choices, queue.nbytes + nbytes
    if count <= limits.queue_requests and size <= limits.queue_bytes:
        return False
    waiting, waiting_bytes = queue.of_tenant(tenant)
    little = limits.queue_requests // _LITTLE, limits.queue_bytes // _LITTLE
    if not tenant or waiting + choices > little[0] or waiting_bytes + nbytes > little[1]:
        return True
    return count > limits.queue_requests * 5 // 4 or size > limits.queue_bytes * 5 // 4


def _over_limit(st: State, sub: Submit, choices: int, nbytes: int) -> SubmitReply | None:
    if not sub.tenant:
        return None  # nobody in particular
    limits = st.limits
    waiting, waiting_bytes = st.queue.of_tenant(sub.tenant)
    if limits.tenant_queue_bytes and waiting_bytes and waiting_bytes + nbytes > limits.tenant_queue_bytes:
        reason = f"this key has {waiting_bytes} bytes waiting, the limit is {limits.tenant_queue_bytes}"
        return SubmitReply(Verdict.QUEUE_FULL, reason, st.retry_after_ms())
    if limits.tenant_choices:
        placed = chain.from_iterable((*w.running, *w.preempting) for w in st.workers.values())
        mine = waiting + sum(s.req.tenant == sub.tenant for s in placed)
        if mine + choices > limits.tenant_choices:
            reason = f"this key has {mine} choices in flight, the limit is {limits.tenant_choices}"
            return SubmitReply(Verdict.QUEUE_FULL, reason, st.retry_after_ms())
    return None


def _too_late(st: State, sub: Submit, choices: int) -> SubmitReply | None:
    """Refused only if it is others' work that makes it late."""
    deadline_ms = min(sub.remaining_ms, st.limits.first_token_ms)
    new = Newcomer(sub.tenant, sub.priority, len(sub.prompt), choices, pages_for(len(sub.prompt) + 1))
    sites = _sites(st)
    forecast = delay_ns(sites, ahead_of(st.queue, new), new, st.outputs.mean)
    retry = retry_after_ms(forecast, deadline_ms)
    if retry is None:
        return None
    for site in sites:
        site.prefills, site.running = [], 0
    if retry_after_ms(delay_ns(sites, Ahead(), new, st.outputs.mean), deadline_ms) is not None:
        return None  # it could not make it alone either: let it try
    st.count("refused_by_forecast")
    reason = f"its first token would take about {forecast / 1e9:.0f} s, its deadline is in {deadline_ms / 1e3:.0f} s"
    return SubmitReply(Verdict.QUEUE_FULL, reason, retry)


def learn(st: State) -> None:
    """Now and then: how long outputs are, and how long a short newcomer would wait."""
    finished = st.counters.get("finished_stop", 0) + st.counters.get("finished_length", 0)
    st.outputs.learn(st.counters.get("tokens", 0), finished)
    st.wait_ns = 0.0
    if len(st.queue):
        ahead = Ahead(float(st.queue.tokens), float(len(st.queue)))
        st.wait_ns = delay_ns(_sites(st), ahead, Newcomer("", 0, 1), st.outputs.mean)


def _sites(st: State) -> list[Site]:
    return [_site(st, worker) for worker in st.workers.values() if worker.serving]


def _site(st: State, worker: Worker) -> Site:
    last = worker.cost.last
    return Site(
        cost=worker.cost,
        running=len(worker.running),
        prefills=[s.total - s.fed for s in worker.running if s.phase is Phase.PREFILL],
        free_slots=sum(len(rank.slots.free) for rank in worker.ranks),
        free_pages=sum(room(st, rank) for rank in worker.ranks),
        used_pages=sum(rank.pages.size - room(st, rank) for rank in worker.ranks),
        target_ns=target_ns(st, worker.cost, last.rows, last.row_context, late=True),
        most_tokens=min(st.limits.chunk_tokens, worker.hello.max_step_tokens),
    )
