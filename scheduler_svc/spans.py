"""Spans of a sampled request in the scheduler, made after the fact from what the core took and gave: queue and run.

Wraps the core: reads events and effects, changes none. Costs nothing per step while no sampled request is open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.core import Called, Core, Send
from meshkit.frames import StepFrame, Submit, TokenFrame
from meshkit.obs import Tracing
from meshkit.traceparent import is_sampled

MAX_OPEN = 4096

RowKey = tuple[int, int, int]
"""(attach_id of the gateway, row, row_gen)."""


@dataclass(slots=True)
class _Stages:
    """One choice; times of the monotonic clock, 0 = not yet."""

    traceparent: str
    prompt_tokens: int
    submitted_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    output_tokens: int = 0


class RequestSpans:
    """A core around the core."""

    def __init__(self, core: Core, tracing: Tracing) -> None:
        self._core = core
        self._tracing = tracing
        self._rows: dict[RowKey, _Stages] = {}
        self._choices: dict[tuple[bytes, int], _Stages] = {}

    @property
    def cannot_happen(self) -> Sequence[str]:
        return self._core.cannot_happen

    def handle(self, event: Any, now_ns: int) -> Sequence[Any]:
        """As the inner core's; Any because event and effect types are its own."""
        effects = self._core.handle(event, now_ns)
        if self._tracing.enabled:
            if isinstance(event, Called) and is_sampled(event.request.traceparent):
                self._open(event.request, now_ns)
            if self._rows:
                for effect in effects:
                    if isinstance(effect, Send):
                        self._sent(effect, now_ns)
        return effects

    def _open(self, request: Submit, now_ns: int) -> None:
        for choice in request.choices:
            stages = _Stages(request.traceparent, len(request.prompt), now_ns)
            self._rows[request.attach_id, choice.row, choice.row_gen] = stages
            self._choices[request.request_id, choice.choice] = stages
        while len(self._rows) > MAX_OPEN:  # rows that were refused or lost their gateway never end here
            del self._rows[next(iter(self._rows))]
        while len(self._choices) > MAX_OPEN:
            del self._choices[next(iter(self._choices))]

    def _sent(self, effect: Send, now_ns: int) -> None:
        frame = effect.envelope.frame
        if isinstance(frame, StepFrame):
            for init in frame.inits:
                stages = self._choices.pop((init.request_id, init.choice), None)
                if stages is not None:
                    stages.started_ns = now_ns
        elif isinstance(frame, TokenFrame):
            for index, row in enumerate(zip(frame.rows.tolist(), frame.row_gens.tolist(), strict=True)):
                key = (effect.envelope.attach_id, *row)
                if (stages := self._rows.get(key)) is not None:
                    self._booked(key, stages, int(frame.counts[index]), bool(frame.finishes[index]), now_ns)

    def _booked(self, key: RowKey, stages: _Stages, count: int, ended: bool, now_ns: int) -> None:
        stages.output_tokens += count
        if count and not stages.first_token_ns:
            stages.first_token_ns = now_ns
        if not ended:
            return
        del self._rows[key]
        start, first = stages.started_ns or now_ns, stages.first_token_ns
        record, parent = self._tracing.record, stages.traceparent
        record("scheduler.queue", parent, stages.submitted_ns, start)
        attributes = {
            "gen_ai.usage.input_tokens": stages.prompt_tokens,
            "gen_ai.usage.output_tokens": stages.output_tokens,
        }
        record("scheduler.run", parent, start, now_ns, attributes, events=[("first token", first)] if first else ())
