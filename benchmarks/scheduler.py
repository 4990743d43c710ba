"""CPU time of the scheduler per decode step: book the result, plan the next frame, build and encode both frames.

The core is driven directly by results that sample one token per row, as a worker at depth 2 sends them; then once as a
process of its own, with gRPC and everything else that it does, beside a simulated worker and a gateway by hand.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks._step_load import start_load
from meshkit.core import Called, Opened, Received, Send
from meshkit.frames import (
    Dump,
    Envelope,
    GatewayHello,
    GatewayHelloAck,
    Heartbeat,
    ResultFrame,
    RowState,
    StepFrame,
    Submit,
    SubmitChoice,
    TokenFrame,
    WorkerHello,
    WorkerHelloAck,
)
from meshkit.testing import ServiceProcess
from meshkit.types import PROTO_REV, ModelInfo, RequestId, SamplingParams
from meshkit.wire import Link, dumps, loads
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler

TITLE = "CPU time of the scheduler per decode step, 64 to 1024 running"

BATCHES = (64, 256, 1024)
GATEWAY, WORKER = 1, 2
PROMPT = 24
STEP_NS = 20_000_000


class Driver:
    """A scheduler core whose worker answers each frame with one token per row."""

    def __init__(self, rows: int) -> None:
        limits = SchedulerLimits(depth=2, chunk_tokens=1 << 20, queue_requests=4 * rows)
        self.core = Scheduler(limits, Random(7), 11)
        self.now_ns = 1_000_000_000
        self.attach: dict[int, int] = {}
        self.waiting: list[StepFrame] = []
        self.spent: dict[str, list[int]] = {"core": [], "encode": [], "decode": []}
        model = ModelInfo(name="m", revision="r", vocab_size=4096, max_context=1 << 20, eos_ids=(1,), kv_layout_id="k")
        hello = WorkerHello(
            group="w",
            boot=5,
            build="bench",
            proto_rev=PROTO_REV,
            model=model,
            ranks=1,
            slots=rows,
            pages=rows * 40,
            tails=4 * rows,
            max_gen=0,
            max_step_tokens=1 << 20,
            max_verify=1,
        )
        self._take(Opened(GATEWAY, "gateway"))
        self._take(Received(GATEWAY, Envelope(0, GatewayHello("bench", 1, "bench", PROTO_REV))))
        self._take(Opened(WORKER, "worker"))
        self._take(Received(WORKER, Envelope(0, hello)))
        self._take(Received(WORKER, Envelope(self.attach[WORKER], Dump(last=True))))
        for row in range(rows):
            self._take(Called(row, self._submit(row)))
        while self.core.status().waiting or any(len(frame.chunk_rows) for frame in self.waiting):
            self.step()
        assert self.core.status().running == rows
        for _ in range(8):
            self.step()
        for times in self.spent.values():
            times.clear()

    def _submit(self, row: int) -> Submit:
        return Submit(
            attach_id=self.attach[GATEWAY],
            request_id=RequestId(row.to_bytes(16, "big")),
            attempt=1,
            choices=(SubmitChoice(0, row, 1),),
            params=SamplingParams(max_tokens=1 << 16, stop_ids=(5, 6)),
            seed=row,
            remaining_ms=100_000_000,
            prompt=np.arange(10 + row, 10 + row + PROMPT, dtype=np.int32),
        )

    def step(self) -> None:
        """The oldest frame comes back: the clock turns, the core books and plans, both frames are encoded."""
        self.now_ns += STEP_NS
        if self.waiting[0].step % 20 == 0:
            for conn in (GATEWAY, WORKER):
                self._take(Received(conn, Envelope(self.attach[conn], Heartbeat())))
        frame = self.waiting.pop(0)
        n = len(frame.slots)
        sampled = np.ones(n, np.uint8)
        sampled[frame.chunk_rows] = frame.chunk_samples
        states = np.where(sampled, np.uint8(RowState.SAMPLED), np.uint8(RowState.CHUNK))
        result = ResultFrame(
            step=frame.step,
            t_start_ns=self.now_ns - STEP_NS,
            t_end_ns=self.now_ns,
            states=states,
            counts=sampled,
            tokens=(np.arange(int(sampled.sum()), dtype=np.int32) * 7 + frame.step) % 4000 + 10,
        )
        data = dumps(Envelope(self.attach[WORKER], result), Link.WORKER_UP)
        start = time.thread_time_ns()
        envelope = loads(data, Link.WORKER_UP)
        self.spent["decode"].append(time.thread_time_ns() - start)
        self._take(Received(WORKER, envelope), timed=True)

    def _take(self, event: object, *, timed: bool = False) -> None:
        start = time.thread_time_ns()
        effects = self.core.handle(event, self.now_ns)
        middle = time.thread_time_ns()
        for effect in effects:
            if isinstance(effect, Send):
                link = Link.GATEWAY_DOWN if effect.conn == GATEWAY else Link.WORKER_DOWN
                dumps(effect.envelope, link)
        end = time.thread_time_ns()
        for effect in effects:
            if isinstance(effect, Send):
                self._sent(effect.conn, effect.envelope)
        if timed:
            self.spent["core"].append(middle - start)
            self.spent["encode"].append(end - middle)

    def _sent(self, conn: int, envelope: Envelope) -> None:
        match envelope.frame:
            case StepFrame() as frame:
                self.waiting.append(frame)
            case GatewayHelloAck() | WorkerHelloAck():
                self.attach[conn] = envelope.attach_id
            case TokenFrame() as frame:
                assert not frame.errors, frame.errors


def clock_us() -> float:
    """What reading the thread's CPU clock costs: a system call, part of every interval measured with it."""
    times = [time.thread_time_ns() for _ in range(2000)]
    return float(np.median(np.diff(times))) / 1e3


