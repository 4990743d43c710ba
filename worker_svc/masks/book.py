"""Which slots are constrained, what the grammar service has been told of them, and the masks it has answered.

The executor's thread binds, takes and tells (`source.MaskSource`); the event loop's thread carries messages. What is to
be said is kept as a difference, slot by slot: so it is bounded, and after a reconnect the same comparison says
everything again. A mask that has come stays good, also when the stream it came on has ended.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from meshkit.obs import Metrics
from worker_svc.core.work import GRAMMAR_FAILED, Fault, SlotInit
from worker_svc.masks.source import PARKED, READY, Answer, Ask, MaskRows, Told

ALONE_S: Final = 0.05
"""How long a step waits whose rows all lack their masks: running it without them would do nothing."""
WAIT_BUCKETS: Final = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_ALL: Final = np.int32(-1)


class Kind(IntEnum):
    """What the service says of a position; see grammar.proto."""

    FREE = 0  # anything but EOS and stop ids
    MASKED = 1
    DONE = 2  # the grammar has ended: nothing but EOS and stop ids
    FAILED = 3


class Entry(NamedTuple):
    """The answer for one output position. MASKED ones have `places` rows of `source`, which is the ring or a message's.

    A tuple, as one is made per row and step; for the same reason `kind` is the bare number.
    """

    slot: int
    slot_gen: int
    position: int
    kind: int
    source: MaskRows | None = None
    first: int = 0
    places: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class BindOrder:
    slot: int
    slot_gen: int
    grammar_id: bytes
    thinking: bool
    emitted: tuple[int, ...]
    stop_ids: tuple[int, ...]


class TokenOrder(NamedTuple):
    slot: int
    slot_gen: int
    base: int
    ids: tuple[int, ...]
    drafts: tuple[int, ...]


@dataclass(slots=True)
class Outgoing:
    """What the service does not know yet."""

    unbinds: list[tuple[int, int]] = field(default_factory=list)
    binds: list[BindOrder] = field(default_factory=list)
    tokens: list[TokenOrder] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    gen: int
    grammar_id: bytes
    thinking: bool
    stop_ids: tuple[int, ...]
    emitted: list[int]
    drafts: tuple[int, ...] = ()
    entry: Entry | None = None  # of position len(emitted)


class MaskBook:
    """Implements `source.MaskSource`. `wake` is called, from any thread, when there is something to say."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], metrics: Metrics | None = None) -> None:
        self.words = -(-vocab_size // 32)
        self.wake: Callable[[], None] = lambda: None
        self._eos_ids = tuple(eos_ids)
        self._changed = threading.Condition(threading.Lock())
        self._slots: dict[int, _Slot] = {}
        self._freed: dict[int, int] = {}  # slot -> last generation that ended
        self._told: dict[int, tuple[int, int]] = {}  # slot -> generation bound at the service, ids it has
        self._dirty: dict[int, None] = {}
        self._attached = False
        self._refusal = ""
        metrics = metrics or Metrics()
        self._waits = metrics.histogram("v4mesh_mask_wait_seconds", "Time a step waited for masks", WAIT_BUCKETS)
        self._rows = metrics.counter(
            "v4mesh_mask_rows_total", "Constrained rows about to be sampled", outcome=("ready", "parked", "failed")
        )
        self._bound = metrics.gauge("v4mesh_mask_slots", "Constrained slots")
        self._link = metrics.gauge("v4mesh_mask_attached", "1 while the grammar service answers")

    # ---- the executor's side ----------------------------------------------------------------------------------------

    def bind(self, inits: Sequence[SlotInit]) -> None:
        """See `MaskSource`."""
        if not inits:
            return
        with self._changed:
            for init in inits:
                if init.slot_gen <= self._freed.get(init.slot, 0):
                    continue  # freed by a later frame, which was prepared while this one waited for the device
                if init.grammar_id:
                    self._slots[init.slot] = _Slot(
                        init.slot_gen, init.grammar_id, init.thinking, init.params.stop_ids, list(init.emitted)
                    )
                elif self._slots.pop(init.slot, None) is None:
                    continue
                self._dirty[init.slot] = None
            self._bound.put(len(self._slots))
            news = bool(self._dirty)
        if news:
            self.wake()

    def take(self, asks: Sequence[Ask], out: MaskRows, *, wait_s: float, alone: bool) -> list[Answer]:
        """See `MaskSource`."""
        assert out.shape[0] >= sum(ask.places for ask in asks) and out.shape[1] == self.words, out.shape
        began = time.monotonic()
        with self._changed:
            found = [self._find(ask) for ask in asks]
            missing = found.count(None)
            alone = alone and missing == len(asks)
            end = began + (wait_s + ALONE_S if alone else wait_s if self._attached else 0.0)
            while missing and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
                found = [self._find(ask) for ask in asks]
                missing = found.count(None)
                if missing < len(asks):
                    end = min(end, time.monotonic() + wait_s)
        self._waits.observe(time.monotonic() - began)
        return self._copy(asks, found, out)

    def tell(self, rows: Sequence[Told]) -> None:
        """See `MaskSource`."""
        if not rows:
            return
        with self._changed:
            for told in rows:
                slot = self._slots.get(told.slot)
                if slot is None or slot.gen != told.slot_gen:
                    continue
                assert told.position == len(slot.emitted), f"{told} after {len(slot.emitted)} ids"
                slot.emitted.extend(told.tokens)
                slot.drafts, slot.entry = told.drafts, None
                if told.ended:
                    del self._slots[told.slot]
                self._dirty[told.slot] = None
            self._bound.put(len(self._slots))
        self.wake()

    def _find(self, ask: Ask) -> Entry | Answer | None:
        """The entry, or what else there is to say, or None while it may still come. Under the lock."""
        slot = self._slots.get(ask.slot)
        if slot is None or slot.gen != ask.slot_gen:
            return PARKED  # freed meanwhile: nobody waits for what it samples
        if len(slot.emitted) > ask.position:
            self._rewind(ask.slot, slot, ask.position)
        assert len(slot.emitted) == ask.position, f"{ask}, but {len(slot.emitted)} ids were told"
        entry = slot.entry
        if entry is None:
            return Answer(False, Fault(GRAMMAR_FAILED, self._refusal)) if self._refusal else None
        if entry.kind == Kind.FAILED:
            return Answer(False, Fault(GRAMMAR_FAILED, entry.error))
        if entry.kind == Kind.MASKED and entry.places < ask.places:
            return None
        return entry

    def _rewind(self, number: int, slot: _Slot, position: int) -> None:
        """Tokens were told by a step that did not count in the end: start the session over."""
        del slot.emitted[position:]
        slot.entry, slot.drafts = None, ()
        self._told.pop(number, None)
        self._dirty[number] = None
        self.wake()

    def _copy(self, asks: Sequence[Ask], found: Sequence[Entry | Answer | None], out: MaskRows) -> list[Answer]:
        """Outside the lock: a ring row is written again only after the next word about its slot."""
        answers, at, ready, failed = [], 0, 0, 0
        for ask, entry in zip(asks, found, strict=True):
            if isinstance(entry, Entry):
                if entry.source is None:
                    self._write_without_rows(out[at : at + ask.places], entry)
                elif ask.places == 1:
                    out[at] = entry.source[entry.first]
                else:
                    out[at : at + ask.places] = entry.source[entry.first : entry.first + ask.places]
                ready += 1
                answers.append(READY)
            else:
                answer = entry or PARKED
                failed += answer.fault is not None
                answers.append(answer)
            at += ask.places
        for outcome, amount in (("ready", ready), ("failed", failed), ("parked", len(asks) - ready - failed)):
            if amount:
                self._rows.add(amount, outcome=outcome)
        return answers

    def _write_without_rows(self, out: MaskRows, entry: Entry) -> None:
        """FREE: all but EOS and stop ids; DONE: only these."""
        slot = self._slots.get(entry.slot)
        stops = (*self._eos_ids, *(slot.stop_ids if slot is not None else ()))
        free = entry.kind == Kind.FREE
        out[:] = _ALL if free else 0
        for stop in stops:
            bit = np.uint32(1 << (stop & 31)).astype(np.int32)  # wraps: bit 31 is the sign
            if free:
                out[:, stop >> 5] &= ~bit
            else:
                out[:, stop >> 5] |= bit

    # ---- the stream's side ------------------------------------------------------------------------------------------

    def free(self, number: int, slot_gen: int) -> None:
        """The slot is gone."""
        with self._changed:
            self._freed[number] = max(slot_gen, self._freed.get(number, 0))
            slot = self._slots.get(number)
            if slot is None or slot.gen != slot_gen:
                return
            del self._slots[number]
            self._dirty[number] = None
            self._bound.put(len(self._slots))
        self.wake()

    def attached(self) -> None:
        """A new stream: its far end knows nothing."""
        with self._changed:
            self._attached, self._refusal = True, ""
            self._told.clear()
            self._dirty = dict.fromkeys(self._slots)
        self._link.put(1)
        self.wake()

    def detached(self) -> None:
        """Slots keep the masks they have and wait for the next ones."""
        with self._changed:
            self._attached = False
        self._link.put(0)

    def refused(self, reason: str) -> None:
        """The service will not serve this worker: what waits for it fails, until `attached`."""
        with self._changed:
            self._refusal = reason
            self._changed.notify_all()

    def outgoing(self) -> Outgoing:
        """What is to be said now; counts as said."""
        out = Outgoing()
        with self._changed:
            for number in self._dirty:
                self._compare(number, out)
            self._dirty.clear()
        return out

    def deliver(self, entries: Iterable[Entry]) -> int:
        """Take what has come; returns how many were of slots or positions that are not current any more."""
        stale = 0
        with self._changed:
            for entry in entries:
                slot = self._slots.get(entry.slot)
                if slot is None or slot.gen != entry.slot_gen or entry.position != len(slot.emitted):
                    stale += 1
                else:
                    slot.entry = entry
            self._changed.notify_all()
        return stale

    def _compare(self, number: int, out: Outgoing) -> None:
        slot, told = self._slots.get(number), self._told.get(number)
        if slot is None:
            if told is not None:
                out.unbinds.append((number, told[0]))
                del self._told[number]
            return
        if told is None or told[0] != slot.gen:
            ids = tuple(slot.emitted)
            out.binds.append(BindOrder(number, slot.gen, slot.grammar_id, slot.thinking, ids, slot.stop_ids))
            if slot.drafts:
                out.tokens.append(TokenOrder(number, slot.gen, len(ids), (), slot.drafts))
        elif told[1] < len(slot.emitted):
            out.tokens.append(TokenOrder(number, slot.gen, told[1], tuple(slot.emitted[told[1] :]), slot.drafts))
        self._told[number] = (slot.gen, len(slot.emitted))
