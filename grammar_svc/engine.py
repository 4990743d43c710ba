"""The mask engine of one attachment: sessions by slot, entries that are due. Pure: frames in, entries out.

Every bind and every row of tokens is answered by one entry, as soon as its grammar is here. A frame about a slot_gen
that is not bound (any more) is counted and ignored; a gap in a slot's ids fails that slot and no other. Masks of
one round are filled in one call.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np

from grammar_svc.ring import ring_row
from grammar_svc.session import Kind, Matcher, Matchers, Rows, Session

# An ambiguous grammar makes masks dearer with every token (80 ms after 250 of them), and all slots share one loop. So a
# slot has a budget of processor time: full at the bind, earned back with each entry. Ordinary entries take 0.005 ms: a
# round of all slots that stays below what one entry earns is not looked at; after a dearer one every row is timed.
BUDGET_S: Final = 0.5
EARNED_S: Final = 0.005
CAREFUL_ROUNDS: Final = 32
# Every single byte is a token, and those have the lowest ids: a mask that allows anything shows it in its first words.
HEAD_WORDS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of the model: `think_end` is -1 when it does not think."""

    vocab_size: int
    words: int
    eos_ids: tuple[int, ...]
    think_end: int


class Entry(NamedTuple):
    """Of `n_rows` ring rows from `row` on; -1 without rows."""

    slot: int
    slot_gen: int
    position: int
    kind: Kind
    n_rows: int
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
        matchers: Matchers,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        assert rows.shape == (2 * slots * max_verify, facts.words), rows.shape
        self._facts, self._rows, self._slots, self._verify = facts, rows, slots, max_verify
        self._get, self._want, self._matchers, self._cpu_s = get, want, matchers, cpu_s
        self._bound: dict[int, _Bound] = {}
        self._due: dict[int, None] = {}  # slots, in order
        self._careful = 0  # rounds in which every row is still timed
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
        self._due[slot] = None

    def unbind(self, slot: int, slot_gen: int) -> None:
        """The slot ended. Of a generation that is not bound: no effect."""
        bound = self._bound.get(slot)
        if bound is None or bound.slot_gen != slot_gen:
            self.counts["unbind_stale"] += 1
            return
        del self._bound[slot]
        self._due.pop(slot, None)

    def advance(self, slot: int, slot_gen: int, base: int, ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """One row of `advance_rows`."""
        self.advance_rows((slot,), (slot_gen,), (base,), (len(ids),), ids, (len(drafts),), drafts)

    def advance_rows(
        self,
        slots: Sequence[int],
        slot_gens: Sequence[int],
        bases: Sequence[int],
        counts: Sequence[int],
        ids: Sequence[int],
        draft_counts: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> None:
        """Sampled ids of output positions base, base + 1, ... of each row; those known already are skipped.

        `ids` holds counts[i] of row i, `drafts` what may follow: draft_counts[i] of row i.
        """
        began = self._cpu_s()
        at = draft_at = 0
        for slot, gen, base, count, ahead in zip(slots, slot_gens, bases, counts, draft_counts or repeat(0)):
            first, at, draft_first, draft_at = at, at + count, draft_at, draft_at + ahead
            bound = self._bound.get(slot)
            if bound is None or bound.slot_gen != gen:
                self.counts["tokens_stale"] += 1
                continue
            session = bound.session
            if count == 1 and base == session.position and session.live is not None and not self._careful:
                session.accept(session.live, ids[first])
            else:
                self._advance(bound, base, ids[first:at])
            bound.drafts = drafts[draft_first : min(draft_at, draft_first + self._verify - 1)] if ahead else ()
            bound.due = True
            self._due[slot] = None
        self._look(self._cpu_s() - began)

    def _advance(self, bound: _Bound, base: int, ids: Sequence[int]) -> None:
        session = bound.session
        if base > session.position:
            self.counts["gaps"] += 1
            session.fail(f"ids begin at position {base}, the last known is {session.position}")
            return
        began = self._cpu_s()
        session.advance(ids[session.position - base :])
        bound.budget_s -= self._cpu_s() - began

    def _look(self, spent_s: float) -> None:
        """After a round dearer than what one entry earns, rows are timed one by one for a while."""
        if spent_s > EARNED_S:
            self._careful = CAREFUL_ROUNDS
        elif self._careful:
            self._careful -= 1

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
        if not self._due:
            return []
        began = self._cpu_s()
        due, self._due = self._due, {}
        entries: list[Entry] = []
        at: list[int] = []  # of the batch: places among the entries, matchers, first rows
        matchers: list[Matcher] = []
        rows: list[int] = []
        for slot in due:
            bound = self._bound[slot]
            session = bound.session
            live, position = session.live, session.position
            first = ring_row(position, slot, self._slots, self._verify)
            if live is not None and session.plain and not bound.drafts and not self._careful:
                bound.due = False
                at.append(len(entries))
                matchers.append(live)
                rows.append(first)
                entries.append(Entry(slot, bound.slot_gen, position, Kind.MASKED, 1, first))
            elif (entry := self._write(slot, bound, first)) is not None:
                entries.append(entry)
        if matchers:
            self._matchers.fill(matchers, self._rows, rows)
            for index in np.flatnonzero(~self._rows[rows, :HEAD_WORDS].any(axis=1)).tolist():
                entries[at[index]] = self._checked(entries[at[index]])
        self._look(self._cpu_s() - began)
        return entries

    def _write(self, slot: int, bound: _Bound, first: int) -> Entry | None:
        """One entry on its own, timed; None while the grammar is missing."""
        session = bound.session
        began = self._cpu_s()
        written = session.write(self._rows[first : first + 1 + len(bound.drafts)], bound.drafts)
        bound.budget_s = min(BUDGET_S, bound.budget_s - (self._cpu_s() - began) + EARNED_S)
        if written is None:
            return None  # still due: grammar_ready asks again
        bound.due = False
        kind, count = written
        if bound.budget_s < 0 and kind is Kind.MASKED:
            self.counts["too_costly"] += 1
            session.fail("computing its masks takes too long: the grammar is too ambiguous")
            kind, count = Kind.FAILED, 0
        return Entry(slot, bound.slot_gen, session.position, kind, count, first if count else -1, session.error)

    def _checked(self, entry: Entry) -> Entry:
        """An entry whose mask shows nothing in its first words: failed if nothing is behind them either."""
        if self._rows[entry.row].any():
            return entry
        session = self._bound[entry.slot].session
        session.stuck()
        return entry._replace(kind=Kind.FAILED, n_rows=0, row=-1, error=session.error)

    def _supply(self, session: Session) -> None:
        grammar = self._get(session.grammar_id)
        if grammar is not None:
            session.give(grammar, self._matchers)
        elif not session.error:
            self._want(session.grammar_id)
