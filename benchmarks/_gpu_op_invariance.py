"""Which backend of which operation gives a row the same bits alone, among others, and run after run; what that costs.

Every operation with every backend that can run, as it is used by default and, where it may be chosen then, in
deterministic mode. Random rows against three layers of Flash width on a GPU, against v4-nano on a CPU. Times are of one
call at 1 and 64 rows on the same inputs each time, so smaller weights lie in the L2 cache: they compare modes, no more.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks._gpu_op import Bench
from worker_svc.gpu.invariance import Call, Case, examine
from worker_svc.gpu.invariance_cases import Cases
from worker_svc.gpu.self_check import NOT_RUN, SIZES, check_forward
from worker_svc.ops import invariant, registry

ROWS = 256
TIMED = (1, 64)
RATIOS = (4, 128, 0)
HEADER = (
    f"{'mode':14}{'operation':17}{'backend':11}{'what':22}{'repeats':9}{'invariant':11}{'chunk':7}{'differs by':>11}"
)


@dataclass
class Line:
    """One operation with one backend in one mode, over its cases."""

    repeats: bool = True
    invariant: bool = True
    chunk: bool | None = None
    difference: float = 0.0
    failed: str = ""
    micros: dict[int, float] | None = None

    @property
    def passes(self) -> bool:
        """In every respect."""
        return self.repeats and self.invariant and self.chunk is not False and not self.failed


def invariance(bench: Bench, *, rows: int = ROWS, sizes: Sequence[int] = SIZES, forward: bool = True) -> None:
    """Print the table; metrics hold every line, and what fails in deterministic mode."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # small products: two threads would wait for each other
    config, weights = _model(device)
    with torch.inference_mode():
        cases = list(Cases(weights, config, device, rows=rows, seed=bench.seed))
    print(HEADER + "".join(f"{f'us b{size}':>11}" for size in TIMED))
    failing = []
    for mode in ("default", "deterministic"):
        for op, backend in _choices(mode, weights, device):
            line = _line(mode, op, backend, cases, weights, device, sizes)
            if line is None:
                continue
            _record(bench, mode, op, backend, line)
            if mode == "deterministic" and not line.passes:
                failing.append(f"{op}={backend}")
    bench.metrics["deterministic_fails"] = ", ".join(failing) or "none"
    if forward:
        for mode in (
            "default",
            "deterministic",
        ):  # the first says what is seen in which way of running without the mode
            bench.metrics[f"{mode}_forward"] = _forward(config, weights, device, deterministic=mode == "deterministic")
    print("deterministic mode:", bench.metrics["deterministic_fails"], "of the operations fail;", _told(bench))


def _told(bench: Bench) -> str:
    found = (bench.metrics.get(f"{mode}_forward", "not run") for mode in ("deterministic", "default"))
    return "whole forward: {}; by default: {}".format(*found)


def _model(device: torch.device) -> tuple[Any, Any]:
    """Config and weights on the device."""
    from benchmarks._gpu_model import RandomSource
    from meshkit.models import DEFAULT_MODEL
    from worker_svc.checkpoint.census import preset
    from worker_svc.checkpoint.loader import load_checkpoint
    from worker_svc.gpu.weights import WeightLoader

    if device.type == "cpu":
        checkpoint = load_checkpoint(DEFAULT_MODEL, check_values=False)
        return checkpoint.config, WeightLoader(checkpoint, device).model()
    config = replace(
        preset("flash"),
        num_hidden_layers=len(RATIOS),
        compress_ratios=RATIOS,
        num_nextn_predict_layers=0,
        num_hash_layers=0,
    )
    return config, WeightLoader(RandomSource(config, device), device).model()


def _choices(mode: str, weights: Any, device: torch.device) -> Iterator[tuple[str, str]]:
    """Operations with the backends to try."""
    for op, backends in registry.OPS.items():
        if mode == "deterministic" and op in NOT_RUN:
            continue
        if device.type == "cpu":
            yield op, "torch"
            continue
        names = [r.backend for r in invariant.RECIPES[op]] if mode == "deterministic" else list(backends)
        if op == "experts":  # packed for one backend when they were loaded
            names = [name for name in names if name == weights.blocks[0].ffn.experts.name]
        yield from ((op, name) for name in names if not registry.obstacle(name))


