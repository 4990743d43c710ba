"""Attention over numbered rows in plain torch, FP32: one token's keys are gathered, then `ref.sparse_attention`."""

import torch
from torch import Tensor

from worker_svc.ops.kv_rows.ref import read_rows
from worker_svc.ops.sparse_attention.ref import sparse_attention


def decode_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """See the door."""
    out = torch.zeros_like(q)
    for token in range(q.shape[0]):
        keys = [read_rows(window, _counted(window_rows, window_len, token))]
        if entries is not None and entry_rows is not None and entry_len is not None:
            keys.append(read_rows(entries, _counted(entry_rows, entry_len, token)))
        out[token] = _attend(q[token], torch.cat(keys), sink, scale)
    return out


def chunk_attention(q: Tensor, keys: Tensor, index: Tensor, sink: Tensor, scale: float) -> Tensor:
    """See the door."""
    out = torch.zeros_like(q)
    for token in range(q.shape[0]):
        listed = index[token]
        out[token] = _attend(q[token], keys[listed[listed >= 0].long()], sink, scale)
    return out


def _counted(rows: Tensor, length: Tensor, token: int) -> Tensor:
    listed = rows[token, : int(length[token])]
    return listed[listed >= 0]


def _attend(q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
    if not len(keys):
        return torch.zeros_like(q)
    return sparse_attention(q.float().unsqueeze(0), keys.float(), None, sink, scale)[0].to(q.dtype)
