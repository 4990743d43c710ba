"""The GPU forward's kernels one by one on this GPU: right against torch, and how fast against the memory's floor.

Covers the mHC boundary, routing, expert sort, middle, row quantisation, skinny products, FP4 experts, sampling, the
indexer's selection, and the glue as torch.compile makes it.
Each time is a median of replays of a CUDA graph that holds fresh inputs and enough weights to miss the L2 cache.
Kernels are compiled beforehand by as many processes as there are cores. `--tune` tries tiles beside the built-in ones.
The part `invariance` (not among the default ones) asks of all operations which backends repeat their bits in any batch;
it runs without a GPU too, on v4-nano.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._gpu_op import Bench
from benchmarks._gpu_op_compiled import compiled
from benchmarks._gpu_op_experts import expert_tiles, experts
from benchmarks._gpu_op_invariance import ROWS as INVARIANCE_ROWS
from benchmarks._gpu_op_invariance import invariance
from benchmarks._gpu_op_products import skinny
from benchmarks._gpu_op_rows import boundary, boundary_cuts, routing, sampling
from benchmarks._gpu_op_selection import selection

TITLE = "GPU kernels one by one: error against torch, microseconds, fraction of the floor (needs a GPU)"
ROWS = (1, 8, 16, 32, 64)
TOKENS = (1, 8, 32, 64, 256, 1024, 2048, 4096, 8192, 16384)

PARTS: dict[str, Callable[[Bench, bool], None]] = {
    "boundary": lambda bench, tune: boundary(bench, (1, 8, 64, 256, 1024, 4096)),
    "routing": lambda bench, tune: routing(bench, (1, 8, 64, 256, 1024, 4096, 16384)),
    "skinny": lambda bench, tune: skinny(bench, (1,) if tune else ROWS, tune=tune),
    "experts": lambda bench, tune: experts(bench, TOKENS),
    "boundary_cuts": lambda bench, tune: boundary_cuts(bench),
    "expert_tiles": lambda bench, tune: expert_tiles(bench),
    "sampling": lambda bench, tune: sampling(bench, (1, 64, 256)),
    "selection": lambda bench, tune: selection(bench),
    "compiled": lambda bench, tune: compiled(bench),
    "invariance": lambda bench, tune: invariance(bench, rows=bench.rows),
}
BY_NAME_ONLY = ("expert_tiles", "invariance")
ANYWHERE = ("invariance",)
"""Parts that need no GPU, and compile what they need themselves."""


def _warm(job: tuple[str, int, int, bool]) -> str:
    """Compile one part's kernels, every n-th launch of it, into the cache on disk; nothing runs."""
    import itertools

    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, unused-ignore]
    from triton.runtime import driver, jit  # type: ignore[import-untyped, unused-ignore]

    name, share, shares, tune = job
    torch.set_num_threads(1)

    class Absent:
        """A driver that names the target and nothing else."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    driver.set_active(Absent())
    launch, numbers = jit.JITFunction.run, itertools.count()

    def compile_some(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if next(numbers) % shares == share:
            return launch(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    jit.JITFunction.run = compile_some
    try:
        PARTS[name](Bench("cpu"), tune)
    except Exception as error:  # noqa: BLE001 - it will be seen again, on the GPU
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def run(args: list[str]) -> dict[str, float | int | str]:
    """Check and time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_ops", description=TITLE)
    parser.add_argument(
        "--parts", default=",".join(p for p in PARTS if p not in BY_NAME_ONLY), help=f"which of {', '.join(PARTS)}"
    )
    parser.add_argument("--rows", type=int, default=INVARIANCE_ROWS, help="inputs of each operation in `invariance`")
    parser.add_argument("--tune", action="store_true", help="also try other tiles of the skinny products")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="that compile beforehand")
    options = parser.parse_args(args)
    parts = options.parts.split(",")
    if set(parts) - set(ANYWHERE) and importlib.util.find_spec("triton") is None:
        raise SystemExit("gpu_ops needs Triton and an NVIDIA GPU; `pytest tests/ops` runs the kernels interpreted")
    started = time.perf_counter()
    shares = max(1, options.processes // 2)
    jobs = [(part, n, shares, options.tune) for part in parts if part not in ANYWHERE for n in range(shares)]
    if jobs:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            for problem in filter(None, pool.imap_unordered(_warm, jobs)):
                print("while compiling,", problem)
        print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    seed = int(time.time())
    torch.manual_seed(seed)
    there = torch.cuda.is_available()
    bench = Bench("cuda" if there else "cpu", seed=seed, rows=options.rows)
    if there:
        torch.backends.cuda.matmul.allow_tf32 = False
        bench.metrics["gpu"] = torch.cuda.get_device_name()
    elif jobs:
        bench.metrics["compiled"] = 1
    for part in parts if there else filter(ANYWHERE.__contains__, parts):
        began = time.perf_counter()
        try:
            PARTS[part](bench, options.tune)
        except Exception as error:  # noqa: BLE001 - the other parts' results are worth having
            bench.metrics[f"failed_{part}"] = f"{type(error).__name__}: {error}"[:300]
            print(f"FAILED {part}: {type(error).__name__}: {error}"[:2000], flush=True)
        print(f"-- {part}: {time.perf_counter() - began:.1f} s", flush=True)
    return bench.metrics
