"""How long the device waits between steps: scheduler and load in processes of their own, a simulated worker here.

The device is a thread that spins until a step's scheduled end and then takes the next one: the gap is from that end to
the next start. Shown for depth 2 and 1, and against the same cores called in one process without gRPC.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._step_load import start_load
from benchmarks._steps import Loopback
from meshkit.quiet import quiet_collector
from meshkit.testing import ServiceProcess, until
from meshkit.types import ModelInfo
from worker_svc.compute import ComputeThread
from worker_svc.core.slots import SlotMachine, SlotMachineConfig
from worker_svc.core.table import PoolConfig
from worker_svc.loop import WorkerLoop
from worker_svc.pipeline import Pipeline
from worker_svc.servicer import SWITCH_S
from worker_svc.sim.cost import FlashOnH200
from worker_svc.sim.executor import SimExecutor, Waiting
from worker_svc.sim.state import SlotArrays

TITLE = "idle gap of the worker's device between steps, scheduler in another process"

EOS = 1
CASES = ((20.0, 64), (20.0, 256), (3.0, 64), (3.0, 256))
SETTLE = 20  # first steps left out


@dataclass(slots=True)
class Run:
    """Gaps in microseconds and the mean time from start to start in milliseconds."""

    gaps: np.ndarray
    step_ms: float

    @property
    def p50(self) -> float:
        return float(np.percentile(self.gaps, 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.gaps, 99))


def model_of(rows: int) -> tuple[ModelInfo, PoolConfig]:
    """A vocabulary and pools with room for `rows` choices."""
    info = ModelInfo(
        name="sim", revision="r", vocab_size=4096, max_context=1 << 20, eos_ids=(EOS,), kv_layout_id="simulated"
    )
    return info, PoolConfig(slots=rows, pages=rows * 24, tails=4 * rows, max_step_tokens=8192)


def device(rows: int, step_ms: float, timeline: list[tuple[int, int]]) -> SimExecutor:
    """A device of constant steps that notes when each ran."""
    info, pools = model_of(rows)
    slots = SlotArrays(pools.slots, pools.tails, range(3, info.vocab_size), EOS)
    waiting = Waiting(spin=True, threaded=True)
    return SimExecutor(
        info, slots, FlashOnH200(step_ms=step_ms), waiting, lambda start, end: timeline.append((start, end))
    )


def measured(timeline: list[tuple[int, int]], steps: int) -> Run:
    """The last `steps` of a timeline."""
    spans = np.array(timeline[-steps:], np.int64)
    gaps = (spans[1:, 0] - spans[:-1, 1]) / 1e3
    return Run(gaps, float((spans[-1, 0] - spans[0, 0]) / (len(spans) - 1) / 1e6))


async def across_processes(folder: Path, step_ms: float, rows: int, depth: int, steps: int) -> Run:
    """Scheduler and load as processes, the worker's loop and device in this one."""
    address = f"unix:{folder}/scheduler.sock"
    timeline: list[tuple[int, int]] = []
    info, pools = model_of(rows)
    with ServiceProcess(
        "scheduler_svc", "--listen", address, "--depth", str(depth), log=folder / "scheduler.log"
    ) as scheduler:
        await scheduler.ready(address, service="")
        executor, compute = device(rows, step_ms, timeline), ComputeThread()
        loop = WorkerLoop(executor, compute, group="w0", model=info, pools=pools, scheduler=address)
        serving = asyncio.create_task(loop.run())
        tokens = steps + 4 * SETTLE + int(rows * 2 / step_ms)
        load = await start_load(address, rows, tokens)
        try:
            begun = len(timeline) + SETTLE
            await until(lambda: len(timeline) >= begun + steps, 60 + steps * step_ms / 100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                load.kill()
            await load.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            compute.stop()
    return measured(timeline[: begun + steps], steps)


async def in_one_process(step_ms: float, rows: int, steps: int) -> Run:
    """The same cores and the same device in one process: nothing between scheduler and worker but function calls."""
    timeline: list[tuple[int, int]] = []
    executor, compute = device(rows, step_ms, timeline), ComputeThread()
    info, pools = model_of(rows)
    config = SlotMachineConfig(group="w0", boot=1, build="bench", model=info, pools=pools)
    mesh = Loopback(SlotMachine(config, Random(1)), depth=2)
    pipeline = Pipeline(executor, compute, mesh.ran)
    mesh.attach(pipeline.submit)
    for row in range(rows):
        mesh.submit(row, range(10, 34), steps + 4 * SETTLE + rows)
    await until(lambda: mesh.decoding == rows, 60)
    async with quiet_collector(lambda: True):
        begun = len(timeline) + SETTLE
        await until(lambda: len(timeline) >= begun + steps, 60 + steps * step_ms / 100)
    pipeline.close()
    compute.stop()
    return measured(timeline[: begun + steps], steps)


def run(args: list[str]) -> dict[str, float | int | str]:
    """Measure; the keys without a step time are those of 20 ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks step_gap")
    parser.add_argument("--steps", type=int, default=400, help="steps measured per run")
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the best counts")
    parser.add_argument("--rows", type=int, help="only this batch size")
    options = parser.parse_args(args)
    console = Console()
    table = Table("step ms", "batch", "depth", "gap p50 us", "p99 us", "step ms", title="three runs, best first")
    metrics: dict[str, float | int | str] = {}
    best: dict[tuple[float, int, int], Run] = {}
    sys.setswitchinterval(SWITCH_S)  # as a worker sets itself up
    with tempfile.TemporaryDirectory() as folder:
        for step_ms, rows in CASES:
            if options.rows and rows != options.rows:
                continue
            for depth in (2, 1):
                count = options.runs if depth == 2 else 1
                runs = []
                for number in range(count):
                    place = Path(folder) / f"{step_ms:.0f}-{rows}-{depth}-{number}"
                    place.mkdir(mode=0o700)
                    runs.append(asyncio.run(across_processes(place, step_ms, rows, depth, options.steps)))
                runs.sort(key=lambda run: run.p99)
                best[step_ms, rows, depth] = runs[0]
                shown = [" ".join(f"{getattr(run, name):.1f}" for run in runs) for name in ("p50", "p99")] + [
                    " ".join(f"{run.step_ms:.3f}" for run in runs)
                ]
                table.add_row(f"{step_ms:.0f}", str(rows), str(depth), *shown)
            together = [asyncio.run(in_one_process(step_ms, rows, options.steps)) for _ in range(options.runs)]
            alone = min(together, key=_step_ms)
            table.add_row(
                f"{step_ms:.0f}",
                str(rows),
                "in process",
                f"{alone.p50:.1f}",
                f"{alone.p99:.1f}",
                f"{alone.step_ms:.3f}",
            )
            metrics[f"step_ratio_{step_ms:.0f}ms_{rows}"] = best[step_ms, rows, 2].step_ms / alone.step_ms
    console.print(table)
    for (step_ms, rows, depth), result in best.items():
        name = f"{step_ms:.0f}ms_{rows}" + ("" if depth == 2 else "_depth1")
        metrics[f"gap_us_p50_{name}"] = result.p50
        metrics[f"gap_us_p99_{name}"] = result.p99
    metrics["gap_us_p50"] = _worst(metrics, "gap_us_p50_20ms")
    metrics["gap_us_p99"] = _worst(metrics, "gap_us_p99_20ms")
    metrics["gap_us_p99_3ms"] = _worst(metrics, "gap_us_p99_3ms")
    metrics["step_ratio_to_inprocess"] = _worst(metrics, "step_ratio_20ms")
    metrics["step_ratio_to_inprocess_3ms"] = _worst(metrics, "step_ratio_3ms")
    metrics["load_average"] = os.getloadavg()[0]  # other work on the machine shows in p99
    return metrics


def _step_ms(run: Run) -> float:
    return run.step_ms


def _worst(metrics: dict[str, float | int | str], prefix: str) -> float:
    """Over the batch sizes, depth 2."""
    found = [float(v) for k, v in metrics.items() if k.startswith(prefix + "_") and not k.endswith("depth1")]
    return max(found)
