"""What a Submit does: one verdict per (request_id, attempt), and what a higher attempt means for a request we know.

A request whose grammar is not there yet queues at once and is answered with the grammar's verdict (`compiled`).

A resubmission names the ids its gateway has. If what we hold goes on from exactly those, the slot stays, the row is
renamed and the missing ids are sent again; otherwise the gateway's ids are the truth and the choice starts over.
"""

import heapq
from typing import Final

from meshkit.frames import Submit, SubmitChoice, SubmitReply, Verdict
from meshkit.pages import namespace_key, page_keys
from meshkit.traceparent import is_sampled
from meshkit.types import NO_GRAMMAR_SERVICE, NO_LOGPROBS, PAGE_TOKENS, FinishReason
from scheduler_svc.core import adopt, answers, door, finish, grammar
from scheduler_svc.core.request import Phase, Request, Seq, pages_for
from scheduler_svc.core.state import MS, State, emit

NO_SERVICE = (
    "no grammar service is configured; start the mesh with `v4mesh up --grammar on`, or `v4mesh grammar` alone and "
    "name its address in [scheduler] and [worker] as `grammar`"
)


BEFORE: Final = 1 << 40
"""Resubmitted requests were accepted by a scheduler before this one: they are served before what is new here."""

SPARE_DEADLINES: Final = 256
"""Of requests that have ended: so many may stay however few are live."""


def submit(st: State, sub: Submit, call: int) -> SubmitReply | None:
    """Decide, remember the answer and act on it. None: `call` is answered later."""
    known, live = st.known.get(sub.request_id), st.requests.get(sub.request_id)
    if known is not None and sub.attempt in known.answers:
        st.total("submits_repeated")
        return known.answers[sub.attempt]
    if live is not None and sub.attempt == live.attempt:  # it outlived its answer
        st.total("submits_repeated")
        if live.pending:
            answers.wait(st, live, call)
            return None
        return SubmitReply(Verdict.ACCEPTED, grammar_rev=live.grammar.made_under if live.grammar is not None else "")
    if sub.attach_id not in st.listeners:
        st.count("submits_stale")
        return SubmitReply(Verdict.STALE_ATTACH, "this attachment is not open; attach again and resubmit")
    highest = max(known.attempt if known is not None else 0, live.attempt if live is not None else 0)
    if sub.attempt < highest:
        return SubmitReply(Verdict.SUPERSEDED, f"attempt {highest} is known")
    if live is not None:
        answers.supersede(st, live, sub.attempt)
    reply = _decide(st, sub)
    if reply.verdict is Verdict.ACCEPTED and (req := st.requests.get(sub.request_id)) is not None:
        if req.pending:
            answers.wait(st, req, call)
            return None
        if req.grammar is not None:
            reply = SubmitReply(Verdict.ACCEPTED, grammar_rev=req.grammar.made_under)
    answers.remember(st, sub.request_id, sub.attempt, reply)
    return reply


def _decide(st: State, sub: Submit) -> SubmitReply:
    wrong = _invalid(st, sub)
    if wrong:
        return SubmitReply(Verdict.INVALID, wrong)
    choices = [c for c in sub.choices if (sub.attach_id, c.row, c.row_gen) not in st.tombstones]
    req = st.requests.get(sub.request_id)
    if not choices:
        _close_all(st, req)
        return SubmitReply(Verdict.CANCELLED, "cancelled before it arrived")
    if req is None and sub.kill_count >= st.limits.poison_kills:
        return SubmitReply(Verdict.POISONED, f"it was running at {sub.kill_count} worker crashes")
    if req is not None:
        _rebind(st, req, sub, choices)
        return SubmitReply(Verdict.ACCEPTED)
    refusal = _refuse(st, sub, choices)
    if refusal is not None:
        return refusal
    _accept(st, sub, choices)
    return SubmitReply(Verdict.ACCEPTED)


def _invalid(st: State, sub: Submit) -> str:
    if not sub.choices or len(sub.choices) > st.limits.max_choices:
        return f"choices: {len(sub.choices)} is not in 1..{st.limits.max_choices}"
    if len({c.choice for c in sub.choices}) != len(sub.choices):
        return "choices: an index appears twice"
    if not len(sub.prompt):
        return "prompt: empty; send at least one id"
    if sub.params.max_tokens < 1:
        return f"max_tokens: {sub.params.max_tokens} is not positive"
    if sub.page_keys and len(sub.page_keys) != len(sub.prompt) // PAGE_TOKENS:
        return f"page_keys: {len(sub.page_keys)} keys for {len(sub.prompt) // PAGE_TOKENS} full pages"
    if sub.grammar is not None and len(sub.grammar.text) > st.limits.grammar_bytes:
        return f"grammar: {len(sub.grammar.text)} characters, the limit is {st.limits.grammar_bytes}"
    for c in sub.choices:
        other = st.rows.get((sub.attach_id, c.row, c.row_gen))
        if other is not None:
            return f"choices: row {c.row} generation {c.row_gen} is in use"
    vocab = st.model.vocab_size if st.model is not None else 0
    if vocab and not 0 <= int(sub.prompt.min()) <= int(sub.prompt.max()) < vocab:
        return f"prompt: an id is outside 0..{vocab - 1}"
    return ""


