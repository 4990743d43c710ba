"""Grammars by source: who waits for each, whether its compile is under way, and the table of them.

One entry per tenant, source and required revision, however many requests name it; it lives while a request does, or a
compile of it. Only what can be done without touching choices is here: verdicts are in `compiled`, the compiler is a
service of its own.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshkit.types import FinishReason, GrammarKind, GrammarSource, RequestId
from scheduler_svc.core.events import Compile

if TYPE_CHECKING:
    from scheduler_svc.core.request import Request
    from scheduler_svc.core.state import State

GrammarKey = tuple[str, GrammarKind, str, str]
"""(tenant, kind, text, revision that earlier output was made under)."""


@dataclass(slots=True, eq=False)
class Grammar:
    """A source. Without `grammar_id` its users are pending; with it they keep that id as long as they live."""

    tenant: str
    kind: GrammarKind
    text: str
    rev: str  # its users have output made under this revision; empty: they were never accepted before
    grammar_id: bytes = b""
    made_under: str = ""  # revision of the verdict
    users: dict[RequestId, "Request"] = field(default_factory=dict)
    ticket: int = 0  # of the compile under way; 0 = none
    asked_ns: int = 0
    asked_boot: int = 0  # the process known when it was asked
    retry_ns: int = 0  # ask again then; 0 = not
    failures: int = 0

    @property
    def key(self) -> GrammarKey:
        return (self.tenant, self.kind, self.text, self.rev)


@dataclass(slots=True, eq=False)
class Grammars:
    """The table. `boot` names the grammar process that answered last, 0 before any has."""

    by_key: dict[GrammarKey, Grammar] = field(default_factory=dict)
    by_ticket: dict[int, Grammar] = field(default_factory=dict)
    busy: dict[GrammarKey, Grammar] = field(default_factory=dict)  # refused as too many, oldest first
    tickets: int = 0
    boot: int = 0

    def of(self, tenant: str, source: GrammarSource) -> Grammar:
        """The entry of this source, made if there is none; `join` puts it into the table."""
        key = (tenant, source.kind, source.text, source.grammar_rev)
        return self.by_key.get(key) or Grammar(*key)

    @property
    def pending(self) -> int:
        """Requests whose grammar is not there yet."""
        return sum(len(grammar.users) for grammar in self.by_key.values() if not grammar.grammar_id)


def join(st: "State", req: "Request") -> None:
    """The request is live: its grammar is kept, and asked for if there is no verdict. Repeating it does no harm."""
    grammar = req.grammar
    if grammar is None:
        return
    grammar.users[req.request_id] = req
    st.grammars.by_key[grammar.key] = grammar
    if not grammar.grammar_id and not grammar.ticket and not grammar.retry_ns:
        ask(st, grammar)


def leave(st: "State", req: "Request") -> None:
    """The request is over. A compile under way is kept until it answers, so that the next request finds it."""
    if req.grammar is not None:
        req.grammar.users.pop(req.request_id, None)
        settle(st, req.grammar)


def settle(st: "State", grammar: Grammar) -> None:
    """Forget an entry that nobody needs."""
    if not grammar.users and not grammar.ticket:
        st.grammars.by_key.pop(grammar.key, None)
        st.grammars.busy.pop(grammar.key, None)


def ask(st: "State", grammar: Grammar) -> None:
    """Send a compile; its answer comes as `Compiled`, whatever happens to it."""
    table = st.grammars
    table.tickets += 1
    grammar.ticket, grammar.asked_ns, grammar.asked_boot = table.tickets, st.now, table.boot
    grammar.retry_ns = 0
    table.by_ticket[grammar.ticket] = grammar
    table.busy.pop(grammar.key, None)
    st.total("grammar_compiles")
    rev = grammar.rev or grammar.made_under
    timeout_ms = st.limits.compile_ms
    waiting = next((req.traceparent for req in grammar.users.values() if req.traceparent), "") if not rev else ""
    st.effects.append(Compile(grammar.ticket, grammar.kind, grammar.text, grammar.tenant, rev, timeout_ms, waiting))


def unanswered(grammar: Grammar) -> list["Request"]:
    """Users without one that ended while nobody listened: its verdict is given, its error waits for a resubmission."""
    return [r for r in grammar.users.values() if any(seq.finish is FinishReason.NONE for seq in r.choices)]


def refresh(st: "State", grammar: Grammar | None, older_than_ns: int) -> None:
    """Make sure that the service (still) has a grammar which a worker is about to bind, or waits for."""
    if grammar is not None and not grammar.ticket and st.now - grammar.asked_ns > older_than_ns:
        st.total("grammar_refreshes")
        ask(st, grammar)