def _line(
    mode: str, op: str, backend: str, cases: list[Case], weights: Any, device: torch.device, sizes: Sequence[int]
) -> Line | None:
    """None where there is nothing to run."""
    name = "experts" if op == "large_experts" and backend == "nvrtc" else op
    theirs = [case for case in cases if case.op == name]
    if not theirs:
        return None
    line = Line(micros=dict.fromkeys(TIMED, 0.0))
    with _chosen(mode, op, backend, weights, device), torch.inference_mode():
        for case in theirs:
            try:
                _case(mode, backend, case, line, device, sizes)
            except Exception as error:  # noqa: BLE001 - a backend that cannot is a line of the table
                line.failed = f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
                print(f"{mode:14}{op:17}{backend:11}{case.name:22}{line.failed}", flush=True)
    return line


@contextmanager
def _chosen(mode: str, op: str, backend: str, weights: Any, device: torch.device) -> Iterator[None]:
    """The backend alone, everything else as the mode has it."""
    experts = [block.ffn.experts for block in weights.blocks if backend == "nvrtc"]
    if any(not hasattr(layer, "own_from") for layer in experts):
        experts = []
    kept = [(layer._large, layer.own_from) for layer in experts]
    wanted = {} if device.type == "cpu" else {op: backend}
    with invariant.switched(False):
        if mode == "deterministic":
            invariant.switch(True, wanted)
        else:
            registry.require(wanted)
        for layer in experts:
            layer._large, layer.own_from = layer._up.readable and layer._down.readable, 0
        try:
            yield
        finally:
            for layer, (large, own_from) in zip(experts, kept):
                layer._large, layer.own_from = large, own_from


def _case(mode: str, backend: str, case: Case, line: Line, device: torch.device, sizes: Sequence[int]) -> None:
    found = examine(case, device, sizes)
    micros = [
        _micros(case.make(torch.arange(size, device=device)), device, graph=backend != "torch")
        if size <= min(case.rows, case.most)
        else 0.0
        for size in TIMED
    ]
    line.repeats &= found.repeats
    line.invariant &= found.invariant
    if found.chunk is not None:
        line.chunk = found.chunk and line.chunk is not False
    line.difference = max(line.difference, found.difference)
    assert line.micros is not None
    for size, taken in zip(TIMED, micros):
        line.micros[size] += taken
    said = "-" if found.chunk is None else _yes(found.chunk)
    apart = f"{found.difference:.2g}" if found.wrong else "-"
    print(
        f"{mode:14}{case.op:17}{backend:11}{case.name:22}{_yes(found.repeats):9}{_yes(found.invariant):11}{said:7}"
        f"{apart:>11}" + "".join(f"{taken:11.1f}" if taken else f"{'-':>11}" for taken in micros),
        f" {found.wrong}",
        flush=True,
    )


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _micros(call: Call, device: torch.device, *, graph: bool) -> float:
    """Median microseconds: of a graph's replays, or by the clock where the backend waits for the device."""
    if device.type == "cuda" and graph:
        try:
            return Bench("cuda").time([call] * 10)
        except RuntimeError as error:
            print(f"  no graph: {' '.join(str(error).split())[:100]}; by the clock")
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[1:])


def _record(bench: Bench, mode: str, op: str, backend: str, line: Line) -> None:
    name = f"{mode}_{op}_{backend}"
    bench.metrics[f"{name}_repeats"] = int(line.repeats)
    bench.metrics[f"{name}_invariant"] = int(line.invariant)
    if line.chunk is not None:
        bench.metrics[f"{name}_chunk"] = int(line.chunk)
    bench.metrics[f"{name}_difference"] = line.difference
    if line.failed:
        bench.metrics[f"{name}_failed"] = line.failed
    for size, micros in (line.micros or {}).items():
        bench.metrics[f"{name}_b{size}_us"] = round(micros, 1)


def _forward(config: Any, weights: Any, device: torch.device, *, deterministic: bool) -> str:
    """The start's check of the whole, graphs included; the complaint, or `passes`."""
    from benchmarks._gpu_model import assemble
    from meshkit.errors import GpuError

    context, slots = (4096, 64) if device.type == "cuda" else (512, 4)
    with invariant.switched(deterministic):
        built = assemble(config, weights, device, slots=slots, context=context, max_tokens=context)
        try:
            check_forward(built.executor, context - slots)
        except GpuError as error:
            return str(error).split(": ", 2)[-1].split(", though")[0][:300]
    return "passes"