def never_fits(st: State, prompt: int, max_tokens: int) -> str:
    """Why such a request can never run here; empty if it can, or if no worker has told its size yet."""
    if st.model is not None and prompt + max_tokens > st.model.max_context:
        return f"prompt + max_tokens = {prompt + max_tokens} exceeds the context of {st.model.max_context} tokens"
    sizes = [w.hello.pages for w in st.workers.values()]
    need = pages_for(prompt + max_tokens - 1)
    if sizes and need > max(sizes):
        return f"prompt + max_tokens needs {need} KV pages, an empty pool has {max(sizes)}"
    return ""


def _refuse(st: State, sub: Submit, choices: list[SubmitChoice]) -> SubmitReply | None:
    if st.draining:
        return SubmitReply(Verdict.DRAINING, "shutting down", 1_000)
    if sub.grammar is not None and not st.limits.grammar:
        return SubmitReply(Verdict.BAD_GRAMMAR, NO_SERVICE, place=NO_GRAMMAR_SERVICE)
    too_big = never_fits(st, len(sub.prompt), sub.params.max_tokens)
    if too_big:
        return SubmitReply(Verdict.NEVER_FITS, too_big)
    hoping = st.limits.workers or st.dumped or st.now - st.started_ns < st.limits.no_worker_grace_ms * MS
    if not st.workers and not hoping:
        return SubmitReply(Verdict.NO_WORKER, "no worker has attached", 1_000)
    nbytes = sum(4 * (len(sub.prompt) + len(c.emitted)) + 1024 for c in choices)
    nbytes += len(sub.grammar.text) if sub.grammar is not None else 0
    if door.queue_full(st, sub.tenant, len(choices), nbytes):
        return SubmitReply(Verdict.QUEUE_FULL, f"{len(st.queue) + st.queue.held} choices wait", st.retry_after_ms())
    return door.refuse(st, sub, len(choices), nbytes)


def _accept(st: State, sub: Submit, choices: list[SubmitChoice]) -> None:
    st.arrivals += 1
    namespace, keys = _names(st, sub)
    req = Request(
        request_id=sub.request_id,
        attempt=sub.attempt,
        gateway=st.listeners[sub.attach_id].name,
        gateway_boot=st.listeners[sub.attach_id].boot,
        attach_id=sub.attach_id,
        tenant=sub.tenant,
        priority=sub.priority,
        params=sub.params,
        seed=sub.seed,
        prompt=sub.prompt,
        page_keys=keys,
        namespace=namespace,
        arrival=st.arrivals - (BEFORE if sub.attempt > 1 else 0),
        deadline_ns=st.now + sub.remaining_ms * MS,
        kills=sub.kill_count,
        traceparent=sub.traceparent if is_sampled(sub.traceparent) else "",
        submitted_ns=st.now,
    )
    if sub.grammar is not None:
        req.grammar, req.thinking = st.grammars.of(sub.tenant, sub.grammar), sub.grammar.thinking
        req.pending_ns = st.now
    if sub.attempt > 1 and not dumps_done(st):
        req.hold_until_ns = st.started_ns + st.limits.resume_wait_ms * MS
    st.requests[sub.request_id] = req
    _watch(st, req)
    for c in choices:
        _add_choice(st, req, c)
    _settle_table(st, req)
    adopt.claim(st, req)


def _watch(st: State, req: Request) -> None:
    """End it at its deadline. What has ended long before its own is swept out when it is most of what is watched."""
    if len(st.deadlines) > 2 * len(st.requests) + SPARE_DEADLINES:
        st.deadlines = [(it.deadline_ns, it.arrival, it.request_id) for it in st.requests.values()]
        heapq.heapify(st.deadlines)
    heapq.heappush(st.deadlines, (req.deadline_ns, req.arrival, req.request_id))


