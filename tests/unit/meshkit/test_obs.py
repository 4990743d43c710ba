"""Logs with allow-listed keys, metrics with closed labels, spans only under a sampled parent."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshkit.errors import ConfigError
from meshkit.obs import Metrics, Tracing, kv, setup_logging, start_tracing
from meshkit.traceparent import is_sampled, new_traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = before


def test_text_and_json_lines(root_logger):
    stream = io.StringIO()
    setup_logging("worker", rank=2, stream=stream)
    logging.getLogger("x").info("attached", extra=kv(group="w0", slots=16))
    logging.getLogger("x").debug("unseen")
    assert stream.getvalue().endswith(" worker.2 attached group=w0 slots=16\n")
    setup_logging("worker", fmt="json", level="debug", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("failed", extra=kv(step=3))
    line = json.loads(stream.getvalue().splitlines()[-1])
    assert (line["service"], line["level"], line["step"]) == ("worker", "error", 3)
    assert "ValueError: broken" in line["message"]


def test_log_keys_are_a_closed_set():
    with pytest.raises(AssertionError, match="prompt"):
        kv(prompt="text of a user")


def test_metrics_with_closed_labels():
    metrics = Metrics()
    verdicts = metrics.counter("vllm:verdicts_total", "Verdicts", verdict=("ACCEPTED", "QUEUE_FULL"))
    verdicts.add(verdict="ACCEPTED")
    verdicts.add(2, verdict="made up by a peer")
    running = metrics.gauge("vllm:num_requests_running", "Running")
    running.put(3)
    seconds = metrics.histogram("ttft_seconds", "TTFT", (0.1, 1.0))
    seconds.observe(0.5)
    text = metrics.render().decode()
    assert 'vllm:verdicts_total{verdict="ACCEPTED"} 1.0' in text
    assert 'vllm:verdicts_total{verdict="other"} 2.0' in text
    assert "made up" not in text
    assert "vllm:num_requests_running 3.0" in text
    assert 'ttft_seconds_bucket{le="1.0"} 1.0' in text
    assert "_created" not in text


def test_spans_under_a_sampled_parent_only():
    exporter = InMemorySpanExporter()
    tracing = start_tracing("scheduler", exporter=exporter)
    tracing.record("worker.prefill", PARENT, 1_000, 5_000, {"tokens": 7})
    tracing.record("worker.prefill", PARENT[:-2] + "00", 1_000, 5_000)
    tracing.record("worker.prefill", "", 1_000, 5_000)
    tracing.shutdown()
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == PARENT[3:35]
    assert f"{span.parent.span_id:016x}" == PARENT[36:52]
    assert span.end_time - span.start_time == 4_000
    assert dict(span.attributes) == {"tokens": 7}


def test_a_span_may_be_named_before_it_is_recorded():
    """Children recorded first, by this or another process, hang under it; the first of a trace has no parent."""
    exporter = InMemorySpanExporter()
    tracing = start_tracing("gateway", exporter=exporter)
    for given in (PARENT, ""):
        own = tracing.begin(given)
        assert is_sampled(own) and own != given
        tracing.record("child", own, 2_000, 3_000)
        tracing.record("root", given, 1_000, 5_000, own=own, events=[("first", 2_500)])
        tracing.record("later", PARENT, 1_000, 5_000)
    tracing.shutdown()
    spans = exporter.get_finished_spans()
    for child, root, later in (spans[:3], spans[3:]):
        assert child.parent.span_id == root.context.span_id and child.context.trace_id == root.context.trace_id
        assert later.context.span_id not in (root.context.span_id, child.context.span_id)
        assert root.events[0].timestamp - root.start_time == 1_500
    assert f"{spans[1].parent.span_id:016x}" == PARENT.split("-")[2] and spans[4].parent is None
    assert spans[4].context.trace_id != spans[1].context.trace_id


@pytest.mark.parametrize(("ratio", "least", "most"), [("0", 0, 0), ("1", 200, 200), ("0.5", 60, 140)])
def test_new_traces_are_sampled_at_the_configured_ratio(monkeypatch, ratio, least, most):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    tracing = start_tracing("gateway", exporter=InMemorySpanExporter())
    assert least <= sum(is_sampled(tracing.begin()) for _ in range(200)) <= most
    assert is_sampled(tracing.begin(PARENT)) and not is_sampled(tracing.begin(PARENT[:-2] + "00"))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "much")
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG"):
        start_tracing("gateway", exporter=InMemorySpanExporter())


def test_tracing_is_off_and_unloaded_without_an_endpoint(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = start_tracing("gateway")
    assert not tracing.enabled
    tracing.record("x", PARENT, 0, 1)
    source = (
        "import sys; from meshkit.obs import start_tracing; start_tracing('x'); "
        "print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=env)
    assert out.stdout == "[]\n"


@pytest.mark.parametrize(
    "text", ["", "00-xx", PARENT.replace("b7ad", "zzzz"), "00-" + "0" * 32 + "-b7ad6b7169203331-01"]
)
def test_malformed_parents_are_not_sampled(text):
    assert not is_sampled(text)


def test_new_traceparent_keeps_trace_and_flag():
    child = new_traceparent(PARENT)
    assert child[:36] == PARENT[:36]
    assert child != PARENT
    assert is_sampled(child)
    assert is_sampled(new_traceparent())
    assert not is_sampled(new_traceparent(sampled=False))
    assert not Tracing().enabled
