"""Discrete choices of a forward, taken from a reference on the CPU and imposed on the GPU's: experts and index entries.

Where two experts (or two entries) score alike, a rounding decides which is read, and everything behind it differs:
that is no error, yet it hides errors. Under the reference's choices the rest of the forward can be compared strictly;
how many choices the GPU would have made otherwise, and how close those were, is counted beside it.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from worker_svc.gpu.attention import Attention
from worker_svc.gpu.moe import MoE
from worker_svc.gpu.step import ChunkStep, DecodeStep, EntryArea
from worker_svc.model.indexer import Indexer
from worker_svc.model.moe import Router
from worker_svc.ops.bf16_gemm import bf16_gemm_parts
from worker_svc.ops.kv_rows import KERNEL_PAGE
from worker_svc.ops.matmul import matmul
from worker_svc.ops.partial_sums import added
from worker_svc.ops.query_heads import IndexQuery
from worker_svc.ops.topk_gate import gate_scores, select_hash


@dataclass(slots=True)
class Choices:
    """Of one row's forwards: what the reference chose by layer, and what the GPU did about it."""

    experts: dict[int, Tensor] = field(default_factory=dict)  # int64 [T, K]
    margins: dict[int, Tensor] = field(default_factory=dict)  # [T]: last chosen score less the best one left out
    entries: dict[int, list[list[int]]] = field(default_factory=dict)  # of every query, ascending
    tokens: int = 0
    tokens_differing: int = 0
    widest: float = 0.0
    entries_chosen: int = 0
    entries_differing: int = 0

    def forget(self) -> None:
        """Before the reference's next forward."""
        for kept in (self.experts, self.margins, self.entries):
            kept.clear()

    def take(self, other: "Choices") -> None:
        """What the reference chose last, and keep counting."""
        self.experts, self.margins, self.entries = other.experts, other.margins, other.entries

    def saw_experts(self, layer: int, found: Tensor) -> None:
        """The GPU's own choice int32 [T, K] beside the reference's."""
        wanted = self.experts[layer]
        other = (found[: len(wanted)].cpu().long().sort(1).values != wanted.sort(1).values).any(1)
        self.tokens += len(wanted)
        self.tokens_differing += int(other.sum())
        if bool(other.any()):
            self.widest = max(self.widest, float(self.margins[layer][other].max()))

    def saw_entries(self, layer: int, found: list[set[int]]) -> None:
        """The GPU's own entries of every query beside the reference's."""
        for mine, theirs in zip(found, self.entries[layer]):
            self.entries_chosen += len(theirs)
            self.entries_differing += len(set(theirs) - mine)

    def summary(self) -> dict[str, float]:
        """Shares that differ, and the widest margin of a choice that differed."""
        return {
            "experts_differing": self.tokens_differing / max(1, self.tokens),
            "widest_margin": self.widest,
            "entries_differing": self.entries_differing / max(1, self.entries_chosen),
        }


