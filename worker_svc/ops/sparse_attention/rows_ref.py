"""Attention over numbered rows in plain torch, FP32: one token's keys are gathered, then `ref.sparse_attention`.

`rounded_chunk_attention` is the same with the roundings of the Hopper library's prefill kernel, for comparisons.
"""

import torch
from torch import Tensor

from worker_svc.ops.kv_rows.ref import read_rows
from worker_svc.ops.sparse_attention.ref import KEY_BLOCK, sparse_attention


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


def rounded_chunk_attention(q: Tensor, keys: Tensor, index: Tensor, sink: Tensor, scale: float) -> Tensor:
    """`chunk_attention` with weights in BF16 where the Hopper library has them: blocks of 64 keys come in pairs, a
    weight is rounded relative to the highest score up to its block, and the first block's weights once more, relative
    to the highest of the pair, for the second half of the values. Sums and the denominator are FP32."""
    log2e = 1.4426950408889634
    listed = keys[index.clamp(min=0).long()].float()
    scores = torch.einsum("thd,tkd->thk", q.float(), listed) * (scale * log2e)
    scores = scores.masked_fill((index < 0).unsqueeze(1), -torch.inf)
    half = q.shape[2] // 2
    top = scores.new_full((*q.shape[:2], 1), -1e30)
    total = torch.zeros_like(top)
    left, right = scores.new_zeros(*q.shape[:2], half), scores.new_zeros(*q.shape[:2], half)
    for first in range(0, index.shape[1], 2 * KEY_BLOCK):
        a, b = (slice(first + n * KEY_BLOCK, first + (n + 1) * KEY_BLOCK) for n in range(2))
        middle = torch.maximum(top, scores[..., a].amax(2, keepdim=True))
        highest = torch.maximum(middle, scores[..., b].amax(2, keepdim=True))
        shrink = torch.exp2(middle - highest)
        early, late = torch.exp2(scores[..., a] - middle), torch.exp2(scores[..., b] - highest)
        left = (left * torch.exp2(top - middle) + _bf16(early) @ listed[:, a, :half]) * shrink
        left += _bf16(late) @ listed[:, b, :half]
        right = right * torch.exp2(top - highest) + _bf16(late) @ listed[:, b, half:]
        right += _bf16(early * shrink) @ listed[:, a, half:]
        total = total * torch.exp2(top - highest) + early.sum(2, keepdim=True) * shrink + late.sum(2, keepdim=True)
        top = highest
    share = torch.where(total > 0, 1 / (total + torch.exp2(sink.view(1, -1, 1) * log2e - top)), 0)
    return (torch.cat([left, right], 2) * share).to(q.dtype)


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _counted(rows: Tensor, length: Tensor, token: int) -> Tensor:
    listed = rows[token, : int(length[token])]
    return listed[listed >= 0]


def _attend(q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
    if not len(keys):
        return torch.zeros_like(q)
    return sparse_attention(q.float().unsqueeze(0), keys.float(), None, sink, scale)[0].to(q.dtype)
