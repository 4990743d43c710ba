"""What a gateway's /metrics and /server_info say, as plain numbers: levels, totals, and rates between two looks.

Pure: text and times in, values out. Quantiles are read off histogram buckets, so they are as coarse as those are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a mesh. `values` sums a name's samples over labels; `buckets` are cumulative counts by bound."""

    at_s: float
    info: Mapping[str, Any]
    values: Mapping[str, float]
    labelled: Mapping[str, Mapping[str, float]]  # name -> value of the one telling label -> amount
    buckets: Mapping[str, Mapping[float, float]]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds, None where nothing was observed."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One scheduler with its workers, as a gateway sees it."""

    address: str
    attached: bool
    ready: bool
    open: int
    running: int
    waiting: int
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What `v4mesh top` shows. Rates are per second since the look before, or since start at the first one."""

    model: str
    version: str
    ready: bool
    workers: int
    running: int
    waiting: int
    streams: int
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int
    preemptions: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cache_hit_share: float | None  # of the prompt tokens since the look before
    first_token: Quantiles
    inter_token: Quantiles
    end_to_end: Quantiles
    finished: Mapping[str, int] = field(default_factory=dict)
    statuses: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)  # counters that must stay zero and did not
    instances: Sequence[Instance] = ()


EVENTS = "v4mesh_core_events"  # of them, those marked as faults are shown
TELLING = {"vllm:request_success": "finished_reason", "sglang:http_responses": "status_code"}


def read_look(text: str, info: Mapping[str, Any], at_s: float) -> Look:
    """Parse one exposition. Raises ValueError for text that is none."""
    values: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if sample.name.endswith("_bucket"):
                found = buckets.setdefault(family.name, {})
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0.0) + sample.value
                continue
            values[name] = values.get(name, 0.0) + sample.value
            if name in TELLING:
                of = labelled.setdefault(name, {})
                label = sample.labels.get(TELLING[name], "")
                of[label] = of.get(label, 0.0) + sample.value
            if name == EVENTS and sample.labels.get("fault") == "1" and sample.value:
                labelled.setdefault(name, {})[sample.labels["event"]] = sample.value
    return Look(at_s, info, values, labelled, buckets)


def compare(now: Look, before: Look | None) -> Snapshot:
    """The state now, and what happened since the look before."""
    scheduler = now.info.get("scheduler") or {}
    slots, pages = scheduler.get("slots") or {}, scheduler.get("pages") or {}
    prompt, cached = _gain(now, before, "vllm:prompt_tokens"), _gain(now, before, "vllm:prefix_cache_hits")
    seconds = max(1e-9, now.at_s - before.at_s) if before is not None else inf
    return Snapshot(
        model=str(now.info.get("served_model_name", "")),
        version=str(now.info.get("version", "")),
        ready=bool(now.info.get("ready")),
        workers=int(scheduler.get("workers", 0)),
        running=int(scheduler.get("running", 0)),
        waiting=int(scheduler.get("waiting", 0)),
        streams=int(now.info.get("open_requests", 0)),
        slots_used=int(slots.get("total", 0)) - int(slots.get("free", 0)),
        slots_total=int(slots.get("total", 0)),
        pages_used=int(pages.get("total", 0)) - int(pages.get("free", 0)),
        pages_total=int(pages.get("total", 0)),
        preemptions=int(scheduler.get("preemptions", 0)),
        requests_per_s=_gain(now, before, "sglang:num_requests") / seconds,
        prompt_tokens_per_s=prompt / seconds,
        output_tokens_per_s=_gain(now, before, "vllm:generation_tokens") / seconds,
        cache_hit_share=cached / prompt if prompt > 0 else None,
        first_token=_quantiles(now, before, "vllm:time_to_first_token_seconds"),
        inter_token=_quantiles(now, before, "vllm:inter_token_latency_seconds"),
        end_to_end=_quantiles(now, before, "vllm:e2e_request_latency_seconds"),
        finished=_totals(now, "vllm:request_success"),
        statuses=_totals(now, "sglang:http_responses"),
        faults=_totals(now, EVENTS),
        instances=[_instance(it) for it in now.info.get("instances") or ()],
    )


def _instance(told: Mapping[str, Any]) -> Instance:
    scheduler = told.get("scheduler") or {}
    slots, pages = scheduler.get("slots") or {}, scheduler.get("pages") or {}
    return Instance(
        address=str(told.get("address", "")),
        attached=bool(told.get("attached")),
        ready=bool(scheduler.get("ready")) and not scheduler.get("draining"),
        open=int(told.get("open", 0)),
        running=int(scheduler.get("running", 0)),
        waiting=int(scheduler.get("waiting", 0)),
        slots_used=int(slots.get("total", 0)) - int(slots.get("free", 0)),
        slots_total=int(slots.get("total", 0)),
        pages_used=int(pages.get("total", 0)) - int(pages.get("free", 0)),
        pages_total=int(pages.get("total", 0)),
    )


def _gain(now: Look, before: Look | None, name: str) -> float:
    """How much a counter grew; one that fell belongs to a new process and starts over."""
    value, old = now.values.get(name, 0.0), before.values.get(name, 0.0) if before is not None else 0.0
    return value - old if value >= old else value


def _totals(now: Look, name: str) -> dict[str, int]:
    return {label: int(value) for label, value in sorted(now.labelled.get(name, {}).items()) if value}


def _quantiles(now: Look, before: Look | None, name: str) -> Quantiles:
    """Of what was observed since the look before; of everything if that was nothing."""
    new, old = now.buckets.get(name, {}), before.buckets.get(name, {}) if before is not None else {}
    grown = {bound: count - old.get(bound, 0.0) for bound, count in new.items()}
    if not grown or min(grown.values()) < 0 or grown[max(grown)] <= 0:
        grown = dict(new)
    return Quantiles(_quantile(grown, 0.5), _quantile(grown, 0.99))


def _quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """Linear inside a bucket; above the last bound, that bound."""
    bounds = sorted(cumulative)
    if not bounds or cumulative[bounds[-1]] <= 0:
        return None
    wanted = share * cumulative[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        count = cumulative[bound]
        if count >= wanted:
            return low if bound == inf else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low
