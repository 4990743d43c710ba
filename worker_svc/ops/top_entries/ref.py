"""Selection in plain torch, on top of the indexer's own threshold rule."""

import torch
from torch import Tensor

from worker_svc.ops.index_scores import select_entries


def top_rows(scores: Tensor, lengths: Tensor, slots: Tensor, block_table: Tensor, out: Tensor) -> None:
    """See the door."""
    chosen = _chosen(scores, lengths, out.shape[1])
    entry = chosen.clamp(min=0).long()
    page = (entry // 64).clamp(max=block_table.shape[1] - 1)
    rows = block_table[slots.clamp(min=0).long()].gather(1, page) * 64 + entry % 64
    out.copy_(torch.where(chosen >= 0, rows, -1))


def top_entries(scores: Tensor, lengths: Tensor, base: Tensor, out: Tensor) -> None:
    """See the door."""
    chosen = _chosen(scores, lengths, out.shape[1])
    out.copy_(torch.where(chosen >= 0, chosen + base.unsqueeze(1), -1))


def _chosen(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """int64 [T, k] chosen entries ascending, -1 behind them."""
    width = max(scores.shape[1], k)
    entry = torch.arange(width)
    sees_all = (lengths <= k).unsqueeze(1)
    known = torch.nn.functional.pad(scores, (0, width - scores.shape[1]))
    known = known.masked_fill(sees_all | (entry >= lengths.unsqueeze(1)), 0.0)
    taken = select_entries(known, lengths.clamp(min=0).long(), k)
    taken = torch.where(sees_all, entry < lengths.unsqueeze(1), taken)
    return (
        torch.where(taken, entry, width)
        .sort(dim=1)
        .values[:, :k]
        .where(torch.arange(k) < taken.sum(1, keepdim=True), torch.tensor(-1))
    )