@contextmanager
def recorded(cpu: Any, choices: Choices) -> Iterator[None]:
    """Forwards of the CPU model leave their choices."""
    routers = {id(block.ffn.router): layer for layer, block in enumerate(cpu.blocks)}
    indexers = {id(block.attn.indexer): layer for layer, block in enumerate(cpu.blocks) if block.attn.indexer}
    route, choose = Router.__call__, Indexer.select

    def routed(self: Router, x: Tensor, ids: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
        experts, weights = route(self, x, ids, deterministic)
        layer = routers[id(self)]
        choices.experts[layer] = experts
        choices.margins[layer] = _margins(matmul(x, self.weight_t), self.bias, self.k)
        return experts, weights

    def chosen(self: Indexer, *args: Any) -> Tensor:
        allowed = choose(self, *args)
        choices.entries[indexers[id(self)]] = [row.nonzero()[:, 0].tolist() for row in allowed]
        return allowed

    with _patched(Router, "__call__", routed), _patched(Indexer, "select", chosen):
        yield


@contextmanager
def recorded_rows(model: Any, choices: Choices, pages: list[int]) -> Iterator[None]:
    """The same of a GPU forward that runs on CPU tensors, one row in `pages`."""
    layers = _layers(model)
    route, choose, choose_chunk = MoE._route, Attention._select, Attention._select_workspace

    def routed(self: MoE, y: Tensor, step: DecodeStep | ChunkStep) -> tuple[Tensor, Tensor]:
        ids, weights = route(self, y, step)
        layer, live = layers[id(self)], int((step.positions >= 0).sum())
        choices.experts[layer] = ids[:live].long()
        logits = bf16_gemm_parts(y, self.weights.gate)
        logits = added(logits, 2)
        choices.margins[layer] = _margins(logits[:live], self.weights.bias, ids.shape[1])
        return ids, weights

    def chosen(self: Attention, index: IndexQuery, step: DecodeStep, pools: Any) -> Tensor:
        rows = choose(self, index, step, pools)
        choices.entries[layers[id(self)]] = [_of_rows(rows[0].tolist(), pages)]
        return rows

    def chosen_chunk(self: Attention, index: IndexQuery, step: ChunkStep, pools: Any, area: EntryArea) -> None:
        choose_chunk(self, index, step, pools, area)
        choices.entries[layers[id(self)]] = _of_lists(_chunk_lists(self, step).tolist(), area)

    with (
        _patched(MoE, "_route", routed),
        _patched(Attention, "_select", chosen),
        _patched(Attention, "_select_workspace", chosen_chunk),
    ):
        yield


@contextmanager
def imposed(model: Any, choices: Choices, pages: list[int]) -> Iterator[None]:
    """Forwards of the GPU model (one row in `pages`, outside graphs) read what the reference chose."""
    layers = _layers(model)
    route, choose, choose_chunk = MoE._route, Attention._select, Attention._select_workspace

    def routed(self: MoE, y: Tensor, step: DecodeStep | ChunkStep) -> tuple[Tensor, Tensor]:
        ids, weights = route(self, y, step)
        layer = layers[id(self)]
        choices.saw_experts(layer, ids)
        table = torch.zeros_like(ids)
        table[: len(choices.experts[layer])] = choices.experts[layer].to(ids)
        numbers = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        logits, factor = bf16_gemm_parts(y, self.weights.gate), self.config.routed_scaling_factor
        select_hash(logits, table, numbers, ids, weights, factor, positions=step.positions)
        return ids, weights

    def chosen(self: Attention, index: IndexQuery, step: DecodeStep, pools: Any) -> Tensor:
        rows, layer = choose(self, index, step, pools), layers[id(self)]
        if layer not in choices.entries:
            return rows
        choices.saw_entries(layer, [set(_of_rows(rows[0].tolist(), pages))])
        to = [pages[entry // KERNEL_PAGE] * KERNEL_PAGE + entry % KERNEL_PAGE for entry in choices.entries[layer][0]]
        rows = rows.clone()
        rows[0] = torch.tensor(to + [-1] * (rows.shape[1] - len(to)), dtype=torch.int32)
        return rows

    def chosen_chunk(self: Attention, index: IndexQuery, step: ChunkStep, pools: Any, area: EntryArea) -> None:
        choose_chunk(self, index, step, pools, area)
        layer = layers[id(self)]
        if layer in choices.entries:
            lists = _chunk_lists(self, step)
            choices.saw_entries(layer, [set(row) for row in _of_lists(lists.tolist(), area)])
            rows = [[n + at for n in row] for row, at in zip(choices.entries[layer], area.base.tolist())]
            lists.copy_(torch.tensor([row + [-1] * (lists.shape[1] - len(row)) for row in rows], dtype=torch.int32))

    with (
        _patched(MoE, "_route", routed),
        _patched(Attention, "_select", chosen),
        _patched(Attention, "_select_workspace", chosen_chunk),
    ):
        yield


def _layers(model: Any) -> dict[int, int]:
    return {id(part): layer for layer, block in enumerate(model.blocks) for part in (block.attn, block.ffn)}


def _margins(logits: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """By how much the last chosen expert's score leads; infinite where a table chooses."""
    if bias is None:
        return torch.full((len(logits),), torch.inf)
    best = (gate_scores(logits.clone()) + bias).topk(k + 1, dim=1).values
    return best[:, -2] - best[:, -1]


def _of_rows(rows: list[int], pages: list[int]) -> list[int]:
    """Entries of a sequence that pool rows hold."""
    number = {page: at for at, page in enumerate(pages)}
    return [number[row // KERNEL_PAGE] * KERNEL_PAGE + row % KERNEL_PAGE for row in rows if row >= 0]


def _of_lists(lists: list[list[int]], area: EntryArea) -> list[list[int]]:
    return [[n - at for n in row if n >= 0] for row, at in zip(lists, area.base.tolist())]


def _chunk_lists(attention: Attention, step: ChunkStep) -> Tensor:
    """The part of the C4 lists that the indexer fills, int32 [T, k]."""
    window = step.lists.window_index.shape[1]
    return step.lists.c4_index[:, window : window + attention.config.index_topk]


@contextmanager
def _patched(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, plain)
