"""Kernels of one decode step as the profiler sees them in a replayed graph: how many, and where the time goes."""
# mypy: disallow-untyped-calls=False

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks._gpu_times import start_rows
from worker_svc.gpu.graphs import DecodeGraphs

SHOWN = 45
LAST = 34
"""Kernels of about one layer: the timeline shows the last layer but one."""


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
    return kernels_seen(profile)


def kernels_seen(profile: Any) -> list[tuple[str, float]]:
    """(name, microseconds) of a profile's kernels in order of their start."""
    events = [
        event
        for event in profile.events()
        if str(event.device_type) == "DeviceType.CUDA" and "Memset" not in event.name
    ]
    return [(event.name, event.device_time) for event in sorted(events, key=lambda event: event.time_range.start)]


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
        for ratio, count in attention_kernels([name for name, _ in found], lab.config.layer_ratios).items():
            report.row("launches", batch=batch, kind=f"C{ratio}", attention_path=count)
            report.metrics[f"launches_attention_c{ratio}_b{batch}"] = count
        for name, micros in found[-2 * LAST : -LAST]:
            report.row("timeline", batch=batch, us=micros, name=name[:60])
        report.row("launches", batch=batch, step_kernels=len(found), sum_us=sum(micros for _, micros in found))
        _by_name(found, report, batch=batch)


def attention_kernels(names: list[str], ratios: Sequence[int]) -> dict[int, int]:
    """Kernels of the attention sublayer, projections included, mixers and norms apart, by layer kind: the fewest seen.

    Every sublayer begins behind the kernel that collapses the streams and norms; attention and experts take turns.
    The first layer of a kind also holds what a step does once.
    """
    parts: list[list[str]] = []
    for name in names:
        if "collapse" in name:
            parts.append([])
        elif parts and "mix" not in name:
            parts[-1].append(name)
    found: dict[int, int] = {}
    for ratio, part in zip(ratios, parts[::2]):
        found[ratio] = min(found.get(ratio, len(part)), len(part))
    return found


def profile_prefill(lab: Any, report: Any) -> None:
    """Where a prompt's time goes: kernels by name, and how long the device waited for the host."""
    from benchmarks._gpu_times import prompt_work
    from benchmarks.gpu_forward import PEER_PREFILL_MS

    for tokens in PEER_PREFILL_MS:
        bench = lab.bench(slots=1, context=tokens + 256, max_tokens=tokens)
        work = prompt_work(bench, tokens)
        bench.executor.run(work)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            begin = time.perf_counter()
            handle = bench.executor.launch(work)
            launched = time.perf_counter()
            bench.executor.collect(handle)
            torch.cuda.synchronize()
            end = time.perf_counter()
        found = kernels_seen(profile)
        report.row(
            "prefill_profile",
            tokens=tokens,
            wall_ms=(end - begin) * 1e3,
            launch_ms=(launched - begin) * 1e3,
            kernels=len(found),
            sum_ms=sum(micros for _, micros in found) / 1e3,
        )
        _by_name(found, report, tokens=tokens)
        del bench


def _by_name(found: list[tuple[str, float]], report: Any, **where: int) -> None:
    times: defaultdict[str, float] = defaultdict(float)
    number: Counter[str] = Counter()
    for name, micros in found:
        times[name[:90]] += micros
        number[name[:90]] += 1
    for name in sorted(times, key=lambda key: -times[key])[:SHOWN]:
        report.row("kernels", **where, us=times[name], count=number[name], name=name)
