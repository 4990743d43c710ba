"""How long the GPU waits between steps when a mesh drives it: scheduler and load in processes of their own.

The worker's loop and the executor run here. Each step is marked on the device where its work begins and ends; a gap is
from one step's end to the next one's beginning, so it holds everything that is not compute: frames, planning, launches.
"""
# mypy: disallow-untyped-calls=False

import asyncio
import contextlib
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu_model import Bench
from benchmarks._step_load import start_load
from meshkit.testing import ServiceProcess, until
from worker_svc.compute import ComputeThread
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import StepOutcome, StepWork
from worker_svc.gpu.ahead import compile_ahead, warm_up
from worker_svc.gpu.executor import Flight, GpuExecutor
from worker_svc.kernel_cache import CompileWatch
from worker_svc.loop import WorkerLoop
from worker_svc.masks.source import MaskSource

SETTLE = 40
"""Steps left out at the beginning: prefills, first tokens."""


class Marked:
    """An executor whose steps are marked on the device."""

    def __init__(self, executor: GpuExecutor) -> None:
        self.executor = executor
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def use_masks(self, masks: MaskSource) -> None:
        """See `Executor`."""
        self.executor.use_masks(masks)

    def launch(self, work: StepWork) -> Flight:
        """See `Executor`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        flight = self.executor.launch(work)
        end.record()
        self.marks.append((begin, end))
        return flight

    def collect(self, handle: Flight) -> StepOutcome:
        """See `Executor`."""
        return self.executor.collect(handle)


async def drive(bench: Bench, rows: int, steps: int) -> Marked:
    """`rows` choices decode for at least `steps` steps."""
    marked, compute = Marked(bench.executor), ComputeThread()
    pools = PoolConfig(slots=bench.pools.slots, pages=bench.pools.pages, tails=bench.pools.tails, max_step_tokens=4096)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/scheduler.sock"
        with ServiceProcess("scheduler_svc", "--listen", address, log=Path(folder) / "scheduler.log") as scheduler:
            await scheduler.ready(address, service="")
            loop = WorkerLoop(marked, compute, group="gpu", model=bench.executor.info, pools=pools, scheduler=address)
            serving = asyncio.create_task(loop.run())
            load = await start_load(address, rows, steps + 4 * SETTLE)
            try:
                begun = len(marked.marks) + SETTLE
                await until(lambda: len(marked.marks) >= begun + steps, 60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    load.kill()
                await load.wait()
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                compute.stop()
    return marked


def measure(bench: Bench, rows: int, steps: int, report: Any) -> None:
    """Share of time without work on the device, gaps and step time."""
    began = time.perf_counter()
    for name, ready in (
        ("compiled", lambda: compile_ahead(bench.executor, 4096, covered=True)),
        ("captured", bench.executor.capture),
        ("warm", lambda: warm_up(bench.executor, 4096)),
    ):
        ready()
        print(f"mesh: {name} after {time.perf_counter() - began:.0f} s", flush=True)  # minutes if caches are cold
    watch = CompileWatch.of_environment()
    bench.executor.watch(watch)
    marked = asyncio.run(drive(bench, rows, steps))
    torch.cuda.synchronize()
    marks = marked.marks[-steps - 20 : -20]
    gaps = [a[1].elapsed_time(b[0]) for a, b in pairwise(marks)]
    spans = [begin.elapsed_time(end) for begin, end in marks]
    share = sum(gaps) / (sum(gaps) + sum(spans))
    gaps.sort()
    report.row(
        "mesh",
        batch=rows,
        steps=len(marks),
        step_ms=statistics.mean(spans),
        gap_p50_us=gaps[len(gaps) // 2] * 1e3,
        gap_p99_us=gaps[int(len(gaps) * 0.99)] * 1e3,
        idle_share=share,
        compiled_while_serving=watch.total,
    )
    report.metrics[f"gpu_idle_share_b{rows}"] = round(share, 5)
