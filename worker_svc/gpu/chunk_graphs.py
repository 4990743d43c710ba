"""Small prefill as CUDA graphs: a short prompt's forward costs the host one copy and one replay instead of hundreds of
launches, which take several times as long as its kernels.

A bucket of tokens has fixed tensors: ids and positions of up to ROWS rows, the window before each, and the entries of
contexts that no indexer has to choose from. Steps that fit no bucket, or save tails, run as they did. On the CPU, or
with graphs switched off, the same padded step runs directly.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.step import ChunkRow, ChunkStep, EntryArea, SlotTables, entry_rows, fill_chunk_lists
from worker_svc.gpu.transformer import Transformer
from worker_svc.ops.step_lists import ChunkLists

TOKENS: Final = (16, 32, 64, 128, 256)
"""Bucket sizes. A larger step keeps the device busy for longer than its launches take."""
ROWS: Final = 8
WARM_UPS: Final = 2
Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Bucket:
    """One size: `numbers` int32 holds everything about a step, `step` is made of views of it."""

    numbers: Tensor
    parts: dict[str, slice]
    step: ChunkStep
    logits: Tensor
    streams: Tensor
    graph: torch.cuda.CUDAGraph | None = None


class ChunkGraphs:
    """Runs small chunk steps; `on` says whether anybody should: without graphs, padding only costs."""

    def __init__(self, model: Transformer, pools: GpuPools, tables: SlotTables, *, on: bool) -> None:
        self.model, self.pools, self.tables = model, pools, tables
        self.on = self._captures = on and pools.device.type == "cuda"
        self.sizes = [size for size in TOKENS if size <= model.max_tokens]
        self.most_entries = self.model.config.index_topk
        self.ratios = sorted(set(pools.layout.ratios) - {0})
        self._made: dict[int, _Bucket] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def fits(self, rows: Sequence[ChunkRow]) -> bool:
        """Whether `forward` can run these rows: few, short, nothing saved, and every entry of theirs is read."""
        tokens, longest = sum(row.length for row in rows), max(row.end for row in rows)
        return (
            len(rows) <= ROWS
            and tokens <= max(self.sizes, default=0)
            and longest <= 4 * self.most_entries
            and not any(row.saves for row in rows)
        )

    def capture(self) -> None:
        """Make all graphs now, so that serving captures nothing."""
        if self.on:
            for size in reversed(self.sizes):
                self._bucket(size)

    def forward(self, ids: Ints, rows: Sequence[ChunkRow], sampled: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `Transformer.forward` of the step: logits of the sampled tokens, streams of all; valid until the next."""
        bucket = self._bucket(next(size for size in self.sizes if size >= len(ids)))
        numbers = torch.from_numpy(self._numbers(bucket, ids, rows, sampled))
        if self._captures:
            numbers = numbers.pin_memory()
        bucket.numbers.copy_(numbers, non_blocking=True)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.logits, bucket.streams = self._run(bucket)
        return bucket.logits[: len(sampled)], bucket.streams[: len(ids)]

    def _run(self, bucket: _Bucket) -> tuple[Tensor, Tensor]:
        fill_chunk_lists(bucket.step, self.pools)
        return self.model.forward(bucket.step)

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]

    def _make(self, size: int) -> _Bucket:
        window, device = self.pools.layout.window, self.pools.device
        lengths = dict.fromkeys(("ids", "slots", "positions", "first_token", "own_rows", "last_position"), size)
        lengths |= {"sampled": ROWS, "old_ring_rows": ROWS * window, "old_rows": ROWS * window}
        lengths |= {f"{name}{ratio}": size for ratio in self.ratios for name in ("base", "key_first")}
        lengths |= {f"pool_rows{ratio}": ROWS * self._entries(ratio) for ratio in self.ratios}
        ends = np.cumsum([0, *lengths.values()]).tolist()
        parts = {name: slice(*ends[i : i + 2]) for i, name in enumerate(lengths)}
        numbers = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        columns = {name: numbers[part] for name, part in parts.items()}
        areas = {
            ratio: EntryArea(
                columns[f"pool_rows{ratio}"],
                self._area(size),
                columns[f"base{ratio}"],
                columns[f"key_first{ratio}"],
                self._entries(ratio),
            )
            for ratio in self.ratios
        }
        names = ("ids", "slots", "positions", "first_token", "own_rows", "last_position", "sampled")
        step = ChunkStep(
            **{name: columns[name] for name in (*names, "old_ring_rows", "old_rows")},
            lists=ChunkLists.allocate(size, 4 * self.most_entries, device, top_k=self.most_entries),
            areas=areas,
            visible=np.zeros(size, dtype=np.int32),
            workspace_rows=self._area(size) + ROWS * max([self._entries(ratio) for ratio in self.ratios], default=0),
            window_saves=(),
            state_saves=(),
            tables=self.tables,
        )
        nothing = torch.empty(0, device=device)
        bucket = _Bucket(numbers, parts, step, nothing, nothing)
        numbers.copy_(torch.from_numpy(self._numbers(bucket, np.empty(0, np.int32), (), ())))
        if self._captures:
            self._capture(bucket)
        return bucket

    def _capture(self, bucket: _Bucket) -> None:
        """All tokens are padding meanwhile."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run(bucket)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            bucket.logits, bucket.streams = self._run(bucket)
        bucket.graph = graph

    def _entries(self, ratio: int) -> int:
        """Of the longest context that fits."""
        return 4 * self.most_entries // ratio

    def _area(self, size: int) -> int:
        """First workspace row of the entries: behind all windows, the tokens' own keys, and a row that nobody reads."""
        return ROWS * self.pools.layout.window + size + 1

    def _numbers(
        self, bucket: _Bucket, ids: Ints, rows: Sequence[ChunkRow], sampled: Sequence[int]
    ) -> npt.NDArray[np.int32]:
        """All columns of a step; what is padding stands at position -1, reads nothing, and is read by nobody."""
        numbers, parts = np.zeros(len(bucket.numbers), dtype=np.int32), bucket.parts
        column = {name: numbers[part] for name, part in parts.items()}
        size, window = len(column["ids"]), self.pools.layout.window
        column["positions"].fill(-1)
        column["old_ring_rows"].fill(-1)
        column["old_rows"].fill(self._area(size) - 1)
        for ratio in self.ratios:
            column[f"pool_rows{ratio}"].fill(-1)
        column["ids"][: len(ids)] = ids
        column["sampled"][: len(sampled)] = sampled
        token = base = old_place = 0
        entries = dict.fromkeys(self.ratios, 0)
        for row in rows:
            old = row.start - max(row.fresh_from, row.start - window, 0)
            here, before = slice(token, token + row.length), slice(old_place, old_place + old)
            column["slots"][here], column["first_token"][here] = row.slot, token
            column["positions"][here] = np.arange(row.start, row.end)
            column["last_position"][here] = row.end - 1
            column["own_rows"][here] = np.arange(base + old, base + old + row.length)
            column["old_ring_rows"][before] = row.slot * self.pools.ring + np.arange(row.start - old, row.start) % (
                self.pools.ring
            )
            column["old_rows"][before] = np.arange(base, base + old)
            for ratio in self.ratios:
                first = entries[ratio]
                found = entry_rows(row, ratio)
                column[f"pool_rows{ratio}"][first : first + len(found)] = found
                column[f"key_first{ratio}"][here] = first
                column[f"base{ratio}"][here] = self._area(size) + first
                entries[ratio] += len(found)
            token, base, old_place = token + row.length, base + old + row.length, old_place + old
        return numbers
