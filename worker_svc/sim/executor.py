"""The simulated device behind `worker_svc.core.work.Executor`: knows what a step samples at once, and when it is over.

Steps queue as on a GPU stream: one begins when it is launched and the one before it has ended. With `threaded` the
collecting thread plays the device: a step begins when that thread, having seen the end of the one before, takes it.
Then the gap between steps is what the process really adds. No torch, no weights.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshkit.types import PAGE_TOKENS, ModelInfo, TokenLogprobs
from worker_svc.core.work import RowOutcome, RowWork, StepOutcome, StepWork
from worker_svc.sim.cost import FlashOnH200, Load
from worker_svc.sim.state import I64, Numbers, SlotArrays

SPIN_NS: Final = 1_500_000
"""The last part of a wait is spent yielding, not sleeping: a sleep ends up to a timer's slack late."""
HOLD_NS: Final = 50_000
"""And the very last without even that: who yields has to get the right to run Python back."""

_NOTHING: Final = RowOutcome(())


@dataclass(slots=True, eq=False)
class Launched:
    """A step on its way: when the device could begin it, how long it takes, what it comes to, when it began."""

    at_ns: int
    takes_ns: int
    rows: tuple[RowOutcome, ...]
    start_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How the end of a step is awaited."""

    spin: bool = False
    threaded: bool = False


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
        self._logprobs: dict[int, int] = {}  # slots that asked -> alternatives

    def launch(self, work: StepWork) -> Launched:
        """Everything but the time."""
        state = self._slots
        for init in work.inits:
            state.init(init)
            self._logprobs.pop(init.slot, None)
            if init.params.top_logprobs >= 0:
                self._logprobs[init.slot] = init.params.top_logprobs
        for copy in work.copies:
            state.copy(copy.src, copy.dst)
        for tail in work.tail_loads:
            state.load(tail.slot, tail.pos, tail.tail)
        rows, load = self._forward(work)
        launched = Launched(time.monotonic_ns(), self.cost.step_ns(load), rows)
        self._queue.append(launched)
        return launched

    def collect(self, handle: Launched) -> StepOutcome:
        """Wait until the step would be over."""
        assert self._queue[0] is handle, "steps are collected in the order of their launch"
        if self._waiting.threaded:
            start = handle.start_ns or time.monotonic_ns()
        else:
            start = max(handle.at_ns, self._free_ns)
        end = self._free_ns = start + handle.takes_ns
        _wait_until(end, self._waiting.spin)
        self._queue.popleft()
        if self._queue:
            self._queue[0].start_ns = time.monotonic_ns()
        if self._timeline is not None:
            self._timeline(start, end)
        return StepOutcome(rows=handle.rows, t_start_ns=start, t_end_ns=end)

    def _forward(self, work: StepWork) -> tuple[tuple[RowOutcome, ...], Load]:
        state, rows = self._slots, work.rows
        if not rows:
            return (), Load()
        numbers: Numbers = np.fromiter((row.slot for row in rows), np.intp, len(rows))
        decode = np.fromiter((not row.ids for row in rows), np.bool_, len(rows))
        feeding = decode & ~state.finished[numbers]
        state.feed_next(numbers[feeding])
        chunk_tokens = chunk_context = 0
        if not decode.all():
            saves: dict[int, list[tuple[int, int]]] = {}
            for save in work.saves:
                saves.setdefault(save.slot, []).append((save.pos, save.tail))
            for row in rows:
                if row.ids:
                    state.feed_chunk(row, saves.get(row.slot, ()))
                    chunk_tokens += len(row.ids)
                    chunk_context += len(row.ids) * row.start + len(row.ids) * (len(row.ids) - 1) // 2
        load = Load(int(feeding.sum()), int(state.length[numbers[feeding]].sum()), chunk_tokens, chunk_context)
        sampling = feeding | np.fromiter((bool(row.ids and row.sample_last) for row in rows), np.bool_, len(rows))
        where = np.flatnonzero(sampling)
        return self._outcomes(rows, where, numbers[where]), load

    def _outcomes(self, rows: tuple[RowWork, ...], where: Numbers, slots: Numbers) -> tuple[RowOutcome, ...]:
        """Sample at these rows, refresh spares at page boundaries."""
        outcomes = [_NOTHING] * len(rows)
        if not len(where):
            return tuple(outcomes)
        state = self._slots
        tokens: I64 = state.sample(slots)
        for index, token in zip(where.tolist(), tokens.tolist(), strict=True):
            outcomes[index] = RowOutcome((token,))
        crossed = (state.length[slots] % PAGE_TOKENS == 0) & ~state.finished[slots]
        for index in where[crossed].tolist():
            if rows[index].spare >= 0:
                state.refresh(rows[index].slot, rows[index].spare)
        if self._logprobs:
            for index in where.tolist():
                if (wanted := self._logprobs.get(rows[index].slot)) is not None:
                    outcomes[index] = self._with_logprobs(outcomes[index].tokens, wanted)
        return tuple(outcomes)

    def _with_logprobs(self, tokens: tuple[int, ...], alternatives: int) -> RowOutcome:
        """Values of the right shape: the token first, then alternatives of falling probability."""
        vocab = self.info.vocab_size
        entries = []
        for token in tokens:
            others = [(token + i) % vocab for i in range(min(alternatives, vocab))]
            values = (-0.5, *(-0.5 - i for i in range(len(others))))
            entries.append(TokenLogprobs((token, *others), values))
        return RowOutcome(tokens, tuple(entries))


def _wait_until(end_ns: int, spin: bool) -> None:
    while (left := end_ns - time.monotonic_ns()) > 0:
        if not spin:
            time.sleep(left / 1e9)
        elif left > SPIN_NS:
            time.sleep((left - SPIN_NS) / 1e9)
        elif left > HOLD_NS:
            os.sched_yield()  # gives up the processor and, in Python, the right to run
