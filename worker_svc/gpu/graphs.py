"""Decode steps as CUDA graphs, one per batch bucket: a replay costs the host microseconds whatever the model's depth.

A bucket's tensors are fixed: the rows to run go in by copy, logits and streams come out in place. On the CPU, or with
graphs switched off, the same functions run directly.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.step import SlotTables, decode_step
from worker_svc.gpu.transformer import Transformer
from worker_svc.ops.slot_step import StepRows, begin_step, end_step
from worker_svc.ops.step_lists import DecodeLists

WARM_UPS = 2
"""Runs before a capture: kernels compile and libraries allocate their workspaces there."""


def buckets(most: int) -> list[int]:
    """Batch sizes that graphs are made for: close together where steps are short, up to `most`."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    sizes += list(range(320, most + 64, 64))
    return sorted({size for size in sizes if size < most} | {most})


Sampler = Callable[[Tensor, StepRows, Tensor, Tensor], None]
"""(logits [B, V], rows, tokens int32 [B], faults int32 [B]): fills the last two."""


@dataclass(slots=True)
class Batch:
    """Rows that sample together: where they stand, what is drawn int32 [B], logits FP32 [B, V], and what came of it."""

    at: StepRows
    drawn: Tensor
    faults: Tensor
    tokens: Tensor
    logits: Tensor


@dataclass(slots=True, kw_only=True)
class Bucket(Batch):
    """The fixed tensors of one batch size."""

    rows: Tensor
    lists: DecodeLists
    streams: Tensor
    graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None


class DecodeGraphs:
    """Runs the forward and the sampling of a bucket, captured or not."""

    def __init__(self, model: Transformer, pools: GpuPools, tables: SlotTables, sampler: Sampler, *, on: bool) -> None:
        self.model, self.pools, self.tables, self.sampler = model, pools, tables, sampler
        self.on = on and pools.device.type == "cuda"
        self._made: dict[int, Bucket] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.on else None

    def bucket(self, rows: int) -> Bucket:
        """The bucket of exactly `rows` rows; made, and captured, at its first use."""
        if rows not in self._made:
            self._made[rows] = self._make(rows)
        return self._made[rows]

    def forward(self, bucket: Bucket) -> None:
        """Fill the bucket's logits and streams for its rows."""
        if bucket.graphs is not None:
            bucket.graphs[0].replay()
        else:
            bucket.logits, bucket.streams = self._forward(bucket)

    def sample(self, bucket: Bucket) -> None:
        """Draw from the bucket's logits and move its slots on."""
        if bucket.graphs is not None:
            bucket.graphs[1].replay()
        else:
            self._sample(bucket)

    def _make(self, rows: int) -> Bucket:
        device, width = self.pools.device, self.tables.pages.shape[1]

        def column() -> Tensor:
            return torch.full((rows,), -1, dtype=torch.int32, device=device)

        nothing = torch.empty(0, device=device)
        top_k = self.model.config.index_topk
        bucket = Bucket(
            rows=column(),
            at=StepRows.empty(rows, device),
            lists=DecodeLists.allocate(rows, width * 256, device, top_k=top_k),
            drawn=column(),
            faults=column(),
            tokens=column(),
            logits=nothing,
            streams=nothing,
        )
        if self.on:
            self._capture(bucket)
        return bucket

    def _capture(self, bucket: Bucket) -> None:
        """All rows are padding meanwhile: nothing is written that anybody reads."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                bucket.logits, bucket.streams = self._forward(bucket)
                self._sample(bucket)
        torch.cuda.current_stream().wait_stream(side)
        forward, sample = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool):
            bucket.logits, bucket.streams = self._forward(bucket)
        with torch.cuda.graph(sample, pool=self._pool):
            self._sample(bucket)
        bucket.graphs = (forward, sample)

    def _forward(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        begin_step(bucket.rows, self.tables.fields, bucket.at)
        at = bucket.at
        step = decode_step(at.ids, at.slots, at.positions, self.tables, self.pools, bucket.lists)
        return self.model.forward(step)

    def _sample(self, bucket: Bucket) -> None:
        self.sampler(bucket.logits, bucket.at, bucket.drawn, bucket.faults)
        end_step(bucket.at, bucket.drawn, bucket.faults, self.tables.fields, bucket.tokens)
