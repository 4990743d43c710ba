"""The mask engine of one attachment: sessions by slot, entries that are due. Pure: frames in, entries out.

Every bind and every row of tokens is answered by one entry, as soon as its grammar is here. A frame about a slot_gen
that is not bound (any more) is counted and ignored; a gap in a slot's ids fails that slot and no other.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from grammar_svc.ring import ring_row
from grammar_svc.session import Kind, NewMatcher, Rows, Session

# An ambiguous grammar makes masks dearer with every token (80 ms after 250 of them), and all slots share one loop. So a
# slot has a budget of processor time: full at the bind, earned back with each entry. Ordinary entries take 0.01 ms.
BUDGET_S: Final = 0.5
EARNED_S: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of the model: `think_end` is -1 when it does not think."""

    vocab_size: int
    words: int
    eos_ids: tuple[int, ...]
    think_end: int


@dataclass(frozen=True, slots=True)
class Entry:
    """`row` is the first ring row, -1 without rows."""

    slot: int
    slot_gen: int
    position: int
    kind: Kind
    count: int
    row: int
    error: str = ""


@dataclass(slots=True)
class _Bound:
    slot_gen: int
    session: Session
    drafts: Sequence[int] = ()
    due: bool = field(default=True)
    budget_s: float = BUDGET_S


class Engine:
    """`get(id)`: the compiled grammar or None; `want(id)` asks for it, `grammar_ready` or `grammar_refused` answer."""

    def __init__(
        self,
        facts: Facts,
        rows: Rows,
        slots: int,
        max_verify: int,
        *,
        get: Callable[[bytes], Any | None],
        want: Callable[[bytes], None],
        new: NewMatcher,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        assert rows.shape == (2 * slots * max_verify, facts.words), rows.shape
        self._facts, self._rows, self._slots, self._verify = facts, rows, slots, max_verify
        self._get, self._want, self._new, self._cpu_s = get, want, new, cpu_s
        self._bound: dict[int, _Bound] = {}
        self._due: dict[int, None] = {}  # slots, in order
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._bound)

    def bind(
        self,
        slot: int,
        slot_gen: int,
        grammar_id: bytes,
        *,
        thinking: bool = False,
        emitted: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """A new session, its emitted ids replayed; an older one of the slot ends."""
        old = self._bound.get(slot)
        if old is not None and old.slot_gen > slot_gen:
            self.counts["bind_stale"] += 1
            return
        facts = self._facts
        session = Session(grammar_id, facts.eos_ids, stop_ids, facts.think_end if thinking else None)
        self._bound[slot] = _Bound(slot_gen, session)
        if thinking and facts.think_end < 0:
            session.fail("this model has no </think>: bind without thinking")
        session.advance(emitted)
        self._supply(session)
        self._mark(slot)

    def unbind(self, slot: int, slot_gen: int) -> None:
        """The slot ended. Of a generation that is not bound: no effect."""
        bound = self._bound.get(slot)
        if bound is None or bound.slot_gen != slot_gen:
            self.counts["unbind_stale"] += 1
            return
        del self._bound[slot]
        self._due.pop(slot, None)

    def advance(self, slot: int, slot_gen: int, base: int, ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Sampled ids of output positions base, base + 1, ...; those known already are skipped. Drafts may follow."""
        bound = self._bound.get(slot)
        if bound is None or bound.slot_gen != slot_gen:
            self.counts["tokens_stale"] += 1
            return
        session = bound.session
        if base > session.position:
            self.counts["gaps"] += 1
            session.fail(f"ids begin at position {base}, the last known is {session.position}")
        else:
            began = self._cpu_s()
            session.advance(ids[session.position - base :])
            bound.budget_s -= self._cpu_s() - began
        bound.drafts = drafts[: self._verify - 1]
        self._mark(slot)

    def grammar_ready(self, grammar_id: bytes) -> None:
        """Sessions that wait for it go on."""
        for slot, bound in self._bound.items():
            if bound.session.grammar_id == grammar_id and not bound.session.has_grammar:
                self._supply(bound.session)
                if bound.due:
                    self._due[slot] = None

    def grammar_refused(self, grammar_id: bytes, why: str) -> None:
        """Sessions that wait for it fail."""
        for slot, bound in self._bound.items():
            if bound.session.grammar_id == grammar_id and not bound.session.has_grammar:
                bound.session.fail(why)
                if bound.due:
                    self._due[slot] = None

    def take(self) -> list[Entry]:
        """Entries that can be answered now, their rows written."""
        slots, self._due = self._due, {}
        entries = []
        for slot in slots:
            bound = self._bound[slot]
            session = bound.session
            first = ring_row(session.position, slot, self._slots, self._verify)
            began = self._cpu_s()
            written = session.write(self._rows[first : first + 1 + len(bound.drafts)], bound.drafts)
            bound.budget_s = min(BUDGET_S, bound.budget_s - (self._cpu_s() - began) + EARNED_S)
            if written is None:
                continue  # still due: grammar_ready asks again
            bound.due = False
            kind, count = written
            if bound.budget_s < 0 and kind is Kind.MASKED:
                self.counts["too_costly"] += 1
                session.fail("computing its masks takes too long: the grammar is too ambiguous")
                kind, count = Kind.FAILED, 0
            entries.append(
                Entry(slot, bound.slot_gen, session.position, kind, count, first if count else -1, session.error)
            )
        return entries

    def _mark(self, slot: int) -> None:
        self._bound[slot].due = True
        self._due[slot] = None

    def _supply(self, session: Session) -> None:
        grammar = self._get(session.grammar_id)
        if grammar is not None:
            session.give(grammar, self._new)
        elif not session.error:
            self._want(session.grammar_id)
