# mypy: disallow-untyped-calls=False
"""Kernels of one decode step as the profiler sees them in a replayed graph: how many, and where the time goes."""

import argparse
from collections import Counter, defaultdict
from typing import Any

import torch

from benchmarks._gpu_times import start_rows
from worker_svc.gpu.graphs import DecodeGraphs

SHOWN = 45


def kernels_of(graphs: DecodeGraphs, batch: int, *, whole: bool) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel of one forward (and sampling) at `batch` rows."""
    bucket = graphs.bucket(batch)
    graphs.forward(bucket)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graphs.forward(bucket)
        if whole:
            graphs.sample(bucket)
        torch.cuda.synchronize()
    return [
        (event.name, event.device_time)
        for event in profile.events()
        if str(event.device_type) == "DeviceType.CUDA" and "Memset" not in event.name
    ]


def count_launches(lab: Any, report: Any, options: argparse.Namespace) -> None:
    """Per layer kind and per step; the longest kernels by name."""
    from benchmarks._gpu_times import _Part
    from benchmarks.gpu_forward import CONTEXT, PROBE

    bench = lab.bench(slots=64, context=CONTEXT + 512, max_tokens=64)
    executor = bench.executor
    for batch in options.by_kind:
        rows = start_rows(bench, batch, CONTEXT)
        executor.slots.take_pages(rows)
        with torch.inference_mode():
            bucket = executor.graphs.bucket(batch)
            bucket.rows.copy_(torch.tensor([row.slot for row in rows], dtype=torch.int32))
            found = kernels_of(executor.graphs, batch, whole=True)
            report.metrics[f"launches_step_b{batch}"] = len(found)
            for ratio, layers in PROBE.items():
                counts = []
                for some in (layers, layers[:1]):
                    part = _Part(executor.model, some)
                    graphs = DecodeGraphs(part, bench.pools, executor.slots.tables, executor._draw, on=True)
                    counts.append(len(kernels_of(graphs, batch, whole=False)))
                each = (counts[0] - counts[1]) / (len(layers) - 1)
                report.row("launches", batch=batch, kind=f"C{ratio}", per_layer=each)
                report.metrics[f"launches_c{ratio}_b{batch}"] = each
        times: defaultdict[str, float] = defaultdict(float)
        number: Counter[str] = Counter()
        for name, micros in found:
            times[name[:90]] += micros
            number[name[:90]] += 1
        report.row("launches", batch=batch, step_kernels=len(found), sum_us=sum(times.values()))
        for name in sorted(times, key=lambda key: -times[key])[:SHOWN]:
            report.row("kernels", batch=batch, us=times[name], count=number[name], name=name)
