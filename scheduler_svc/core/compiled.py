"""What the grammar service said: pending requests go on, are refused, or wait for another try.

A request that was never accepted waits a bounded time and is refused with a verdict; one that was accepted before (its
source names the revision of its output) is tried again until its deadline. Another process of the service gets all
live grammars again; under another revision it cannot serve them, and their requests end with an error.
"""

from meshkit.frames import SubmitReply, Verdict
from scheduler_svc.core import adopt, answers, finish
from scheduler_svc.core.events import CompileAnswer, Outcome
from scheduler_svc.core.grammar import Grammar, ask, settle, unanswered
from scheduler_svc.core.request import Phase, Request
from scheduler_svc.core.state import MS, State

_LEAST_PAUSE_MS, _MOST_PAUSE_MS = 100, 2_000
_BROKE = {Outcome.TIMEOUT: "took too long to compile", Outcome.CRASHED: "could not be compiled"}


def compiled(st: State, ticket: int, answer: CompileAnswer | None) -> None:
    """A compile ended."""
    grammar = st.grammars.by_ticket.pop(ticket, None)
    if grammar is None:
        st.fault("compiled_unasked")
        return
    grammar.ticket = 0
    if answer is None or answer.outcome in (Outcome.BUSY, Outcome.TIMEOUT, Outcome.CRASHED):
        _not_now(st, grammar, answer)
    elif answer.outcome is Outcome.OK and grammar.grammar_id in (b"", answer.grammar_id):
        _there(st, grammar, answer)
    else:
        _never(st, grammar, answer)
    settle(st, grammar)
    if answer is not None and answer.outcome is not Outcome.BUSY:
        _ask_next(st, grammar.tenant)


def _ask_next(st: State, tenant: str) -> None:
    """A compile has ended: the service has room for one that it refused as too many, of this tenant or of any."""
    busy = list(st.grammars.busy.values())
    chosen = next((g for g in busy if g.tenant == tenant), busy[0] if busy else None)
    if chosen is not None:
        ask(st, chosen)


def service_started(st: State, boot: int) -> None:
    """Its first word: another process knows none of the live grammars; the same one can be asked again at once."""
    table = st.grammars
    changed, table.boot = boot != table.boot, boot
    if changed:
        st.count("grammar_boots")
    for grammar in list(table.by_key.values()):
        grammar.failures = 0
        if not grammar.ticket and (changed or grammar.retry_ns):
            ask(st, grammar)


def due(st: State) -> None:
    """Ask again for what failed; refuse who has waited long enough."""
    for grammar in list(st.grammars.by_key.values()):
        if not grammar.grammar_id and not grammar.rev:
            for req in [r for r in unanswered(grammar) if _waited(st, r)]:
                _later(st, req, "the grammar service did not answer in time")
        if grammar.users and grammar.retry_ns and st.now >= grammar.retry_ns:
            st.total("grammar_retries")
            ask(st, grammar)
        settle(st, grammar)


def _waited(st: State, req: Request) -> bool:
    return st.now - req.pending_ns >= st.limits.grammar_wait_ms * MS


def _there(st: State, grammar: Grammar, answer: CompileAnswer) -> None:
    waiting = [] if grammar.grammar_id else unanswered(grammar)
    grammar.grammar_id, grammar.made_under = answer.grammar_id, answer.grammar_rev
    grammar.failures = 0
    if grammar.users and grammar.asked_boot != st.grammars.boot:
        ask(st, grammar)  # the process that answered may be gone
    for req in waiting:
        for seq in req.choices:
            if seq.phase is Phase.PENDING:
                st.queue.unhold(seq)
                st.queue.add(seq)
        answers.answer(st, req, SubmitReply(Verdict.ACCEPTED, grammar_rev=answer.grammar_rev))
        adopt.claim(st, req)


def _not_now(st: State, grammar: Grammar, answer: CompileAnswer | None) -> None:
    """Busy, broken or away."""
    grammar.failures += 1
    broke = _BROKE.get(answer.outcome) if answer is not None else None
    if not grammar.grammar_id and not grammar.rev and broke:
        for req in unanswered(grammar):
            _later(st, req, f"the grammar {broke}")
    pause_ms = min(_MOST_PAUSE_MS, _LEAST_PAUSE_MS << min(grammar.failures - 1, 8))
    if answer is not None:
        pause_ms = min(_MOST_PAUSE_MS, max(pause_ms, answer.retry_after_ms))
    grammar.retry_ns = st.now + pause_ms * MS
    if answer is not None and answer.outcome is Outcome.BUSY:
        st.grammars.busy[grammar.key] = grammar


def _never(st: State, grammar: Grammar, answer: CompileAnswer) -> None:
    message = answer.message or f"the grammar service answered {answer.outcome.name}"
    for req in unanswered(grammar):
        if req.pending:
            _refuse(st, req, SubmitReply(Verdict.BAD_GRAMMAR, message, place=answer.place))
        else:
            st.count("grammars_lost")
            finish.end_request(st, req, "grammar_failed", f"the grammar service was replaced: {message}")


def _later(st: State, req: Request, message: str) -> None:
    st.count("grammars_later")
    _refuse(st, req, SubmitReply(Verdict.GRAMMAR_LATER, message, 1_000))


def _refuse(st: State, req: Request, reply: SubmitReply) -> None:
    answers.answer(st, req, reply)
    for seq in list(req.choices):
        finish.close(st, seq)
