"""Indexer scores over pooled or gathered FP8 keys in plain torch, FP32."""

import torch
from torch import Tensor

from worker_svc.ops import invariant
from worker_svc.ops.index_scores.ref import blocked_scores
from worker_svc.ops.kv_rows import INDEX_DIM, gather_index_rows
from worker_svc.ops.step_lists.ref import entry_rows


def paged_scores(
    codes: Tensor, folded: Tensor, keys: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, most: int
) -> Tensor:
    """See the door."""
    entry = torch.arange(most, dtype=torch.int32, device=codes.device).expand(codes.shape[0], -1)
    rows = entry_rows(table, slots.clamp(min=0).long(), entry, 4)
    rows = torch.where(entry < lengths.unsqueeze(1), rows, -1)
    logits = torch.zeros(codes.shape[0], most, device=codes.device)
    for token in range(codes.shape[0]):
        gathered = torch.empty(most, INDEX_DIM, dtype=torch.float8_e4m3fn, device=codes.device)
        scale = torch.empty(most, device=codes.device)
        gather_index_rows(keys, rows[token].contiguous(), gathered, scale)
        logits[token] = _scores(codes[token], folded[token], gathered, scale)
    return logits


def ragged_scores(
    codes: Tensor, folded: Tensor, keys: Tensor, key_scale: Tensor, first: Tensor, last: Tensor, most: int
) -> Tensor:
    """See the door."""
    logits = torch.zeros(codes.shape[0], most, device=codes.device)
    for token in range(codes.shape[0]):
        met = slice(int(first[token]), int(last[token]))
        scores = _scores(codes[token], folded[token], keys[met], key_scale[met])
        logits[token, : scores.shape[0]] = scores
    return logits


def _scores(codes: Tensor, folded: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """codes [h, 128], folded [h], keys [n, 128], scale [n] -> [n]; the key's scale is positive: it passes the relu."""
    if invariant.on():
        return blocked_scores(codes.float().unsqueeze(0), keys.float(), folded.unsqueeze(0))[0] * scale
    return folded @ (codes.float() @ keys.float().t()).relu() * scale
