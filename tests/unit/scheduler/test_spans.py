"""Spans of a sampled request, made from what the core took and gave."""

import numpy as np
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshkit.core import Called, Send, Tick
from meshkit.frames import Envelope, SlotInit, StepFrame, Submit, SubmitChoice, TokenFrame
from meshkit.obs import start_tracing
from meshkit.traceparent import new_traceparent
from meshkit.types import FinishReason, SamplingParams
from scheduler_svc import spans
from scheduler_svc.spans import RequestSpans

MS = 1_000_000
NAME = b"r" * 16


class Script:
    """A core that gives out the effects prepared for the next event."""

    effects = ()

    def handle(self, event, now_ns):
        return self.effects


def submit(traceparent, row=3):
    return Submit(
        attach_id=5,
        request_id=NAME,
        attempt=1,
        choices=(SubmitChoice(0, row, 1),),
        params=SamplingParams(),
        seed=1,
        remaining_ms=1,
        prompt=np.arange(7, dtype=np.int32),
        traceparent=traceparent,
    )


def step():
    init = SlotInit(
        slot=0, slot_gen=1, request_id=NAME, attempt=1, choice=0, params=SamplingParams(), seed=1, start=0, n_emitted=0
    )
    return Send(1, Envelope(8, StepFrame(step=1, inits=(init,))))


def tokens(count, finish=FinishReason.NONE, row=3):
    one = np.ones(1, np.int32)
    frame = TokenFrame(
        step=1,
        rows=one * row,
        row_gens=one,
        bases=one,
        counts=one * count,
        ids=np.ones(count, np.int32),
        finishes=np.array([finish], np.uint8),
    )
    return Send(2, Envelope(5, frame))


def drive(traceparent):
    exporter = InMemorySpanExporter()
    tracing, core = start_tracing("scheduler", exporter=exporter), Script()
    observed = RequestSpans(core, tracing)
    at = 1_000 * MS
    events = [
        (Called(1, submit(traceparent)), ()),
        (Tick(), (step(),)),
        (Tick(), (tokens(1), tokens(5, row=99))),
        (Tick(), (tokens(2, FinishReason.LENGTH),)),
        (Tick(), (tokens(2, FinishReason.LENGTH),)),
    ]
    for event, effects in events:
        core.effects = effects
        assert observed.handle(event, at) is effects
        at += 10 * MS
    tracing.shutdown()
    return exporter.get_finished_spans()


def test_stages_of_a_sampled_request():
    found = {span.name: span for span in drive(new_traceparent())}
    assert list(found) == ["scheduler.queue", "scheduler.run"]
    queue, run = found.values()
    assert queue.end_time - queue.start_time == 10 * MS and run.end_time - run.start_time == 20 * MS
    assert queue.end_time == run.start_time
    assert run.attributes["gen_ai.usage.input_tokens"] == 7
    assert run.attributes["gen_ai.usage.output_tokens"] == 3
    assert run.events[0].timestamp - run.start_time == 10 * MS


def test_unsampled_requests_leave_no_span():
    assert drive("") == ()
    assert drive(new_traceparent(sampled=False)) == ()


def test_rows_that_never_end_are_forgotten(monkeypatch):
    monkeypatch.setattr(spans, "MAX_OPEN", 10)
    observed = RequestSpans(Script(), start_tracing("scheduler", exporter=InMemorySpanExporter()))
    for row in range(50):
        observed.handle(Called(row, submit(new_traceparent(), row)), row)
    assert len(observed._rows) == 10
