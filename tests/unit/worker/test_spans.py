"""Prefill and decode of sampled slots, from frames and results; others leave nothing."""

from types import SimpleNamespace

import numpy as np
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshkit.core import Received, Send
from meshkit.frames import Envelope, ResultFrame, RowState, SlotFree, SlotInit, StepFrame
from meshkit.obs import start_tracing
from meshkit.traceparent import new_traceparent
from meshkit.types import SamplingParams
from worker_svc import spans
from worker_svc.spans import SlotSpans

MS = 1_000_000


class Script:
    effects: tuple = ()

    def handle(self, event, now_ns):
        return self.effects


def init(slot, traceparent, gen=7):
    return SlotInit(
        slot=slot, slot_gen=gen, request_id=b"r" * 16, attempt=1, choice=0, params=SamplingParams(), seed=1, start=0,
        n_emitted=0, traceparent=traceparent,
    )  # fmt: skip


def frame(step, slots, **orders):
    return Received(1, Envelope(9, StepFrame(step=step, slots=np.array(slots, np.int32), **orders)))


def result(step, states, counts):
    done = ResultFrame(
        step=step,
        t_start_ns=step * 10 * MS,
        t_end_ns=step * 10 * MS + 8 * MS,
        states=np.array(states, np.uint8),
        counts=np.array(counts, np.uint8),
    )
    return Send(1, Envelope(9, done))


def play(*turns):
    exporter = InMemorySpanExporter()
    tracing, core = start_tracing("worker", exporter=exporter), Script()
    observed = SlotSpans(core, tracing)
    for event, effects in turns:
        core.effects = effects
        assert observed.handle(event, 0) is effects
    tracing.shutdown()
    return observed, {span.name: span for span in exporter.get_finished_spans()}


OTHER = SimpleNamespace()


def test_prefill_ends_with_the_first_token_and_decode_with_the_last():
    parent = new_traceparent()
    _, found = play(
        (frame(1, [3], inits=(init(3, parent),)), ()),
        (frame(2, [3, 4], inits=(init(4, ""),)), (result(1, [RowState.CHUNK], [0]),)),
        (frame(3, [4, 3]), (result(2, [RowState.SAMPLED, RowState.SAMPLED], [1, 1]),)),
        (OTHER, (result(3, [RowState.SAMPLED, RowState.FINISHED], [1, 1]),)),
        (OTHER, (result(4, [RowState.FINISHED_BEFORE], [0]),)),
    )
    assert list(found) == ["worker.prefill", "worker.decode"]
    assert found["worker.prefill"].end_time - found["worker.prefill"].start_time == 18 * MS  # steps 1 and 2
    assert found["worker.decode"].start_time == found["worker.prefill"].end_time
    assert found["worker.decode"].end_time - found["worker.decode"].start_time == 10 * MS
    assert found["worker.decode"].attributes["gen_ai.usage.output_tokens"] == 2
    assert f"{found['worker.decode'].parent.span_id:016x}" == parent.split("-")[2]


def test_a_slot_that_is_freed_is_told_as_far_as_it_came():
    _, found = play(
        (frame(1, [3], inits=(init(3, new_traceparent()),)), ()),
        (OTHER, (result(1, [RowState.CHUNK], [0]),)),
        (frame(2, [], frees=(SlotFree(3, 6),)), ()),  # of an older generation: not this one
        (frame(3, [], frees=(SlotFree(3, 7),)), ()),
    )
    assert list(found) == ["worker.prefill"]


def test_unsampled_slots_and_frames_that_never_ran_leave_nothing(monkeypatch):
    monkeypatch.setattr(spans, "MAX_OPEN", 8)
    monkeypatch.setattr(spans, "MAX_FRAMES", 4)
    observed, found = play((frame(1, [3], inits=(init(3, ""),)), (result(1, [RowState.FINISHED], [1]),)))
    assert not found and not observed._frames
    turns = [(frame(step, [step], inits=(init(step, new_traceparent()),)), ()) for step in range(1, 30)]
    observed, found = play(*turns)
    assert not found and len(observed._open) == 8 and len(observed._frames) == 4
