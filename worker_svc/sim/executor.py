"""The simulated device behind `worker_svc.core.work.Executor`: knows what a step samples at once, and when it is over.

Steps queue as on a GPU stream: one begins when it is launched and the one before it has ended. With `threaded` the
collecting thread plays the device: a step begins when that thread, having seen the end of the one before, takes it.
Then the gap between steps is what the process really adds. While slots are constrained the collecting thread computes
too: masks are taken while the forward would run, as on a device, and what was sampled is told at its end, not before.
No torch, no weights.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshkit.types import PAGE_TOKENS, ModelInfo, TokenLogprobs
from worker_svc.core.work import SAMPLING_FAULT, Fault, RowOutcome, RowWork, StepOutcome, StepWork
from worker_svc.masks.constraints import Constraints, Place, SlotMask
from worker_svc.masks.source import Answer, MaskSource
from worker_svc.sim.cost import FlashOnH200, Load
from worker_svc.sim.state import I64, Numbers, SlotArrays

SPIN_NS: Final = 1_500_000
"""The last part of a wait is spent yielding, not sleeping: a sleep ends up to a timer's slack late."""
HOLD_NS: Final = 50_000
"""And the very last without even that: who yields has to get the right to run Python back."""

_NOTHING: Final = RowOutcome(())


@dataclass(slots=True, eq=False)
class Launched:
    """A step on its way: when the device could begin it, how long it takes, what it comes to, when it began.

    `rows` are None until it is computed.
    """

    work: StepWork
    at_ns: int = 0
    takes_ns: int = 0
    rows: tuple[RowOutcome, ...] | None = None
    start_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows of a step: slot of each, which of them are decode rows of living slots, which sample."""

    rows: tuple[RowWork, ...]
    slots: Numbers
    feeding: NDArray[np.bool_]
    sampling: NDArray[np.bool_]
    has_chunks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How the end of a step is awaited. `masks_after`: masks are asked for when the forward is over, not meanwhile, as
    if sampling were part of it."""

    spin: bool = False
    threaded: bool = False
    masks_after: bool = False


