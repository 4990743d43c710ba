"""Logs, metrics and traces of a service, set up in one call each.

Logs: one line of time, service, rank, message and key=value, or one JSON object; the keys come from an allow-list, so
that text of users cannot slip in. Metrics: a Prometheus registry whose labels come from closed sets. Traces: spans with
given timestamps, recorded after the fact, one set per request and none per token; on only when
OTEL_EXPORTER_OTLP_ENDPOINT is set, and no OpenTelemetry module is loaded otherwise.
"""

import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server
from prometheus_client.exposition import generate_latest

from meshkit.address import Address, check_port
from meshkit.config import env
from meshkit.errors import ConfigError
from meshkit.interceptors import request_id
from meshkit.traceparent import is_sampled, new_traceparent, state_of

LogFormat = Literal["text", "json"]
Attribute = str | int | float | bool | Sequence[str]

_KEYS: Final = """
address attach boot build bytes code conn count depth file gib group host kind layers model name pages pid phase port
rank reason request requests rows seconds slots state status step tails threads tokens total trace_id verdict workers
"""
LOG_KEYS: Final = frozenset(_KEYS.split())
MAX_LABEL_VALUES: Final = 200

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series per series, which no dashboard reads


# ---- logs -----------------------------------------------------------------------------------------------------------


