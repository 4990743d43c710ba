"""The k entries with the highest indexer scores, as rows of a pool or of a workspace.

Our kernel and the reference give them in ascending entry order, FlashInfer in its own; attention asks for none.
Among equal scores the lowest entry wins. A token that sees at most k entries gets all of them, and its scores are not
read; at and beyond a token's length nothing is read. Rows behind the chosen ones are -1.
"""

from types import ModuleType

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.top_entries import ref

__all__ = ["top_entries", "top_rows"]


def top_rows(scores: Tensor, lengths: Tensor, slots: Tensor, block_table: Tensor, out: Tensor) -> Tensor:
    """scores FP32 [T, n] (any row stride), lengths, slots int32 [T], block_table int32 [slots, max_pages], pages of 64
    entries -> out int32 [T, k] (any row stride): pool rows block_table[slot, i // 64] * 64 + i % 64. Returns out."""
    _check(scores, lengths, out)
    assert slots.dtype == block_table.dtype == torch.int32 and slots.shape == lengths.shape
    _backend(scores).top_rows(scores, lengths, slots, block_table, out)
    return out


def top_entries(scores: Tensor, lengths: Tensor, base: Tensor, out: Tensor) -> Tensor:
    """The same with row base[t] + i of a workspace; base int32 [T]. Returns out."""
    _check(scores, lengths, out)
    assert base.dtype == torch.int32 and base.shape == lengths.shape
    _backend(scores).top_entries(scores, lengths, base, out)
    return out


def _backend(scores: Tensor) -> ModuleType:
    if not scores.is_cuda:
        return ref
    if registry.backend("top_entries") == "flashinfer":
        from worker_svc.ops.top_entries import flashinfer

        return flashinfer
    from worker_svc.ops.top_entries import triton

    return triton


def _check(scores: Tensor, lengths: Tensor, out: Tensor) -> None:
    assert scores.dtype == torch.float32 and scores.dim() == 2 and scores.stride(1) == 1, (scores.dtype, scores.shape)
    assert lengths.dtype == out.dtype == torch.int32 and out.stride(1) == 1, (lengths.dtype, out.dtype)
    assert scores.shape[0] == lengths.shape[0] == out.shape[0], (scores.shape, lengths.shape, out.shape)