def _names(st: State, sub: Submit) -> tuple[bytes, tuple[bytes, ...]]:
    """Namespace and prompt keys: the gateway's, or our own if it sent none, or a request's own if nothing is shared."""
    revision, layout = (st.model.revision, st.model.kv_layout_id) if st.model is not None else ("", "")
    namespace, keys = sub.namespace, sub.page_keys
    if not st.limits.prefix_cache or (not namespace and st.model is None):
        namespace, keys = namespace_key(sub.request_id.hex(), "", revision, layout), ()
    elif not namespace:
        namespace = namespace_key(sub.tenant, "", revision, layout)
    if not keys:
        keys = tuple(page_keys(sub.prompt, namespace))
    return namespace, keys


def dumps_done(st: State) -> bool:
    """Whether every configured worker has dumped since start, or the time for it is over."""
    if st.now - st.started_ns >= st.limits.resume_wait_ms * MS:
        return True
    return bool(st.limits.workers) and all(name in st.dumped for name in st.limits.workers)


def release_held(st: State) -> None:
    """Let resubmitted requests be placed anew, once no dump can bring a slot of theirs any more."""
    if dumps_done(st):
        for req in st.requests.values():
            req.hold_until_ns = 0


def _add_choice(st: State, req: Request, c: SubmitChoice) -> None:
    seq = Seq(req=req, choice=c.choice, row=c.row, row_gen=c.row_gen, ids=list(c.emitted))
    req.choices.append(seq)
    st.rows[(req.attach_id, c.row, c.row_gen)] = seq
    seq.phase = Phase.DONE
    _start(st, seq)


def _start(st: State, seq: Seq) -> None:
    """Queue a choice, unless its ids say that it has ended already."""
    reason = finish.reason_for(st, seq) if seq.emitted else FinishReason.NONE
    if reason is FinishReason.NONE and seq.req.pending:
        st.queue.hold(seq)
    elif reason is FinishReason.NONE:
        st.queue.add(seq)
    else:
        finish.end(st, seq, reason)


def _close_all(st: State, req: Request | None) -> None:
    if req is not None:
        for seq in list(req.choices):
            finish.close(st, seq)


def _rebind(st: State, req: Request, sub: Submit, choices: list[SubmitChoice]) -> None:
    """A higher attempt takes over: rows are renamed, choices it does not name are closed."""
    st.count("rebinds")
    named = [c.choice for c in choices]
    for seq in [s for s in req.choices if s.choice not in named]:
        finish.close(st, seq)  # while its row is still known under the old attachment
    for seq in req.choices:
        st.rows.pop((req.attach_id, seq.row, seq.row_gen), None)
        if seq.lanes is not None:
            seq.lanes.leave(seq)  # it knows the old row
    req.attempt, req.attach_id, req.expire_ns = sub.attempt, sub.attach_id, 0
    req.gateway, req.gateway_boot = st.listeners[sub.attach_id].name, st.listeners[sub.attach_id].boot
    req.deadline_ns = st.now + sub.remaining_ms * MS
    _watch(st, req)
    ours = {seq.choice: seq for seq in req.choices}
    for c in choices:
        if c.choice not in ours:
            _add_choice(st, req, c)
            continue
        seq = ours[c.choice]
        seq.row, seq.row_gen = c.row, c.row_gen
        st.rows[(req.attach_id, c.row, c.row_gen)] = seq
        _reconcile(st, seq, list(c.emitted))
    if req.kills >= st.limits.poison_kills:  # ended so while nobody listened; what started over must not wait for ever
        finish.end_request(st, req, "request_poisoned", f"it was running at {req.kills} worker crashes")
    _settle_table(st, req)
    adopt.claim(st, req)


def _settle_table(st: State, req: Request) -> None:
    """Choices may have ended while others were still being added: the table holds the request iff one is left."""
    if req.choices:
        st.requests[req.request_id] = req
        grammar.join(st, req)
    else:
        st.requests.pop(req.request_id, None)


def _reconcile(st: State, seq: Seq, theirs: list[int]) -> None:
    missing = len(seq.emitted) - len(theirs)
    same = missing >= 0 and seq.emitted[: len(theirs)] == theirs
    if same and (missing == 0 or seq.req.params.top_logprobs == NO_LOGPROBS):
        ids = seq.emitted[len(theirs) :]
        if seq.finish is not FinishReason.NONE:
            if emit(st, seq, len(theirs), ids, seq.finish, seq.error):
                finish.forget(st, seq)
        elif ids:
            emit(st, seq, len(theirs), ids)
        return
    if not same and seq.emitted != theirs[: len(seq.emitted)]:
        st.fault("ids_diverged")
    finish.unplace(st, seq)
    seq.ids = theirs
    seq.gen_keys, seq.columns = [], None
    seq.finish, seq.error = FinishReason.NONE, ("", "")
    _start(st, seq)
