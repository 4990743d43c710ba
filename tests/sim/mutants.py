"""Planted bugs: each breaks one rule of the real cores by patching a function, and the simulator must find it.

Kept at the level a careless change would have: a check left out, a field not carried, an order swapped.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from gateway.journal import journal as journal_module
from gateway.journal.journal import Journal
from gateway.journal.rows import RowTable
from gateway.journal.timers import Alarm
from grammar_svc.engine import Engine
from grammar_svc.session import Session
from meshkit import uplink
from meshkit.frames import SubmitReply, Verdict
from meshkit.pages import namespace_key, page_keys
from scheduler_svc.core import admit, adopt, answers, attach, book, compiled, finish, fork, room, seal, submit
from scheduler_svc.core import scheduler as scheduler_module
from scheduler_svc.core.grammar import Grammar, Grammars
from scheduler_svc.core.ledger import Pool
from scheduler_svc.core.prefix import PrefixIndex
from scheduler_svc.core.reuse import Prices
from scheduler_svc.core.state import Worker
from scheduler_svc.core.trie import PageTrie
from tests.sim.runner import collector_off
from tests.sim.scenario import draw
from tests.sim.shrink import attempt
from worker_svc.core import book as worker_book
from worker_svc.core import plan as worker_plan
from worker_svc.core import slots as worker_slots
from worker_svc.core.dump import dump_frames
from worker_svc.core.resident import ResidentSlots
from worker_svc.core.table import SlotTable
from worker_svc.masks.book import MaskBook


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug to plant: (owner, attribute, replacement made from the original)."""

    name: str
    patches: tuple[tuple[Any, str, Callable[[Any], Any]], ...]

    @property
    def halves(self) -> "tuple[Mutant, ...]":
        """Each of its patches alone. A bug of several patches takes out rules that cover each other."""
        if len(self.patches) == 1:
            return ()
        return tuple(
            Mutant(f"{self.name}: {number}. {patch[1]} alone", (patch,)) for number, patch in enumerate(self.patches, 1)
        )

    @property
    def originals(self) -> list[tuple[Any, str, Any]]:
        """What the patched names were when this module was loaded."""
        return [(owner, name, _ORIGINALS[(id(owner), name)]) for owner, name, _ in self.patches]