def setup_logging(
    service: str, *, rank: int = 0, fmt: LogFormat = "text", level: str = "info", stream: TextIO | None = None
) -> None:
    """Send all log records of this process to `stream` (stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(service, rank) if fmt == "json" else _TextFormatter(service, rank))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def kv(**pairs: object) -> dict[str, dict[str, object]]:
    """`log.info("attached", extra=kv(group="w0", slots=16))`. A key outside LOG_KEYS is our own mistake."""
    assert pairs.keys() <= LOG_KEYS, f"not in LOG_KEYS: {sorted(pairs.keys() - LOG_KEYS)}"
    return {"kv": pairs}


def _pairs(record: logging.LogRecord) -> dict[str, object]:
    pairs = dict(getattr(record, "kv", {}))
    if request_id.get():
        pairs.setdefault("request", request_id.get())
    return pairs


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str, rank: int) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._who = f"{service}.{rank}" if rank else service

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        level = "" if record.levelno == logging.INFO else f" {record.levelname}"
        pairs = "".join(f" {key}={value}" for key, value in _pairs(record).items())
        return f"{clock} {self._who}{level} {record.getMessage()}{pairs}{_traceback(self, record)}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str, rank: int) -> None:
        super().__init__()
        self._fixed = {"service": service, "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": round(record.created, 3), "level": record.levelname.lower(), **self._fixed}
        line["message"] = record.getMessage() + _traceback(self, record)
        return json.dumps(line | _pairs(record), default=str, ensure_ascii=False)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""


# ---- metrics --------------------------------------------------------------------------------------------------------


class Family:
    """One metric with labels from closed sets: a value outside its set is counted as `other`.

    A set given as None fills itself with the first values seen, up to the bound: for names that code alone makes.
    """

    def __init__(self, metric: Any, allowed: Mapping[str, Iterable[str] | None]) -> None:
        self._metric = metric  # Any: Counter, Gauge and Histogram share no public base class
        self._allowed = {name: set(values or ()) for name, values in allowed.items()}
        self._open = [name for name, values in allowed.items() if values is None]
        self._children: dict[tuple[str, ...], Any] = {}
        for name, values in self._allowed.items():
            assert len(values) <= MAX_LABEL_VALUES, f"label {name} has {len(values)} values"

    def _child(self, labels: Mapping[str, str]) -> Any:
        for name in self._open:
            if len(self._allowed[name]) < MAX_LABEL_VALUES:
                self._allowed[name].add(labels[name])
        key = tuple(labels[name] if labels[name] in values else "other" for name, values in self._allowed.items())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metric.labels(*key) if key else self._metric
        return child

    def add(self, amount: float = 1, **labels: str) -> None:
        """Counters and gauges."""
        self._child(labels).inc(amount)

    def put(self, value: float, **labels: str) -> None:
        """Gauges."""
        self._child(labels).set(value)

    def observe(self, value: float, **labels: str) -> None:
        """Histograms."""
        self._child(labels).observe(value)


class Metrics:
    """A registry of one process. Names may hold `:` (the dashboards' vllm: and sglang: families)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: Any = None  # Any: prometheus_client's own class, a socketserver

    def counter(self, name: str, text: str, **labels: Iterable[str] | None) -> Family:
        return Family(Counter(name, text, tuple(labels), registry=self.registry), labels)

    def gauge(self, name: str, text: str, **labels: Iterable[str] | None) -> Family:
        return Family(Gauge(name, text, tuple(labels), registry=self.registry), labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: Iterable[str] | None) -> Family:
        return Family(Histogram(name, text, tuple(labels), registry=self.registry, buckets=buckets), labels)

    def listen(self, port: int) -> None:
        """Serve /metrics on loopback from a thread of its own; 0 does nothing."""
        if port:
            check_port(Address("127.0.0.1", port))
            self._server, _ = start_http_server(port, "127.0.0.1", registry=self.registry)

    def close(self) -> None:
        """Free the port at once, for whoever takes this process's place."""
        server, self._server = self._server, None
        if server is not None:
            threading.Thread(target=server.shutdown, daemon=True).start()  # waits for the serving thread
            server.server_close()

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


# ---- traces ---------------------------------------------------------------------------------------------------------


class Tracing:
    """Spans of requests. Made by `start_tracing`; without an exporter every call is a comparison and nothing more."""

    def __init__(self, tracer: Any = None, provider: Any = None, ids: Any = None, ratio: float = 1.0) -> None:
        self._tracer = tracer  # Any: opentelemetry is imported only when tracing is on
        self._provider = provider
        self._ids = ids
        self._ratio = ratio
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    @property
    def enabled(self) -> bool:
        return self._tracer is not None

    def begin(self, given: str = "") -> str:
        """The traceparent of a span that will be recorded later and that children may name now.

        Of the caller's trace if `given` is one, else a new trace, sampled at the configured ratio. Without tracing it
        is what was given.
        """
        if self._tracer is None:
            return given
        return new_traceparent(given, sampled=secrets.randbelow(1 << 32) < self._ratio * (1 << 32))

    def record(
        self,
        name: str,
        parent: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        own: str = "",
        events: Sequence[tuple[str, int]] = (),
    ) -> None:
        """One finished span under the traceparent `parent`, times of the monotonic clock. Unsampled: nothing.

        `own` is what `begin` gave for it; without a parent it is the first of its trace. `events` are (name, time).
        """
        if self._tracer is None or not is_sampled(own or parent):
            return
        child = is_sampled(parent)
        if own:
            _, trace_id, span_id, _ = own.partition(" ")[0].split("-")
            self._ids.fix(0 if child else int(trace_id, 16), int(span_id, 16))
        context = _context_of(parent) if child else _no_context()
        span = self._tracer.start_span(
            name, context, attributes=dict(attributes or {}), start_time=start_ns + self._epoch_ns
        )
        for event, at_ns in events:
            span.add_event(event, timestamp=at_ns + self._epoch_ns)
        span.end(end_ns + self._epoch_ns)

    def shutdown(self) -> None:
        """Send what is buffered."""
        if self._provider is not None:
            self._provider.shutdown()


def start_tracing(service: str, *, exporter: Any = None) -> Tracing:
    """Tracing on if OTEL_EXPORTER_OTLP_ENDPOINT is set (or an exporter is given), off and free of cost otherwise."""
    endpoint = env("OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter is None and not endpoint:
        return Tracing()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    ids = _make_ids()

    if exporter is None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        # None: as its scheme says. A collector that is away must not keep a process from leaving.
        exporter = OTLPSpanExporter(insecure=endpoint.startswith("unix:") or None, timeout=2)
    # Always on: what is not sampled never comes here.
    resource = Resource.create({"service.name": f"v4mesh-{service}"})
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("v4mesh"), provider, ids, _ratio())


def _ratio() -> float:
    """Share of new traces that are sampled: OTEL_TRACES_SAMPLER_ARG, where the sampler is one by ratio."""
    if not env("OTEL_TRACES_SAMPLER").endswith("traceidratio"):
        return 1.0
    text = env("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG = {text!r} must be a number from 0 to 1")
    return ratio


def _make_ids() -> Any:
    """Random ids, but for a span whose ids were given out before it is recorded."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def __init__(self) -> None:
            self._trace_id, self._span_id = 0, 0

        def fix(self, trace_id: int, span_id: int) -> None:
            self._trace_id, self._span_id = trace_id, span_id

        def generate_span_id(self) -> int:
            fixed, self._span_id = self._span_id, 0
            return fixed or super().generate_span_id()

        def generate_trace_id(self) -> int:
            fixed, self._trace_id = self._trace_id, 0
            return fixed or super().generate_trace_id()

    return Ids()


def _no_context() -> Any:
    from opentelemetry.context import Context

    return Context()


def _context_of(traceparent: str) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    _, trace_id, span_id, flags = traceparent.partition(" ")[0].split("-")
    context = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state_of(traceparent)]),
    )
    return set_span_in_context(NonRecordingSpan(context))
