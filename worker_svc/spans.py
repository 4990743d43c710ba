"""Spans of a sampled request in the worker, made after the fact: prefill and decode, in times of the device.

Wraps the slot machine: reads frames and results, changes none. Prefill is from the start of the first step with a row
of the slot to the end of the step that sampled its first token; decode from there to its end. Costs nothing per step
while no sampled slot is open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshkit.core import Core, Received, Send
from meshkit.frames import ResultFrame, RowState, SlotInit, StepFrame
from meshkit.obs import Tracing

MAX_OPEN: Final = 1024
MAX_FRAMES: Final = 64

_ENDS: Final = (int(RowState.FINISHED), int(RowState.FAILED))


@dataclass(slots=True)
class _Stages:
    """One slot; times of the monotonic clock, 0 = not yet."""

    traceparent: str
    slot_gen: int
    rows: int = 0
    tokens: int = 0
    first_ns: int = 0
    sampled_ns: int = 0
    last_ns: int = 0


class SlotSpans:
    """A core around the slot machine."""

    def __init__(self, core: Core, tracing: Tracing) -> None:
        self._core = core
        self._tracing = tracing
        self._open: dict[int, _Stages] = {}  # by slot
        self._frames: dict[int, StepFrame] = {}  # by step, while a sampled slot is open

    @property
    def cannot_happen(self) -> Sequence[str]:
        return self._core.cannot_happen

    def handle(self, event: Any, now_ns: int) -> Sequence[Any]:
        """As the inner core's; Any because event and effect types are its own."""
        if self._tracing.enabled and isinstance(event, Received) and isinstance(event.envelope.frame, StepFrame):
            self._taken(event.envelope.frame)
        effects = self._core.handle(event, now_ns)
        if self._open:
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.envelope.frame, ResultFrame):
                    self._done(effect.envelope.frame)
        return effects

    def _taken(self, frame: StepFrame) -> None:
        for free in frame.frees:
            stages = self._open.get(free.slot)
            if stages is not None and stages.slot_gen == free.slot_gen:
                self._record(free.slot)
        for init in frame.inits:
            if init.traceparent:
                self._begin(init)
        if self._open:
            self._frames[frame.step] = frame
            while len(self._frames) > MAX_FRAMES:  # of an attachment that ended before they ran
                del self._frames[next(iter(self._frames))]

    def _begin(self, init: SlotInit) -> None:
        self._open[init.slot] = _Stages(init.traceparent, init.slot_gen)
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def _done(self, result: ResultFrame) -> None:
        frame = self._frames.pop(result.step, None)
        if frame is None or len(frame.slots) != len(result.states):
            return
        for slot, state, count in zip(
            frame.slots.tolist(), result.states.tolist(), result.counts.tolist(), strict=True
        ):
            stages = self._open.get(slot)
            if stages is None or state == RowState.FINISHED_BEFORE:
                continue
            stages.rows += 1
            stages.tokens += count
            stages.first_ns = stages.first_ns or result.t_start_ns
            stages.last_ns = result.t_end_ns
            if count and not stages.sampled_ns:
                stages.sampled_ns = result.t_end_ns
            if state in _ENDS:
                self._record(slot)

    def _record(self, slot: int) -> None:
        stages = self._open.pop(slot)
        if not stages.first_ns:
            return
        record, parent = self._tracing.record, stages.traceparent
        sampled = stages.sampled_ns or stages.last_ns
        record("worker.prefill", parent, stages.first_ns, sampled)
        if stages.last_ns > sampled:
            attributes = {"gen_ai.usage.output_tokens": stages.tokens, "v4mesh.rows": stages.rows}
            record("worker.decode", parent, sampled, stages.last_ns, attributes)