@dataclass(frozen=True, slots=True)
class Found:
    """The first seed that showed the bug, the processor time until then, and what it broke."""

    seed: int
    cpu_s: float
    message: str


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is in place inside the block."""
    with ExitStack() as stack:
        for owner, name, make in mutant.patches:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
        yield


def hunt(mutant: Mutant, first: int, limit: int, cpu_s: float = 1e9) -> Found | None:
    """Run seeds until one fails, at most so many and so many seconds of processor time."""
    started = time.process_time()
    with planted(mutant), collector_off() as seed_done:
        for seed in range(first, first + limit):
            failure = attempt(draw(seed))[1]
            spent = time.process_time() - started
            if failure is not None and not _fails_anyway(mutant, seed):
                return Found(seed, spent, failure.message)
            if spent > cpu_s:
                return None
            seed_done()
    return None


def _fails_anyway(mutant: Mutant, seed: int) -> bool:
    """Whether the seed fails without the planted bug, too."""
    with ExitStack() as stack:
        for owner, name, original in mutant.originals:
            stack.enter_context(mock.patch.object(owner, name, original))
        return attempt(draw(seed))[1] is not None


# ---- gateway --------------------------------------------------------------------------------------------------------


def _cancel_keeps_entry(original: Any) -> Any:
    def client_gone(self: Journal, request_id: Any) -> None:
        return None

    return client_gone


def _seed_not_carried(original: Any) -> Any:
    def build(entry: Any, attach_id: int, remaining_ms: int) -> Any:
        request = original(entry, attach_id, remaining_ms)
        return replace(request, seed=request.seed ^ 1) if request.attempt > 1 else request

    return build


def _emitted_not_carried(original: Any) -> Any:
    def build(entry: Any, attach_id: int, remaining_ms: int) -> Any:
        request = original(entry, attach_id, remaining_ms)
        return replace(request, choices=tuple(replace(choice, emitted=()) for choice in request.choices))

    return build


def _overlap_not_dropped(original: Any) -> Any:
    def book_row(self: Any, entry: Any, choice: Any, base: int, *rest: Any) -> Any:
        return original(self, entry, choice, max(base, len(choice.ids)), *rest)

    return book_row


def _cancels_not_sent(original: Any) -> Any:
    def take(self: RowTable) -> list[Any]:
        original(self)
        return []

    return take


def _fences_off(original: Any) -> Any:
    def received(self: Any, conn: int, envelope: Any, now_ns: int, out: list[Any]) -> Any:
        if self._conn is None or not self.attach_id:
            return original(self, conn, envelope, now_ns, out)
        return original(self, self._conn, replace(envelope, attach_id=self.attach_id), now_ns, out)

    return received


# ---- scheduler ------------------------------------------------------------------------------------------------------


def _last_page_kept(original: Any) -> Any:
    def release(st: Any, closing: Any) -> Any:
        closing.pages = closing.pages[:-1]
        return original(st, closing)

    return release


def _row_generation_unchecked(original: Any) -> Any:
    def book_frame(st: Any, worker: Worker, record: Any, result: Any) -> None:
        for row in record.rows:
            if row.seq.worker == worker.name:
                row.gen = row.seq.gen
        record.gens = np.array([seq.gen if seq.worker == worker.name else -1 for seq in record.seqs], np.int64)
        original(st, worker, record, result)

    return book_frame


def _tombstones_ignored(original: Any) -> Any:
    def decide(st: Any, sub: Any) -> Any:
        st.tombstones.clear()
        return original(st, sub)

    return decide


def _base_off_by_one(original: Any) -> Any:
    def emit(st: Any, seq: Any, base: int, *rest: Any, **more: Any) -> Any:
        return original(st, seq, base + 1, *rest, **more)

    return emit


def _resent_from_zero(original: Any) -> Any:
    """Harmless alone: the journal drops what it has."""

    def emit(st: Any, seq: Any, base: int, ids: list[int], *rest: Any, **more: Any) -> Any:
        return original(st, seq, 0, list(seq.emitted), *rest, **more)

    return emit


def _spare_position_wrong(original: Any) -> Any:
    def close_out(st: Any, worker: Worker, seq: Any) -> list[int]:
        if seq.spare_pos > 256:
            seq.spare_pos -= 256
        found: list[int] = original(st, worker, seq)
        return found

    return close_out


def _adopted_unseen(original: Any) -> Any:
    def missing(seq: Any, orphan: Any, limit: int) -> Any:
        found = original(seq, orphan, limit)
        return None if found is None else []

    return missing


def _not_retired(original: Any) -> Any:
    def evict(st: Any, worker: Worker, rank: Any, n: int) -> int:
        before = list(worker.retire_pages)
        found = original(st, worker, rank, n)
        worker.retire_pages = before
        return found

    return evict


def _history_not_sent(original: Any) -> Any:
    return lambda seq: replace(original(seq), emitted=())


def _start_without_ids(original: Any) -> Any:
    return lambda seq: replace(original(seq), n_emitted=0)


def _freed_twice(original: Any) -> Any:
    def drop(self: Pool, place: int) -> Any:
        was_last = original(self, place)
        if was_last and len(self.free) == 2:
            self.free.append(place)
        return was_last

    return drop


def _nothing(original: Any) -> Any:
    """The call is left out."""
    return lambda *args, **more: None


def _deadline_ignored(original: Any) -> Any:
    def alarm(self: Journal, entry: Any, kind: Any, *rest: Any) -> None:
        if kind is not Alarm.DEADLINE:
            original(self, entry, kind, *rest)

    return alarm


def _any_slot_adopted(original: Any) -> Any:
    def missing(seq: Any, orphan: Any, limit: int) -> Any:
        return list(orphan.last_ids[-max(0, orphan.n_emitted - len(seq.emitted)) :])

    return missing


def _only_first_closed(original: Any) -> Any:
    def close_rows(st: Any, attach_id: int, rows: list[int], row_gens: list[int]) -> None:
        original(st, attach_id, rows[:1], row_gens[:1])

    return close_rows


def _one_namespace(original: Any) -> Any:
    def names(st: Any, sub: Any) -> Any:
        namespace = namespace_key("", "", "rev", "kv")
        return namespace, tuple(page_keys(sub.prompt, namespace))

    return names


def _tail_a_page_early(original: Any) -> Any:
    def attach(st: Any, worker: Worker, rank: Any, seq: Any, saved: Any) -> bool:
        return original(st, worker, rank, seq, replace(saved, pos=saved.pos - 256 if saved.pos > 256 else saved.pos))

    return attach


def _replay_too_short(original: Any) -> Any:
    return property(lambda self: original.fget(self) - 1)


def _shared_pages_written(original: Any) -> Any:
    def place(st: Any, draft: Any, offer: Any, seq: Any) -> None:
        original(st, draft, offer, seq)
        seq.write_from = 0

    return place


def _published_before_booked(original: Any) -> Any:
    def seal_choice(st: Any, worker: Worker, seq: Any) -> None:
        length, seq.length = seq.length, min(seq.fed, seq.total)
        original(st, worker, seq)
        seq.length = length

    return seal_choice


def _always_settled(original: Any) -> Any:
    return lambda seq: True


def _pending_admitted(original: Any) -> Any:
    def start(st: Any, seq: Any) -> None:
        if seq.req.pending and not seq.emitted:
            st.queue.add(seq)
        else:
            original(st, seq)

    return start


def _repeat_accepted(original: Any) -> Any:
    def decide(st: Any, sub: Any, call: int) -> Any:
        live = st.requests.get(sub.request_id)
        if live is not None and live.attempt == sub.attempt and live.pending:
            return SubmitReply(Verdict.ACCEPTED)
        return original(st, sub, call)

    return decide


def _repeat_starts_over(original: Any) -> Any:
    def wait(st: Any, req: Any, call: int) -> None:
        req.calls = []
        original(st, req, call)

    return wait


def _only_boot_noted(original: Any) -> Any:
    def started(st: Any, boot: int) -> None:
        st.grammars.boot = boot

    return started


def _text_not_in_key(original: Any) -> Any:
    return property(lambda self: (self.tenant, self.kind, "", self.rev))


def _source_of_any_text(original: Any) -> Any:
    def of(self: Any, tenant: str, source: Any) -> Any:
        found = self.by_key.get((tenant, source.kind, "", source.grammar_rev))
        return found or original(self, tenant, source)

    return of


def _never_waited(original: Any) -> Any:
    return lambda st, req: False


def _thinking_not_sent(original: Any) -> Any:
    return lambda seq: replace(original(seq), thinking=False)


def _first_user_only(original: Any) -> Any:
    def there(st: Any, grammar: Any, answer: Any) -> None:
        users = grammar.users
        grammar.users = dict(list(users.items())[:1])
        original(st, grammar, answer)
        grammar.users = users

    return there


# ---- worker ---------------------------------------------------------------------------------------------------------


def _partial_page_forgotten(original: Any) -> Any:
    return lambda *args: replace(original(*args), src_page=-1, dst_page=-1)


def _parked_advances(original: Any) -> Any:
    def advance(self: ResidentSlots, row: Any, tokens: tuple[int, ...], *, failed: bool = False) -> int:
        found = original(self, row, tokens, failed=failed)
        if row.sample_last and not tokens and row.slot in self.places:
            self.places[row.slot].length += 1
        return found

    return advance


def _stop_ids_ignored(original: Any) -> Any:
    return lambda table, params: frozenset() if params.ignore_eos else frozenset(table.model.eos_ids)


def _dump_before_held_frames(original: Any) -> Any:
    def advance(self: Any, now_ns: int, out: list[Any]) -> None:
        if self._link.attached and not self._dumped:
            self._dumped, self._lost_ns = True, None
            for chunk in dump_frames(self.table):
                self._link.send(chunk, out)
        original(self, now_ns, out)

    return advance


def _spare_saved_early(original: Any) -> Any:
    def chunk_row(table: Any, slot: Any, chunk: Any) -> Any:
        row = original(table, slot, chunk)
        if row.spare_saved > 256:
            row.spare_saved -= 256
        return row

    return chunk_row


def _one_too_many(original: Any) -> Any:
    def ends(slot: Any, token: int) -> Any:
        return token in slot.stops or slot.n_emitted > slot.params.max_tokens

    return ends


def _touched_kept(original: Any) -> Any:
    return lambda frame: []


def _refresh_forgotten(original: Any) -> Any:
    def advance(self: ResidentSlots, row: Any, tokens: tuple[int, ...], *, failed: bool = False) -> int:
        original(self, row, tokens, failed=failed)
        return 0

    return advance


def _generations_restart(original: Any) -> Any:
    return lambda self: replace(original(self), max_gen=0)


def _none_released(original: Any) -> Any:
    def take(self: SlotTable) -> list[Any]:
        original(self)
        return []

    return take


# ---- masks ----------------------------------------------------------------------------------------------------------


def _bound_again(original: Any) -> Any:
    def bind(self: MaskBook, inits: Any) -> None:
        self._freed.clear()
        original(self, inits)

    return bind


def _any_position_taken(original: Any) -> Any:
    def deliver(self: MaskBook, entries: Any) -> int:
        places = {number: len(slot.emitted) for number, slot in self._slots.items()}
        return original(self, [entry._replace(position=places.get(entry.slot, 0)) for entry in entries])

    return deliver


def _any_generation_taken(original: Any) -> Any:
    def deliver(self: MaskBook, entries: Any) -> int:
        gens = {number: slot.gen for number, slot in self._slots.items()}
        return original(self, [entry._replace(slot_gen=gens.get(entry.slot, 0)) for entry in entries])

    return deliver


def _said_once(original: Any) -> Any:
    def attached(self: MaskBook) -> None:
        told = dict(self._told)
        original(self)
        self._told = told
        self._dirty = {}

    return attached


def _early_ids_forgotten(original: Any) -> Any:
    def start(self: Session) -> None:
        self._pending.clear()
        original(self)

    return start


def _unarmed_at_once(original: Any) -> Any:
    def make(self: Session, grammar_id: bytes, eos_ids: Any, stop_ids: Any, think_end: Any) -> None:
        original(self, grammar_id, eos_ids, stop_ids, None)

    return make


def _eos_only(original: Any) -> Any:
    def make(self: Session, grammar_id: bytes, eos_ids: Any, stop_ids: Any, think_end: Any) -> None:
        original(self, grammar_id, eos_ids, (), think_end)

    return make


MUTANTS: tuple[Mutant, ...] = (
    Mutant("ids_after_cancel", ((Journal, "_client_gone", _cancel_keeps_entry),)),
    Mutant("seed_not_carried", ((journal_module, "build_submit", _seed_not_carried),)),
    Mutant("emitted_not_carried", ((journal_module, "build_submit", _emitted_not_carried),)),
    Mutant("overlap_not_dropped", ((Journal, "_book", _overlap_not_dropped), (submit, "emit", _resent_from_zero))),
    Mutant("cancels_not_sent", ((RowTable, "take_batches", _cancels_not_sent),)),
    Mutant("fences_off", ((uplink.Uplink, "received", _fences_off),)),
    Mutant("page_not_returned", ((finish, "release", _last_page_kept),)),
    Mutant("row_generation_unchecked", ((book, "book", _row_generation_unchecked),)),
    Mutant("tombstones_ignored", ((submit, "_decide", _tombstones_ignored),)),
    Mutant("resume_base_off_by_one", ((submit, "emit", _base_off_by_one),)),
    Mutant("tail_at_wrong_position", ((finish, "close_out", _spare_position_wrong),)),
    Mutant("adopted_ids_not_told", ((adopt, "_missing_ids", _adopted_unseen),)),
    Mutant("freed_page_not_retired", ((room, "evict", _not_retired),)),
    Mutant("history_not_sent", ((admit, "init", _history_not_sent), (fork, "init", _history_not_sent))),
    Mutant("output_position_restarts", ((admit, "init", _start_without_ids), (fork, "init", _start_without_ids))),
    Mutant("page_freed_twice", ((Pool, "drop", _freed_twice),)),
    Mutant("pool_of_lost_worker_kept", ((PrefixIndex, "drop_pool", _nothing),)),
    Mutant("namespace_ignored", ((submit, "_names", _one_namespace),)),
    Mutant("tail_at_wrong_page", ((seal, "_attach", _tail_a_page_early),)),
    Mutant("replay_too_short", ((Prices, "replay_tokens", _replay_too_short),)),
    Mutant("shared_pages_written", ((admit, "_place", _shared_pages_written),)),
    Mutant("published_before_booked", ((seal, "seal", _published_before_booked),)),
    Mutant("spare_published_while_written", ((seal, "_settled", _always_settled),)),
    Mutant("pages_in_use_evicted", ((PageTrie, "acquire", _nothing), (PageTrie, "release", _nothing))),
    Mutant("only_first_cancel_of_batch", ((attach, "close_rows", _only_first_closed),)),
    Mutant("deadline_ignored", ((Journal, "_alarm", _deadline_ignored), (finish, "end_request", _nothing))),
    Mutant("orphans_not_dropped", ((adopt, "drop_orphan", _nothing),)),
    Mutant("any_slot_adopted", ((adopt, "_missing_ids", _any_slot_adopted),)),
    Mutant("pending_request_admitted", ((submit, "_start", _pending_admitted),)),
    Mutant("repeat_while_pending_accepted", ((scheduler_module, "submit", _repeat_accepted),)),
    Mutant("earlier_calls_forgotten", ((answers, "wait", _repeat_starts_over),)),
    Mutant("cancel_while_pending_unanswered", ((answers, "cancelled", _nothing),)),
    Mutant("late_grammar_waited_for", ((compiled, "_waited", _never_waited),)),
    Mutant("thinking_not_sent", ((admit, "init", _thinking_not_sent), (fork, "init", _thinking_not_sent))),
    Mutant("grammar_of_another_text", ((Grammar, "key", _text_not_in_key), (Grammars, "of", _source_of_any_text))),
    Mutant("verdict_for_the_first_only", ((compiled, "_there", _first_user_only),)),
    Mutant("failed_row_not_booked", ((book, "_fail_row", _nothing),)),
    Mutant(
        "grammars_of_a_dead_process",
        ((compiled, "service_started", _only_boot_noted), (book, "refresh", _nothing), (admit, "refresh", _nothing)),
    ),
    Mutant("failed_step_keeps_slots", ((worker_slots, "touched_slots", _touched_kept),)),
    Mutant("tail_refresh_forgotten", ((ResidentSlots, "advance", _refresh_forgotten),)),
    Mutant("generations_restart", ((worker_slots.SlotMachine, "_hello", _generations_restart),)),
    Mutant("copy_forgets_partial_page", ((worker_plan, "_copy", _partial_page_forgotten),)),
    Mutant("parked_row_advances", ((ResidentSlots, "advance", _parked_advances),)),
    Mutant("stop_ids_ignored", ((worker_plan, "_stops", _stop_ids_ignored),)),
    Mutant("dump_before_held_frames", ((worker_slots.SlotMachine, "_advance", _dump_before_held_frames),)),
    Mutant("spare_saved_a_page_early", ((worker_plan, "_chunk_row", _spare_saved_early),)),
    Mutant("grammar_session_kept", ((SlotTable, "take_released", _none_released),)),
    Mutant("mask_of_another_position", ((MaskBook, "deliver", _any_position_taken),)),
    Mutant(
        "mask_of_another_generation",
        ((MaskBook, "deliver", _any_generation_taken), (MaskBook, "deliver", _any_position_taken)),
    ),
    Mutant("new_mask_stream_told_nothing", ((MaskBook, "attached", _said_once),)),
    Mutant("freed_slot_keeps_its_masks", ((MaskBook, "free", _nothing),)),
    Mutant("freed_slot_is_bound_again", ((MaskBook, "bind", _bound_again),)),
    Mutant("ids_before_the_grammar_forgotten", ((Session, "_start", _early_ids_forgotten),)),
    Mutant("thinking_constrained", ((Session, "__init__", _unarmed_at_once),)),
    Mutant("stop_ids_unknown_to_masks", ((Session, "__init__", _eos_only),)),
    Mutant("waiting_sessions_forgotten", ((Engine, "grammar_ready", _nothing),)),
    Mutant("one_token_too_many", ((worker_book, "_ends", _one_too_many),)),
)

_ORIGINALS = {(id(owner), name): getattr(owner, name) for mutant in MUTANTS for owner, name, _ in mutant.patches}
