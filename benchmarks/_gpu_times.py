"""Step times of the GPU forward: graphs replayed on the device, the executor's own loop around them, whole prompts."""
# mypy: disallow-untyped-calls=False

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from benchmarks._gpu_model import Bench
from meshkit.types import SamplingParams
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.gpu.graphs import Bucket, DecodeGraphs
from worker_svc.gpu.moe import MoE
from worker_svc.gpu.step import ChunkStep, DecodeStep
from worker_svc.gpu.transformer import Transformer
from worker_svc.ops.slot_step import Field

FOREVER = 1 << 30


def device_ms(call: Callable[[], None], count: int) -> float:
    """Median milliseconds of a call on the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)))


def start_rows(bench: Bench, batch: int, context: int, seed: int = 5) -> list[RowWork]:
    """Slots 0 .. batch - 1 stand at `context` with a random next token; their decode rows."""
    params = SamplingParams(temperature=0.0, max_tokens=FOREVER)
    inits = tuple(
        SlotInit(slot=slot, params=params, seed=slot, choice=0, n_emitted=0, start=context) for slot in range(batch)
    )
    fields = bench.executor.slots.tables.fields
    bench.executor.collect(bench.executor.launch(StepWork(inits=inits)))
    ids = np.random.default_rng(seed).integers(3, bench.config.vocab_size, batch).astype(np.int32)
    fields[Field.NEXT, :batch] = torch.from_numpy(ids).to(fields.device)
    return [RowWork(slot=slot, pages=bench.pages_of(slot)) for slot in range(batch)]


def decode_graph_ms(bench: Bench, batch: int, context: int, steps: int) -> float:
    """Forward and sampling of one step, graphs replayed back to back."""
    rows = start_rows(bench, batch, context)
    executor = bench.executor
    for _ in range(3):
        executor.collect(executor.launch(StepWork(rows=tuple(rows))))
    bucket = executor.graphs.bucket(next(size for size in executor.buckets if size >= batch))

    def step() -> None:
        executor.graphs.forward(bucket)
        executor.graphs.sample(bucket)

    return device_ms(step, steps)


def decode_loop_ms(bench: Bench, batch: int, context: int, steps: int) -> float:
    """The executor's launch and collect, two steps in flight, by the wall clock."""
    work = StepWork(rows=tuple(start_rows(bench, batch, context)))
    executor = bench.executor
    for _ in range(3):
        executor.collect(executor.launch(work))
    flights = [executor.launch(work)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        flights.append(executor.launch(work))
        executor.collect(flights.pop(0))
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def prompt_work(bench: Bench, tokens: int) -> StepWork:
    """One prompt in one chunk from an empty context, its last token sampled."""
    ids = tuple(np.random.default_rng(7).integers(3, bench.config.vocab_size, tokens).tolist())
    params = SamplingParams(temperature=0.0, max_tokens=8)
    init = SlotInit(slot=0, params=params, seed=1, choice=0, n_emitted=0)
    return StepWork(inits=(init,), rows=(RowWork(slot=0, ids=ids, pages=bench.pages_of(0)),))


def prefill_ms(bench: Bench, tokens: int, rounds: int = 3) -> tuple[float, float]:
    """One prompt from an empty context in one step, first token sampled: the median of some rounds.

    Also how long the launch took the host.
    """
    work = prompt_work(bench, tokens)
    bench.executor.run(work)
    times, launches = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        flight = bench.executor.launch(work)
        launches.append((time.perf_counter() - begin) * 1e3)
        bench.executor.collect(flight)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), statistics.median(launches)


@contextmanager
def routing_seen(model: Transformer) -> Iterator[list[Tensor]]:
    """Collect the experts int32 [T, K] of every layer of forwards that run meanwhile (not of graph replays)."""
    seen: list[Tensor] = []
    plain = MoE._route

    def watched(self: MoE, y: Tensor, step: DecodeStep | ChunkStep) -> tuple[Tensor, Tensor]:
        ids, weights = plain(self, y, step)
        seen.append(ids)
        return ids, weights

    MoE._route = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        MoE._route = plain  # type: ignore[method-assign]


def distinct_experts(bench: Bench, batch: int, context: int) -> list[int]:
    """Distinct experts of each layer in a decode step, counted in a step outside the graphs."""
    rows = start_rows(bench, batch, context)
    executor = bench.executor
    direct = DecodeGraphs(executor.model, bench.pools, executor.slots.tables, executor._draw, on=False)
    bucket = direct.bucket(batch)
    bucket.rows.copy_(torch.tensor([row.slot for row in rows], dtype=torch.int32))
    executor.slots.take_pages(rows)
    with torch.inference_mode(), routing_seen(executor.model) as seen:
        direct.forward(bucket)
    return [int(ids[ids >= 0].unique().numel()) for ids in seen]


def layers_ms(bench: Bench, layers: Sequence[int], batch: int, context: int, steps: int) -> float:
    """A step's forward through these layers alone, with embedding and head, as a graph."""
    executor, model = bench.executor, bench.executor.model
    part = _Part(model, layers)
    graphs = DecodeGraphs(part, bench.pools, executor.slots.tables, executor._draw, on=True)
    rows = start_rows(bench, batch, context)
    executor.slots.take_pages(rows)
    with torch.inference_mode():
        bucket: Bucket = graphs.bucket(batch)
        bucket.rows.copy_(torch.tensor([row.slot for row in rows], dtype=torch.int32))

        def step() -> None:
            graphs.forward(bucket)

        step()
        return device_ms(step, steps)


class _Part(Transformer):
    """A transformer cut to some of its layers."""

    def __init__(self, whole: Transformer, layers: Sequence[int]) -> None:
        self.weights, self.config, self.pools = whole.weights, whole.config, whole.pools
        self.rules, self.workspace = whole.rules, whole.workspace
        self.blocks = [whole.blocks[layer] for layer in layers]
        self.layer_pools = [whole.layer_pools[layer] for layer in layers]
