"""Compiling before the first request what a step of any size may choose: product tiles, experts' tiles, row kernels.

Libraries choose a kernel by the number of rows, so a few warm-up prompts meet only some of them. Here every product of
the model runs at all the sizes at which its library could choose anew. With an empty cache that is a hundred compiles
of seconds each: `compile_products` spreads them over processes first.

    python -m worker_svc.gpu.ahead [[[GROUPS, N, K], ..], [ROWS, ..]]

is one of those processes.
"""
# mypy: disallow-untyped-calls=False

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS, SamplingParams
from worker_svc.core.work import RowWork, SlotInit, StepWork, TailWork
from worker_svc.gpu.executor import GpuExecutor
from worker_svc.gpu.weights import ModelWeights
from worker_svc.ops import registry
from worker_svc.ops.bf16_gemm import bf16_gemm, by_rows, deep_rows
from worker_svc.ops.fp8_gemm import Fp8Matrix, Fp8Rows, empty_groups, fp8_gemm, fp8_grouped

ROWS_STEP = 64
"""The product library tiles rows by this or a multiple, so only there can its choice change; below, at 16 and 32."""
WARM_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)
SAMPLED = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64)
"""Rows that sample together in a chunk step: the head and the sampler have other kernels for few, and for 16 n."""
MOST_JOBS = 16
JOB_LIMIT_S = 600.0

log = logging.getLogger(__name__)

Shape = tuple[int, int, int]
"""Of a product's weight: groups (0: an ordinary product), N, K."""


def compile_ahead(executor: GpuExecutor, step_tokens: int, *, covered: bool) -> None:
    """Every kernel choice of products and experts up to `step_tokens`; `covered`: the cache should have them all."""
    weights = executor.model.weights
    most = step_tokens + executor.pools.slots
    shapes = product_shapes(weights)
    if registry.backend("fp8_gemm") == "deep_gemm":
        sizes = product_rows(most)
        if not covered:
            compile_products(shapes, sizes)
        for shape in shapes:
            run_products(shape, sizes)
    if registry.backend("bf16_gemm") == "deep_gemm":
        for weight, largest in dense_weights(weights, most, executor.pools.slots):
            run_dense(weight, product_rows(min(largest, deep_rows()) if by_rows() else largest))
    k = executor.model.config.num_experts_per_tok
    weights.blocks[0].ffn.experts.prepare(expert_tokens(most, executor.buckets), k)


def product_shapes(weights: ModelWeights) -> list[Shape]:
    """Of all FP8 weights, each once."""
    found: dict[Shape, None] = {}
    for block in weights.blocks:
        attn, ffn = block.attn, block.ffn
        for matrix in (attn.inputs, attn.wq_b, attn.wo_a, attn.wo_b, ffn.shared_w13, ffn.shared_w2):
            *groups, n, k = matrix.codes.shape
            found[(groups[0] if groups else 0, n, k)] = None
    return list(found)


def dense_weights(weights: ModelWeights, most: int, sampled: int) -> list[tuple[Tensor, int]]:
    """One BF16 weight of each shape with the most rows that meet it: all tokens of a step, or the sampled ones."""
    found: dict[torch.Size, tuple[Tensor, int]] = {weights.head.shape: (weights.head, sampled)}
    for block in weights.blocks:
        for weight in (block.ffn.gate, block.attn.states):
            if weight is not None:
                found.setdefault(weight.shape, (weight, most))
    return list(found.values())


def run_dense(weight: Tensor, sizes: Iterable[int]) -> None:
    """One BF16 product at all these row counts, over zeros."""
    for rows in sorted(sizes, reverse=True):
        bf16_gemm(torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device), weight)


def product_rows(most: int) -> list[int]:
    """Row counts at which a product's tile could change."""
    return [16, 32, *range(ROWS_STEP, most + ROWS_STEP, ROWS_STEP)]


def expert_tokens(most: int, buckets: Iterable[int]) -> list[int]:
    """Token counts at which the experts' tiles could change: all small ones, then ever fewer."""
    steps = [*range(1, 65), *range(72, 513, 8), *range(544, 2049, 32), *range(2176, most, 128), most]
    return sorted({size for size in (*steps, *buckets) if size <= most})


