"""Counters and histograms of the gateway, exported in Prometheus text under the names dashboards expect.

One set of plain numbers is the source of three families of names: `vllm:`, `sglang:` and `gen_ai_*`; what only this
mesh has is `v4mesh_*`. Observing is a bisect and two additions, so that it may happen per token. Values that the
scheduler knows (running, waiting, KV pages) are read from its last status at export.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from meshkit.frames import SchedulerStatus
from meshkit.types import PAGE_TOKENS

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STAGE_SECONDS = tuple(round(0.001 * 1.62**power, 6) for power in range(30))
_TOKENS = tuple(float(4**power) for power in range(14))


class Histogram:
    """Counts per bucket, and the sum; not thread-safe, observed on the event loop only."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        below, rows = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            rows.append((bound, float(below)))
        return rows


class GatewayMetrics(Collector):
    """What one gateway process counts."""

    def __init__(
        self,
        model_name: str,
        status: Callable[[], SchedulerStatus | None],
        instances: Callable[[], Sequence[SchedulerStatus | None]],
        stored: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`status` is that of the mesh, `instances` that of each scheduler: vLLM's engines, in their order.

        `stored` tells how many responses are kept, and their bytes.
        """
        self._stored = stored
        self._model = model_name
        self._status = status
        self._instances = instances
        self.first_token = Histogram(_FIRST)
        self.inter_token = Histogram(_PER_TOKEN)
        self.per_output_token = Histogram(_PER_TOKEN)
        self.end_to_end = Histogram(_SECONDS)
        self.processing = Histogram(STAGE_SECONDS)  # from the request's arrival to its place in a queue: read, encode
        self.queue = Histogram(STAGE_SECONDS)
        self.prefill = Histogram(STAGE_SECONDS)
        self.decode = Histogram(STAGE_SECONDS)
        self.inference = Histogram(STAGE_SECONDS)  # both
        self.grammar = Histogram(STAGE_SECONDS)  # from a constrained request's Submit to the verdict on its grammar
        self.prompt_sizes = Histogram(_TOKENS)
        self.output_sizes = Histogram(_TOKENS)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finished: Counter[str] = Counter()
        self.requests = 0
        self.aborted = 0
        self.http_requests: Counter[str] = Counter()
        self.http_responses: Counter[int] = Counter()
        self.http_active = 0
        self.unknown_routes = 0
        self.others: list[Callable[[], bytes]] = []
        """More text to export, of what other parts of this process count."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return b"".join([generate_latest(self._registry), *(render() for render in self.others)])

    def describe(self) -> Iterable[Metric]:
        """Nothing up front: registering must not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._latencies()
        yield from self._tokens()
        yield from self._load()
        yield from self._http()

    def _latencies(self) -> Iterator[Metric]:
        for suffix, histogram in (
            ("time_to_first_token_seconds", self.first_token),
            ("inter_token_latency_seconds", self.inter_token),
            ("request_time_per_output_token_seconds", self.per_output_token),
            ("e2e_request_latency_seconds", self.end_to_end),
        ):
            yield self._vllm_histogram(suffix, histogram)
            yield self._histogram(f"sglang:{suffix}", histogram, {"model_name": self._model})
        model = {"model_name": self._model}
        for suffix, histogram in (
            ("request_queue_time_seconds", self.queue),
            ("request_prefill_time_seconds", self.prefill),
            ("request_decode_time_seconds", self.decode),
            ("request_inference_time_seconds", self.inference),
        ):
            yield self._vllm_histogram(suffix, histogram)
        yield self._histogram("sglang:queue_time_seconds", self.queue, model)
        yield self._histogram("sglang:grammar_compilation_time_seconds", self.grammar, model)
        stages = HistogramMetricFamily(
            "sglang:per_stage_req_latency_seconds", "Seconds of each stage of requests", labels=["model_name", "stage"]
        )
        for stage, histogram in (
            ("request_process", self.processing),
            ("prefill_waiting", self.queue),
            ("prefill_forward", self.prefill),
            ("decode_forward", self.decode),
        ):
            stages.add_metric([self._model, stage], histogram.buckets(), histogram.total)
        yield stages
        operation = {"gen_ai_request_model": self._model, "gen_ai_provider_name": "deepseek"}
        for name, histogram in (
            ("gen_ai_server_request_duration_seconds", self.end_to_end),
            ("gen_ai_server_time_to_first_token_seconds", self.first_token),
            ("gen_ai_server_time_per_output_token_seconds", self.inter_token),
        ):
            yield self._histogram(name, histogram, operation)
        usage = HistogramMetricFamily(
            "gen_ai_client_token_usage", "Tokens per request", labels=[*operation, "gen_ai_token_type"]
        )
        for kind, histogram in (("input", self.prompt_sizes), ("output", self.output_sizes)):
            usage.add_metric([*operation.values(), kind], histogram.buckets(), histogram.total)
        yield usage

    def _tokens(self) -> Iterator[Metric]:
        yield from self._both_counters("prompt_tokens", "Prompt tokens", self.prompt_tokens)
        yield from self._both_counters("generation_tokens", "Sampled tokens", self.output_tokens)
        yield self._vllm_counter("prefix_cache_queries", "Prompt tokens looked up", self.prompt_tokens)
        yield self._vllm_counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", self.cached_tokens)
        yield self._sglang_counter("cached_tokens", "Prompt tokens found in the prefix cache", self.cached_tokens)
        rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        yield self._gauge("sglang:cache_hit_rate", "Share of prompt tokens found in the prefix cache", rate)
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests", labels=["model_name", "engine", "finished_reason"]
        )
        for reason, number in sorted(self.finished.items()):
            finished.add_metric([self._model, "0", reason], number)
        yield finished
        yield self._sglang_counter("num_requests", "Requests taken in and ended", self.requests)
        yield self._sglang_counter(
            "num_aborted_requests", "Requests whose client left or that were aborted", self.aborted
        )

    def _load(self) -> Iterator[Metric]:
        """vLLM's names tell engines apart, which are our instances; SGLang's and ours are about the whole mesh."""
        status = self._status() or SchedulerStatus()
        engines = [it or SchedulerStatus() for it in self._instances()] or [SchedulerStatus()]
        for vllm, sglang, text, value in (
            ("num_requests_running", "num_running_reqs", "Requests running", lambda it: it.running),
            ("num_requests_waiting", "num_queue_reqs", "Requests waiting", lambda it: it.waiting),
            ("kv_cache_usage_perc", "token_usage", "Share of KV pages in use, 0 to 1", _usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{vllm}", text, labels=["model_name", "engine"])
            for number, engine in enumerate(engines):
                gauge.add_metric([self._model, str(number)], value(engine))
            yield gauge
            yield self._gauge(f"sglang:{sglang}", text, value(status))
        waiting = "Requests that wait for their grammar to be compiled"
        yield self._gauge("sglang:num_grammar_queue_reqs", waiting, status.grammar_queue)
        preempted = CounterMetricFamily("vllm:num_preemptions", "Requests preempted", labels=["model_name", "engine"])
        for number, engine in enumerate(engines):
            preempted.add_metric([self._model, str(number)], engine.preemptions)
        yield preempted
        yield self._sglang_counter("num_retracted_requests", "Requests preempted", status.preemptions)
        used = status.pages_total - status.pages_free
        yield self._gauge("sglang:num_used_tokens", "Tokens that the KV pages in use hold", used * PAGE_TOKENS)
        free = status.pages_free * PAGE_TOKENS
        yield self._gauge("sglang:kv_available_tokens", "Tokens that the free KV pages hold", free)
        yield self._gauge("v4mesh_pages_total", "KV pages", status.pages_total)
        yield self._gauge("v4mesh_pages_free", "KV pages free", status.pages_free)
        yield self._gauge("v4mesh_slots_free", "Slots free", status.slots_free)
        yield self._gauge("v4mesh_workers", "Worker groups attached", status.workers)
        yield self._gauge("v4mesh_ready", "1 if a worker is ready", int(status.ready and not status.draining))

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("sglang:http_requests", "HTTP requests", labels=["endpoint"])
        for route, number in sorted(self.http_requests.items()):
            requests.add_metric([route], number)
        yield requests
        responses = CounterMetricFamily("sglang:http_responses", "HTTP responses", labels=["status_code"])
        for code, number in sorted(self.http_responses.items()):
            responses.add_metric([str(code)], number)
        yield responses
        count, size = self._stored()
        yield GaugeMetricFamily("v4mesh_stored_responses", "Responses kept with store: true", value=count)
        yield GaugeMetricFamily("v4mesh_stored_response_bytes", "Bytes of the responses kept", value=size)
        yield GaugeMetricFamily("sglang:http_requests_active", "HTTP requests in progress", value=self.http_active)
        yield CounterMetricFamily("v4mesh_unknown_routes", "Requests for routes we lack", value=self.unknown_routes)

    def _histogram(self, name: str, histogram: Histogram, labels: dict[str, str]) -> Metric:
        family = HistogramMetricFamily(name, name.split(":")[-1].replace("_", " "), labels=list(labels))
        family.add_metric(list(labels.values()), histogram.buckets(), histogram.total)
        return family

    def _vllm_histogram(self, suffix: str, histogram: Histogram) -> Metric:
        return self._histogram(f"vllm:{suffix}", histogram, {"model_name": self._model, "engine": "0"})

    def _vllm_counter(self, suffix: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{suffix}", text, labels=["model_name", "engine"])
        family.add_metric([self._model, "0"], value)
        return family

    def _sglang_counter(self, suffix: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"sglang:{suffix}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _both_counters(self, suffix: str, text: str, value: float) -> Iterator[Metric]:
        yield self._vllm_counter(suffix, text, value)
        yield self._sglang_counter(suffix, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def _usage(status: SchedulerStatus) -> float:
    return (status.pages_total - status.pages_free) / status.pages_total if status.pages_total else 0.0
