"""The model alone, in this process: decode and prefill of the default model beside transformers, same weights.

No scheduler, no wire: what the kernel-level work costs. CPU time is printed beside wall time, because a shared machine
makes wall time of small steps mean little. Needs the test extra.
"""

import argparse
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks._reference import Reference
from meshkit.config import export
from meshkit.types import SamplingParams
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.compiled_glue import prepare
from worker_svc.compiled_glue.glue import CompiledGlue
from worker_svc.compiled_glue.pieces import PIECES
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.executor import CpuExecutor
from worker_svc.model.glue import Glue, GlueShapes
from worker_svc.solo import pages_for

TITLE = "decode and prefill in one process, fast, compiled and deterministic, beside transformers"
DEFAULT_MODEL = Path(__file__).parent.parent / "meshkit" / "models" / "v4-nano"
CONTEXT, PREFILL, REPEATS = 300, 1024, 7
PIECE_TOKENS = (1, 16, 256)

Timing = tuple[float, float]  # wall and CPU seconds


def run(args: list[str]) -> dict[str, float | int | str]:
    """`ratio_to_transformers`: decode tokens per CPU second of ours over transformers', batch 1.

    `compiled` is fast mode with --torch-compile: `compile_s` from an empty cache, `compiled_load_s` from a full one;
    `compiled_gain_decode` and `_prefill` are its speed over fast mode's, in CPU time; `piece_NAME_gain_1`, `_16` and
    `_256` one piece's over plain torch's, at so many tokens (or keys).
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks forward_step", description=TITLE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args(args)
    metrics: dict[str, float | int | str] = {"threads": options.threads}
    plain = _executor(options.threads)
    with tempfile.TemporaryDirectory() as cache:
        export({"TORCHINDUCTOR_CACHE_DIR": cache})
        glue, metrics["compile_s"] = _compiled(Path(cache))
        glue, metrics["compiled_load_s"] = _compiled(Path(cache))
    print(f"compiled in {metrics['compile_s']} s, loaded again in {metrics['compiled_load_s']} s")
    torch.set_num_threads(1)
    metrics |= _pieces(glue)
    fused = _executor(options.threads, glue=glue)
    # In turns: what else the machine does should meet both.
    fast, compiled = _in_turns([plain, fused], options.tokens)
    metrics |= _report("fast", *fast) | _report("compiled", *compiled)
    metrics["compiled_gain_decode"] = round(fast[0][1] / compiled[0][1], 3)
    metrics["compiled_gain_prefill"] = round(fast[1][1] / compiled[1][1], 3)
    (deterministic,) = _in_turns([_executor(options.threads, deterministic=True)], options.tokens)
    metrics |= _report("deterministic", *deterministic)
    torch.set_num_threads(options.threads)
    metrics |= _report("transformers", *_transformers(options.tokens))
    ours, theirs = float(metrics["fast_decode_cpu_ms"]), float(metrics["transformers_decode_cpu_ms"])
    return {"ratio_to_transformers": round(theirs / ours, 2), **metrics}


def _executor(threads: int, *, deterministic: bool = False, glue: Glue | None = None) -> CpuExecutor:
    return CpuExecutor.load(
        DEFAULT_MODEL, deterministic=deterministic, threads=threads, slots=1, pages=8, tails=0, glue=glue
    )


def _compiled(cache: Path) -> tuple[CompiledGlue, float]:
    """The compiled glue of the default model, and the seconds that it took."""
    shapes = GlueShapes.of(load_checkpoint(DEFAULT_MODEL).config)
    start = time.perf_counter()
    glue = prepare(shapes, "default", cache)
    return glue, round(time.perf_counter() - start, 1)


@torch.inference_mode()
def _pieces(glue: CompiledGlue) -> dict[str, float | int | str]:
    """How many times faster each piece is, on one thread."""
    plain, gains = Glue(glue.shapes), dict[str, float | int | str]()
    for name, piece in PIECES.items():
        sizes = [tokens for tokens in PIECE_TOKENS if not piece.most or tokens <= piece.most]
        for tokens in sizes:
            inputs = piece.example(glue.shapes, tokens, torch.Generator().manual_seed(tokens))
            sides = (partial(glue.run, name, *inputs), partial(piece.plain, plain, *inputs))
            times = [min(timeit.repeat(side, number=200 // tokens + 10, repeat=7)) for side in sides]
            gains[f"piece_{name}_gain_{tokens}"] = round(times[1] / times[0], 2)
        print(f"{name:14}", *(f"x{gains[f'piece_{name}_gain_{tokens}']} at {tokens:<4}" for tokens in sizes))
    return gains


def _in_turns(executors: list[CpuExecutor], tokens: int) -> list[tuple[Timing, Timing]]:
    """Decode of one token and prefill of PREFILL for each, round by round."""
    works = [_works(executor, tokens) for executor in executors]
    decode = _best(*(work[0] for work in works))
    prefill = _best(*(work[1] for work in works))
    return [((wall / tokens, cpu / tokens), whole) for (wall, cpu), whole in zip(decode, prefill)]


def _works(executor: CpuExecutor, tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
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
    return decode, lambda: row(0, PREFILL)


def _transformers(tokens: int) -> tuple[Timing, Timing]:
    model = Reference(load_checkpoint(DEFAULT_MODEL)).model
    ids = torch.randint(5, model.config.vocab_size, (1, PREFILL))
    with torch.inference_mode():
        cache = model(ids[:, :CONTEXT], use_cache=True).past_key_values

        def decode() -> None:
            for position in range(tokens):
                model(ids[:, position : position + 1], cache=cache, use_cache=True)

        (best,) = _best(decode)
        (whole,) = _best(lambda: model(ids))
        return (best[0] / tokens, best[1] / tokens), whole


def _best(*works: Callable[[], object]) -> list[Timing]:
    """Least wall and least CPU time of a few rounds of each, after one that warms up."""
    for work in works:
        work()
    walls: list[list[float]] = [[] for _ in works]
    cpus: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for work, wall, cpu in zip(works, walls, cpus):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            work()
            wall.append(time.perf_counter() - wall_start)
            cpu.append(time.process_time() - cpu_start)
    return [(min(wall), min(cpu)) for wall, cpu in zip(walls, cpus)]


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