def run_products(shape: Shape, sizes: Iterable[int]) -> None:
    """One product at all these row counts, over zeros: what matters is which kernel it takes.

    The largest first: the smaller then fit into the memory that it leaves cached.
    """
    device = torch.device("cuda")
    groups, n, k = shape
    outer = (groups,) if groups else ()
    weight = Fp8Matrix(
        torch.zeros(*outer, n, k, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones(*outer, -(-n // 128), -(-k // 128), device=device),
    )
    for rows in sorted(sizes, reverse=True):
        x = empty_groups(rows, groups, k, device) if groups else Fp8Rows.empty(rows, k, device)
        x.codes.view(torch.uint8).zero_()
        x.scale.fill_(1.0)
        (fp8_grouped if groups else fp8_gemm)(x, weight)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def compile_products(shapes: Sequence[Shape], sizes: Sequence[int]) -> None:
    """The same in processes of their own, each some sizes of one shape; they leave their kernels in the cache."""
    begin = time.perf_counter()
    small = [size for size in sizes if size <= 512]
    parts = [(shape, part) for shape in shapes for part in (small, sizes[len(small) :]) if part]
    with ThreadPoolExecutor(min(MOST_JOBS, os.cpu_count() or 1), thread_name_prefix="compile") as pool:
        failed = sum(pool.map(_in_process, parts))
    log.info("products compiled by %d processes in %.1f s", len(parts), time.perf_counter() - begin)
    if failed:
        log.warning("%d of them failed: what they lack compiles here", failed)


def _in_process(part: tuple[Shape, Sequence[int]]) -> bool:
    line = [sys.executable, "-m", "worker_svc.gpu.ahead", json.dumps([[part[0]], list(part[1])])]
    try:
        return subprocess.run(line, stdout=subprocess.DEVNULL, timeout=JOB_LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def warm_up(executor: GpuExecutor, step_tokens: int) -> None:
    """Steps that meet every row kernel: nothing compiles while serving."""
    for work in _steps(executor, step_tokens):
        executor.run(work)
    executor.warm_masks([rows for rows in SAMPLED if rows <= executor.pools.slots])


def _steps(executor: GpuExecutor, step_tokens: int) -> Iterator[StepWork]:
    """Prompts of all sizes, even and odd (kernels are compiled apart for numbers that 16 divides); many at once."""
    most = min(step_tokens, executor.info.max_context - 1)
    for tokens in sorted({min(size, most) - odd for size in (*WARM_SIZES, most) for odd in (0, 3)}):
        yield StepWork(inits=(_init(0),), rows=(_row(executor, 0, 0, tokens),))
    for count in SAMPLED:
        for each in (3, 24):
            if 1 < count <= executor.pools.slots and count * each <= step_tokens and count < executor.pools.pages:
                slots = range(count)
                rows = tuple(_row(executor, slot, 0, each) for slot in slots)
                yield StepWork(inits=tuple(_init(slot) for slot in slots), rows=rows)
    if most > PAGE_TOKENS + 40 and executor.info.max_context > 2 * PAGE_TOKENS:
        yield from _resumed(executor)


def _resumed(executor: GpuExecutor) -> Iterator[StepWork]:
    """A prompt in two chunks with a tail saved, taken up again from it; a spare tail filled by a decode step."""
    first = PAGE_TOKENS - 56
    yield StepWork(inits=(_init(0),), rows=(_row(executor, 0, 0, first),))
    yield StepWork(rows=(_row(executor, 0, first, 96),), saves=(TailWork(0, PAGE_TOKENS, 0),))
    for tokens in (40, 37, 64):
        yield StepWork(
            inits=(_init(0, start=PAGE_TOKENS),),
            tail_loads=(TailWork(0, PAGE_TOKENS, 0),),
            rows=(_row(executor, 0, PAGE_TOKENS, tokens),),
        )
    yield StepWork(inits=(_init(0, tokens=8),), rows=(_row(executor, 0, 0, PAGE_TOKENS - 1),))
    for _ in range(2):
        yield StepWork(rows=(RowWork(slot=0, pages=range(2), spare=0),))


def _init(slot: int, start: int = 0, tokens: int = 1) -> SlotInit:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    return SlotInit(slot=slot, params=params, seed=0, choice=0, n_emitted=0, start=start)


def _row(executor: GpuExecutor, slot: int, start: int, tokens: int) -> RowWork:
    ids = tuple(3 + at % (executor.info.vocab_size - 3) for at in range(tokens))
    pages = range(slot, slot + -(-(start + tokens) // PAGE_TOKENS))
    return RowWork(slot=slot, start=start, ids=ids, pages=pages)


if __name__ == "__main__":
    SHAPES, SIZES = json.loads(sys.argv[1])
    for SHAPE in SHAPES:
        run_products(tuple(SHAPE), SIZES)
