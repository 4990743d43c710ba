"""The model alone, in this process: decode and prefill of the default model beside transformers, same weights.

No scheduler, no wire: what the kernel-level work costs. CPU time is printed beside wall time, because a shared machine
makes wall time of small steps mean little. Needs the test extra.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks._reference import Reference
from meshkit.types import SamplingParams
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.executor import CpuExecutor
from worker_svc.solo import pages_for

TITLE = "decode and prefill in one process, fast and deterministic, beside transformers"
DEFAULT_MODEL = Path(__file__).parent.parent / "meshkit" / "models" / "v4-nano"
CONTEXT, PREFILL, REPEATS = 300, 1024, 5


def run(args: list[str]) -> dict[str, float | int | str]:
    """`ratio_to_transformers`: decode tokens per CPU second of ours over transformers', batch 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks forward_step", description=TITLE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args(args)
    metrics: dict[str, float | int | str] = {"threads": options.threads}
    for mode in ("fast", "deterministic"):
        decode, prefill = _ours(mode == "deterministic", options.threads, options.tokens)
        metrics |= _report(mode, decode, prefill)
    torch.set_num_threads(options.threads)
    metrics |= _report("transformers", *_transformers(options.tokens))
    ours, theirs = float(metrics["fast_decode_cpu_ms"]), float(metrics["transformers_decode_cpu_ms"])
    return {"ratio_to_transformers": round(theirs / ours, 2), **metrics}


Timing = tuple[float, float]  # wall and CPU seconds


def _ours(deterministic: bool, threads: int, tokens: int) -> tuple[Timing, Timing]:
    executor = CpuExecutor.load(DEFAULT_MODEL, deterministic=deterministic, threads=threads, slots=1, pages=8, tails=0)
    ids = torch.randint(5, executor.info.vocab_size, (PREFILL,)).tolist()
    pages = pages_for(PREFILL)

    def row(start: int, end: int) -> None:
        work = RowWork(slot=0, start=start, ids=tuple(ids[start:end]), pages=pages)
        executor.run(StepWork(rows=(work,)))

    def decode() -> None:
        for position in range(CONTEXT, CONTEXT + tokens):
            row(position, position + 1)

    greedy = SlotInit(slot=0, params=SamplingParams(temperature=0.0), seed=0, choice=0, n_emitted=0)
    executor.run(StepWork(inits=(greedy,)))
    row(0, CONTEXT)
    best = _best(decode)
    return (best[0] / tokens, best[1] / tokens), _best(lambda: row(0, PREFILL))


def _transformers(tokens: int) -> tuple[Timing, Timing]:
    model = Reference(load_checkpoint(DEFAULT_MODEL)).model
    ids = torch.randint(5, model.config.vocab_size, (1, PREFILL))
    with torch.inference_mode():
        cache = model(ids[:, :CONTEXT], use_cache=True).past_key_values

        def decode() -> None:
            for position in range(tokens):
                model(ids[:, position : position + 1], cache=cache, use_cache=True)

        best = _best(decode)
        return (best[0] / tokens, best[1] / tokens), _best(lambda: model(ids))


def _best(work: Callable[[], object]) -> Timing:
    """Least wall and least CPU time of a few runs, after one that warms up."""
    work()
    walls, cpus = [], []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def _report(name: str, decode: Timing, prefill: Timing) -> dict[str, float | int | str]:
    print(
        f"{name:14} decode {decode[0] * 1e3:6.2f} ms ({decode[1] * 1e3:6.2f} ms CPU)   "
        f"prefill {PREFILL / prefill[0]:7.0f} tokens/s ({PREFILL / prefill[1]:7.0f} per CPU second)"
    )
    return {
        f"{name}_decode_ms": round(decode[0] * 1e3, 3),
        f"{name}_decode_cpu_ms": round(decode[1] * 1e3, 3),
        f"{name}_prefill_tokens_per_s": round(PREFILL / prefill[0]),
        f"{name}_prefill_tokens_per_cpu_s": round(PREFILL / prefill[1]),
    }
