"""One exposition out of those of several gateway processes.

Counters, histograms and what each process has of its own add up. Gauges that all of them read off the same scheduler
are the same number seen several times: the largest stands for all.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OWN_GAUGES = frozenset({"sglang:http_requests_active", "v4mesh_stored_responses", "v4mesh_stored_response_bytes"})
"""Gauges of a process itself, which add up like counters."""


def merge(expositions: Iterable[str]) -> bytes:
    """Prometheus text. Raises ValueError for text that is none."""
    families: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in expositions:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = samples.setdefault(family.name, {})
            adds = family.type != "gauge" or family.name in OWN_GAUGES
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                known = found.get(key, 0.0)
                found[key] = known + sample.value if adds else max(known, sample.value)
    for name, family in families.items():
        family.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in samples[name].items()]
    return _text(families.values())


def _text(families: Iterable[Metric]) -> bytes:
    known = list(families)

    class Once(Collector):
        def collect(self) -> Iterable[Metric]:
            return known

        def describe(self) -> Iterable[Metric]:
            return ()

    registry = CollectorRegistry()
    registry.register(Once())
    return generate_latest(registry)