class SimExecutor:
    """`timeline`, if given, is called with (start, end) of each step in nanoseconds."""

    def __init__(
        self,
        info: ModelInfo,
        slots: SlotArrays,
        cost: FlashOnH200,
        waiting: Waiting | None = None,
        timeline: Callable[[int, int], None] | None = None,
    ) -> None:
        self.info = info
        self.cost = cost
        self._slots = slots
        self._waiting = waiting or Waiting()
        self._timeline = timeline
        self._free_ns = 0
        self._queue: deque[Launched] = deque()
        self._logprobs: dict[int, tuple[int, tuple[int, ...]]] = {}  # slots that asked -> alternatives, further ids
        self._constraints = Constraints()
        self._named: set[int] = set()  # constrained slots, as launched

    def use_masks(self, masks: MaskSource) -> None:
        """Where the masks of constrained slots come from; before the first step."""
        self._constraints.source = masks

    def launch(self, work: StepWork) -> Launched:
        """Everything but the time, unless masks have to be waited for."""
        launched = Launched(work)
        for init in work.inits:
            (self._named.add if init.grammar_id else self._named.discard)(init.slot)
        if not self._named and all(step.rows is not None for step in tuple(self._queue)):
            batch = self._begin(launched)
            launched.rows = self._outcomes(batch, work, {})
        launched.at_ns = time.monotonic_ns()
        self._queue.append(launched)
        return launched

    def collect(self, handle: Launched) -> StepOutcome:
        """Wait until the step would be over."""
        assert self._queue[0] is handle, "steps are collected in the order of their launch"
        later = self._begin(handle) if handle.rows is None else None
        if self._waiting.threaded:
            start = handle.start_ns or time.monotonic_ns()
        else:
            start = max(handle.at_ns, self._free_ns)
        end = start + handle.takes_ns
        if later is not None:
            if self._waiting.masks_after:
                _wait_until(end, self._waiting.spin)
            masks = self._take(later, handle.takes_ns, end)
            end = max(end, time.monotonic_ns())  # masks that come late hold the device up
            handle.rows = self._outcomes(later, handle.work, masks)
        assert handle.rows is not None
        self._free_ns = end
        _wait_until(end, self._waiting.spin)
        self._queue.popleft()
        if self._queue:
            self._queue[0].start_ns = time.monotonic_ns()
        if later is not None:
            self._tell(later, handle.rows)
        if self._timeline is not None:
            self._timeline(start, end)
        return StepOutcome(rows=handle.rows, t_start_ns=start, t_end_ns=end)

    def _begin(self, launched: Launched) -> _Batch:
        """What comes before a forward; sets how long the step takes."""
        state, work = self._slots, launched.work
        self._constraints.begin(work.inits)
        for init in work.inits:
            state.init(init)
            self._logprobs.pop(init.slot, None)
            if init.params.top_logprobs >= 0:
                self._logprobs[init.slot] = (init.params.top_logprobs, init.params.logprob_ids)
        for copy in work.copies:
            state.copy(copy.src, copy.dst)
        for tail in work.tail_loads:
            state.load(tail.slot, tail.pos, tail.tail)
        rows = work.rows
        numbers: Numbers = np.fromiter((row.slot for row in rows), np.intp, len(rows))
        decode = np.fromiter((not row.ids for row in rows), np.bool_, len(rows))
        feeding = decode & ~state.finished[numbers]
        sampling = feeding | np.fromiter((bool(row.ids and row.sample_last) for row in rows), np.bool_, len(rows))
        tokens = context = 0
        has_chunks = not decode.all()
        if has_chunks:
            tokens = sum(len(row.ids) for row in rows)
            context = sum(len(row.ids) * row.start + len(row.ids) * (len(row.ids) - 1) // 2 for row in rows)
        living = int(feeding.sum())
        load = Load(living, int(state.length[numbers[feeding]].sum()) + living, tokens, context)
        launched.takes_ns = self.cost.step_ns(load)
        return _Batch(rows, numbers, feeding, sampling, has_chunks)

    def _take(self, batch: _Batch, takes_ns: int, end_ns: int) -> dict[int, SlotMask]:
        """The masks of the batch's constrained slots, taken while the forward would run and shortly after."""
        slots = batch.slots[batch.sampling]
        sampling = map(Place, slots.tolist(), self._slots.emitted[slots].tolist())
        busy = int(batch.feeding.sum()) + (sum(bool(row.ids) for row in batch.rows) if batch.has_chunks else 0)
        ahead_s = max(0, end_ns - time.monotonic_ns()) / 1e9
        masks = self._constraints.take(sampling, rows=busy, forward_s=takes_ns / 1e9, ahead_s=ahead_s)
        for slot, mask in masks.items():
            if mask.rows is not None and mask.answer.ready and not mask.rows.any():
                masks[slot] = SlotMask(Answer(False, Fault(SAMPLING_FAULT, "the mask allows nothing")))
        return masks

    def _tell(self, batch: _Batch, outcomes: tuple[RowOutcome, ...]) -> None:
        state, where = self._slots, np.flatnonzero(batch.sampling).tolist()
        told = ((batch.rows[index].slot, outcomes[index]) for index in where)
        self._constraints.tell(
            (slot, int(state.emitted[slot]) - len(outcome.tokens), outcome, bool(state.finished[slot]))
            for slot, outcome in told
        )

    def _outcomes(self, batch: _Batch, work: StepWork, masks: dict[int, SlotMask]) -> tuple[RowOutcome, ...]:
        """Feed all rows, sample at those that do, refresh spares at page boundaries."""
        state, rows, slots, sampling, feeding = self._slots, batch.rows, batch.slots, batch.sampling, batch.feeding
        outcomes = [_NOTHING] * len(rows)
        refused = {s: mask.answer for s, mask in masks.items() if not mask.answer.ready}
        if refused:
            ready = np.fromiter((row.slot not in refused for row in rows), np.bool_, len(rows))
            feeding, sampling = feeding & ready, sampling & ready
            outcomes = [RowOutcome((), fault=refused[r.slot].fault) if r.slot in refused else _NOTHING for r in rows]
        state.feed_next(slots[feeding])
        if batch.has_chunks:
            self._feed_chunks(work, refused)
        for slot, answer in refused.items():
            state.finished[slot] = answer.fault is not None
        where = np.flatnonzero(sampling)
        if not len(where):
            return tuple(outcomes)
        legal = {slot: mask.rows[0] for slot, mask in masks.items() if mask.rows is not None and slot not in refused}
        slots = slots[where]
        tokens: I64 = state.sample(slots, legal)
        for index, token in zip(where.tolist(), tokens.tolist(), strict=True):
            outcomes[index] = RowOutcome((token,))
        crossed = (state.length[slots] % PAGE_TOKENS == 0) & ~state.finished[slots]
        for index in where[crossed].tolist():
            if rows[index].spare >= 0:
                state.refresh(rows[index].slot, rows[index].spare)
        if self._logprobs:
            for index in where.tolist():
                if (wanted := self._logprobs.get(rows[index].slot)) is not None:
                    outcomes[index] = self._with_logprobs(outcomes[index].tokens, *wanted)
        return tuple(outcomes)

    def _feed_chunks(self, work: StepWork, refused: Container[int]) -> None:
        """Rows with ids; one that is not sampled gives its last id up."""
        saves: dict[int, list[tuple[int, int]]] = {}
        for save in work.saves:
            saves.setdefault(save.slot, []).append((save.pos, save.tail))
        for row in work.rows:
            if row.ids:
                self._slots.feed_chunk(row, saves.get(row.slot, ()), parked=row.slot in refused)

    def _with_logprobs(self, tokens: tuple[int, ...], alternatives: int, more: tuple[int, ...]) -> RowOutcome:
        """Values of the right shape: the token first, then alternatives of falling probability."""
        vocab = self.info.vocab_size
        entries = []
        for token in tokens:
            others = [(token + i) % vocab for i in range(min(alternatives, vocab))]
            values = (-0.5, *(-0.5 - i for i in range(len(others))), *(-0.5 if id_ == token else -30.0 for id_ in more))
            entries.append(TokenLogprobs((token, *others, *more), values))
        return RowOutcome(tokens, tuple(entries))


def _wait_until(end_ns: int, spin: bool) -> None:
    while (left := end_ns - time.monotonic_ns()) > 0:
        if not spin:
            time.sleep(left / 1e9)
        elif left > SPIN_NS:
            time.sleep((left - SPIN_NS) / 1e9)
        elif left > HOLD_NS:
            os.sched_yield()  # gives up the processor and, in Python, the right to run
