"""Tokens grouped by expert for grouped products: the slots of each expert, padded to blocks of one size.

A slot is (token t, choice k), numbered t * K + k; an expert's slots stand in ascending order. Everything has its
worst-case size, and the true one is a number on the device, so the launch can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.expert_sort import ref


@dataclass(frozen=True, slots=True)
class Sorted:
    """Slots by expert. Behind num_padded[0] the first two arrays hold anything.

    slots int32 [capacity]: slot numbers, the number of slots itself where a block is padded; experts int32
    [capacity / block]: the expert of each block; num_padded int32 [1]; layout int32 [E + 1]: where each expert's slots
    start when they stand without padding; counts int32 [chunks, E]: work space.
    """

    slots: Tensor
    experts: Tensor
    num_padded: Tensor
    layout: Tensor
    counts: Tensor
    block: int


def capacity(slots: int, experts: int, block: int) -> int:
    """Padded slots in the worst case, a multiple of block: every expert that is hit ends with one slot in a block."""
    hit = min(slots, experts)
    worst = slots + hit * (block - 1)
    return -(-worst // block) * block


def allocate(tokens: int, k: int, experts: int, block: int, device: torch.device | str) -> Sorted:
    """Outputs for `sort_slots` of ids [tokens, k]."""
    size = capacity(tokens * k, experts, block)
    chunks = -(-tokens * k // ref.CHUNK)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Sorted(ints(size), ints(size // block), ints(1), ints(experts + 1), ints(max(chunks, 1), experts), block)


def sort_slots(ids: Tensor, out: Sorted) -> None:
    """ids int32 [T, K] contiguous, distinct in a row; -1 (padding tokens) goes nowhere. Fills `out`."""
    assert ids.dtype == torch.int32 and ids.dim() == 2 and ids.is_contiguous(), (ids.dtype, ids.shape)
    assert out.slots.numel() >= capacity(ids.numel(), out.layout.numel() - 1, out.block), "allocated for fewer tokens"
    if registry.on_kernel("expert_sort", ids.is_cuda):
        from worker_svc.ops.expert_sort import triton

        triton.sort_slots(ids, out.slots, out.experts, out.num_padded, out.layout, out.counts, out.block)
    else:
        ref.sort_slots(ids, out.slots, out.experts, out.num_padded, out.layout, out.block)