def measure(rows: int, steps: int) -> dict[str, float]:
    """Median microseconds per step of each part, and of core and encode together; reading the clock taken off."""
    driver = Driver(rows)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(steps):
            driver.step()
    finally:
        gc.enable()
        gc.unfreeze()
    driver.core.check()
    assert not driver.core.faults, driver.core.faults
    clock = clock_us()
    spent = {name: np.array(times) / 1e3 - clock for name, times in driver.spent.items()}
    medians = {name: float(np.median(times)) for name, times in spent.items()}
    both = spent["core"] + spent["encode"]
    return {**medians, "step": float(np.median(both)), "p99": float(np.percentile(both, 99))}


async def whole_process(folder: Path, rows: int, step_ms: float, seconds: float) -> tuple[float, float]:
    """CPU microseconds per step of a scheduler process beside a simulated worker, and steps per second."""
    address = f"unix:{folder}/scheduler.sock"
    worker = ("worker_svc", "--scheduler", address, "--backend", "sim", "--slots", str(rows), "--sim-step-ms")
    with (
        ServiceProcess("scheduler_svc", "--listen", address, log=folder / "scheduler.log") as scheduler,
        ServiceProcess(*worker, str(step_ms), log=folder / "worker.log"),
    ):
        await scheduler.ready(address)
        load = await start_load(address, rows, 1 << 16)
        try:
            process = psutil.Process(scheduler.process.pid)
            before, began = _cpu_s(process), time.monotonic()
            await asyncio.sleep(seconds)
            spent, took = _cpu_s(process) - before, time.monotonic() - began
        finally:
            load.kill()
            await load.wait()
    steps = took / step_ms * 1e3
    return spent / steps * 1e6, steps / took


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run(args: list[str]) -> dict[str, float | int | str]:
    """Best of the runs by the median step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scheduler")
    parser.add_argument("--steps", type=int, default=400, help="steps measured per run")
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the best counts")
    parser.add_argument("--seconds", type=float, default=5.0, help="for how long to watch the whole process, 0 = not")
    options = parser.parse_args(args)
    table = Table("running", "step us (runs)", "core", "encode", "decode", "p99", title="CPU per decode step")
    metrics: dict[str, float | int | str] = {}
    for rows in BATCHES:
        runs = sorted((measure(rows, options.steps) for _ in range(options.runs)), key=lambda run: run["step"])
        best = runs[0]
        steps = " ".join(f"{run['step']:.0f}" for run in runs)
        table.add_row(str(rows), steps, *(f"{best[name]:.0f}" for name in ("core", "encode", "decode", "p99")))
        metrics[f"step_cpu_us_{rows}"] = best["step"]
    low, high = float(metrics[f"step_cpu_us_{BATCHES[0]}"]), float(metrics[f"step_cpu_us_{BATCHES[-1]}"])
    metrics["growth_64_to_1024"] = high / low
    metrics["growth_if_linear"] = BATCHES[-1] / BATCHES[0]
    if options.seconds:
        with tempfile.TemporaryDirectory() as folder:
            spent, rate = asyncio.run(whole_process(Path(folder), 256, 20.0, options.seconds))
        metrics["process_cpu_us_256"], metrics["process_steps_per_s"] = spent, rate
        table.add_row("256, whole process with gRPC", f"{spent:.0f}", "", "", "", "")
    Console(file=sys.stdout).print(table)
    metrics["clock_us"] = clock_us()
    metrics["load_average"] = os.getloadavg()[0]
    return metrics
