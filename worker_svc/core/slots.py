"""The worker's slot machine: obeys one scheduler attachment and runs its step frames in order.

A frame is launched as soon as it is here, behind those under way, and booked when the device has done it. Pure:
`handle(event, now_ns) -> effects`. Stream handling, queueing, parking and error policy live here; what a frame does to
the tables is in `plan` and `book`, the tables in `table`. Tensors belong to the executor behind `Run`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np

from meshkit.core import Closed, Count, Opened, Received, Tick, WakeAt
from meshkit.frames import Heartbeat, ResultFrame, RowState, StepFrame, WorkerHello
from meshkit.types import PROTO_REV, ModelInfo
from meshkit.uplink import MS, NEVER, Change, LinkTiming, Uplink
from worker_svc.core.book import book
from worker_svc.core.dump import dump_frames
from worker_svc.core.effects import Freed, Ran, Run
from worker_svc.core.plan import Prepared, highest_gen, must_wait, named_slots, prepare, publish, touched_slots
from worker_svc.core.table import FrameError, PoolConfig, Slot, SlotTable
from worker_svc.core.work import StepOutcome

CANNOT_HAPPEN: Final = (
    "bad_hello_ack",
    "unexpected_frame",
    "unexpected_ran",
    "frame_error_bad_chunk",
    "frame_error_bad_copy",
    "frame_error_bad_init",
    "frame_error_bad_key",
    "frame_error_bad_load",
    "frame_error_bad_save",
    "frame_error_bad_start",
    "frame_error_columns",
    "frame_error_early_frame",
    "frame_error_executor",
    "frame_error_frame_step",
    "frame_error_no_page",
    "frame_error_not_ready",
    "frame_error_out_of_range",
    "frame_error_page_in_use",
    "frame_error_page_published",
    "frame_error_page_shared",
    "frame_error_page_unpublished",
    "frame_error_retire_unknown",
    "frame_error_slot_busy",
    "frame_error_slot_gen",
    "frame_error_slot_unknown",
    "frame_error_tail_published",
    "frame_error_too_many_frames",
    "frame_error_too_many_tokens",
)
"""Counters of what only a bug of ours explains; a frame error is one of the scheduler's, or of the executor's."""
Event = Opened | Received | Closed | Tick | Ran


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMachineConfig:
    """Who the worker is, how large its pools are, and how long it waits. Times in nanoseconds."""

    group: str
    boot: int
    build: str
    model: ModelInfo
    pools: PoolConfig
    max_held: int = 4  # frames queued or under way; a scheduler never has more in flight than its depth
    park_ns: int = 30_000 * MS  # how long slots outlive the loss of their scheduler
    timing: LinkTiming = field(default_factory=LinkTiming)


@dataclass(slots=True)
class _Held:
    """A frame of attachment `attach_id`; `error` is set if it must not be run.

    Under way from `prepared` on; then `outcome` or `error` says how it came out.
    """

    attach_id: int
    frame: StepFrame
    error: FrameError | None = None
    prepared: Prepared | None = None
    outcome: StepOutcome | None = None

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.error is not None


class SlotMachine:
    """See the module's docstring. The shell delivers one Tick at start, which makes the machine dial."""

    def __init__(self, config: SlotMachineConfig, rng: Random) -> None:
        self.config = config
        self.table = SlotTable(config.pools, config.model)
        self._link = Uplink(self._hello, self._heartbeat, rng, config.timing)
        self._queue: deque[_Held] = deque()
        self._flights: deque[_Held] = deque()  # under way, oldest first
        self._doomed = 0  # launched behind a step that failed: their answers do not count
        self._era = 0
        self._expected_step = 1
        self._dumped = False
        self._lost_ns: int | None = None
        self._step = 0
        self._step_ns = 0
        self._wish_ns = NEVER

    @property
    def attached(self) -> bool:
        """True while a scheduler's attachment is in force."""
        return self._link.attached

    @property
    def cannot_happen(self) -> Sequence[str]:
        """See meshkit.core.Core."""
        return CANNOT_HAPPEN

    @property
    def busy(self) -> bool:
        """True while steps are under way or wait to be launched."""
        return not self._idle

    def handle(self, event: Event, now_ns: int) -> list[Any]:
        """One event in, effects to carry out in order. Never raises on what a peer sent."""
        out: list[Any] = []
        match event:
            case Opened(conn=conn):
                self._link.opened(conn, now_ns, out)
            case Closed(conn=conn):
                self._attachment(self._link.closed(conn, now_ns), now_ns)
            case Received(conn=conn, envelope=envelope):
                change, frame = self._link.received(conn, envelope, now_ns, out)
                self._attachment(change, now_ns)
                if isinstance(frame, StepFrame):
                    self._take(frame)
                elif frame is not None:
                    out.append(Count("unexpected_frame", fault=True))
            case Ran(outcome=outcome, error=error):
                self._ran(outcome, error, out)
            case Tick():
                self._wish_ns = NEVER
        self._advance(now_ns, out)
        return out

    # ---- the attachment ---------------------------------------------------------------------------------------------

    def _hello(self) -> WorkerHello:
        config, pools = self.config, self.config.pools
        return WorkerHello(
            group=config.group,
            boot=config.boot,
            build=config.build,
            proto_rev=PROTO_REV,
            model=config.model,
            ranks=pools.ranks,
            slots=pools.slots,
            pages=pools.pages,
            tails=pools.tails,
            max_gen=self.table.max_gen,
            max_step_tokens=pools.max_step_tokens,
            max_verify=pools.max_verify,
        )

    def _heartbeat(self, now_ns: int) -> Heartbeat:
        if not self._flights:
            return Heartbeat(self._step, 0)
        return Heartbeat(self._step, max(0, now_ns - self._step_ns) // MS)

    def _attachment(self, change: Change, now_ns: int) -> None:
        if change is Change.ATTACHED:
            self._expected_step = 1
            self._dumped = False
        elif change is Change.LOST and self._lost_ns is None:
            self._lost_ns = now_ns

    def _take(self, frame: StepFrame) -> None:
        """Queue a frame. One that breaks the protocol is queued with its error, so that earlier ones still run."""
        attach_id = self._link.attach_id
        held = [entry for entry in self._queue if entry.attach_id == attach_id]
        if held and held[-1].error is not None:
            return
        error: FrameError | None = None
        if not self._dumped:
            error = FrameError("early_frame", "a step frame came before the dump was sent")
        elif frame.step != self._expected_step:
            error = FrameError("frame_step", f"step is {frame.step}; expected {self._expected_step}")
        elif len(held) + len(self._flights) >= self.config.max_held:
            error = FrameError("too_many_frames", f"{self.config.max_held} frames are held; wait for a result")
        self._expected_step += 1
        self.table.max_gen = max(self.table.max_gen, highest_gen(frame))
        self._queue.append(_Held(attach_id, frame, error))

    # ---- frames -----------------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        return not (self._flights or self._queue or self._doomed)

    def _advance(self, now_ns: int, out: list[Any]) -> None:
        """Book what is over, launch what can be, dump when asked and idle, keep the link alive, free old slots."""
        while self._book_oldest(now_ns, out) or self._launch_next(now_ns, out):
            continue
        self._attachment(self._link.poll(now_ns, out), now_ns)
        if self._idle:
            if self._link.attached and not self._dumped:
                self._dumped, self._lost_ns = True, None
                # Who adopts a slot cannot see a fault in it: it starts over elsewhere and meets the fault again.
                for slot in [slot for slot in self.table.slots.values() if slot.failed]:
                    self._drop_slot(slot, out)
                for chunk in dump_frames(self.table):
                    self._link.send(chunk, out)
            elif not self._link.attached and self._lost_ns is not None:
                self._expire(self._lost_ns, now_ns, out)
        out.extend(Freed(number, gen) for number, gen in self.table.take_released())
        wish = self._link.next_wake_ns()
        if self._lost_ns is not None and self._idle and not self._link.attached:
            wish = min(wish, self._lost_ns + self.config.park_ns)
        if wish != self._wish_ns:
            self._wish_ns = wish
            out.append(WakeAt(wish))

    def _launch_next(self, now_ns: int, out: list[Any]) -> bool:
        """Start the next frame behind those under way, if nothing about it depends on how they come out."""
        if not self._queue or self._doomed:
            return False
        held = self._queue[0]
        if self._flights and (
            held.error is not None or self._flights[-1].error is not None or must_wait(self.table, held.frame)
        ):
            return False
        self._queue.popleft()
        if not self._flights:
            self._step, self._step_ns = held.frame.step, now_ns
        self._flights.append(held)
        try:
            if held.error is not None:
                raise held.error
            held.prepared = prepare(self.table, held.frame)
            publish(self.table, held.frame)
        except FrameError as error:
            held.error = error
            return True
        if held.prepared.is_empty:
            held.outcome = StepOutcome(t_start_ns=now_ns, t_end_ns=now_ns)
        else:
            out.append(Run(held.prepared.work, self._era))
        return True

    def _ran(self, outcome: StepOutcome | None, error: str, out: list[Any]) -> None:
        """The device answers in the order of launch."""
        if self._doomed:
            self._doomed -= 1
            return
        held = next((held for held in self._flights if not held.over), None)
        if held is None:
            out.append(Count("unexpected_ran", fault=True))
        elif outcome is None:
            held.error = FrameError("executor", error or "the step failed", fault=False)
        else:
            held.outcome = outcome

    def _book_oldest(self, now_ns: int, out: list[Any]) -> bool:
        """Book the oldest frame under way if it is over."""
        if not self._flights or not self._flights[0].over:
            return False
        held = self._flights.popleft()
        if self._flights:
            self._step, self._step_ns = self._flights[0].frame.step, now_ns
        if held.error is not None:
            self._fail(held, held.error, touched_slots, now_ns, out)
            return True
        assert held.prepared is not None and held.outcome is not None, "a frame under way is prepared"
        try:
            result = book(held.prepared, held.outcome, self.config.model.vocab_size)
        except FrameError as error:
            self._fail(held, error, named_slots, now_ns, out)
            return True
        if parked := int(np.count_nonzero(result.states == RowState.PARKED)):
            out.append(Count("rows_parked", parked))
        out.extend(Count(f"row_fault_{fault.code}") for fault in result.faults)
        self.table.booked(held.frame.publishes, held.frame.publish_tails)
        if held.attach_id == self._link.attach_id:
            self._link.send(result, out)
        else:
            out.append(Count("result_without_scheduler"))
        return True

    def _fail(
        self, held: _Held, error: FrameError, unsure: Callable[[StepFrame], list[int]], now_ns: int, out: list[Any]
    ) -> None:
        """The step did not happen, nor will what was launched behind it: drop the slots whose device state is unsure
        then, run nothing further, start over by dump."""
        out.append(Count(f"frame_error_{error.code}", fault=error.fault))
        self._era += 1
        self._doomed = sum(not later.over for later in self._flights)
        for number in [n for lost in (held, *self._flights) for n in unsure(lost.frame)]:
            if number in self.table.slots:
                self._drop_slot(self.table.slots[number], out)
        self._flights.clear()
        self.table.settle()
        self._queue = deque(entry for entry in self._queue if entry.attach_id != held.attach_id)
        if held.attach_id == self._link.attach_id:
            self._link.send(ResultFrame(step=held.frame.step, error=str(error)[:500]), out)
            self._attachment(self._link.drop(str(error)[:200], now_ns, out), now_ns)

    def _expire(self, lost_ns: int, now_ns: int, out: list[Any]) -> None:
        if now_ns < lost_ns + self.config.park_ns:
            return
        self._lost_ns = None
        for slot in list(self.table.slots.values()):
            self._drop_slot(slot, out)

    def _drop_slot(self, slot: Slot, out: list[Any]) -> None:
        self.table.drop(slot)
        out.append(Count("slots_dropped"))
