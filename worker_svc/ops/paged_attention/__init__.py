"""Decode attention whole: over numbered KV rows, with the sink, turned back and quantised for the output projection.

Two launches on a GPU: splits of the keys, then one pass that joins, turns and quantises. What
`ops.sparse_attention` and `ops.attention_output` do one after the other, without the BF16 output in between.
"""

import torch
from torch import Tensor

from worker_svc.ops.kv_rows import HEAD_DIM
from worker_svc.ops.paged_attention import ref

__all__ = ["paged_attention"]


def paged_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    sink: Tensor,
    scale: float,
    turns: Tensor,
    positions: Tensor,
    codes: Tensor,
    code_scale: Tensor,
) -> None:
    """q BF16 or FP16 [T, H, 512] (any token stride) over the pools' rows that the lists name (int32, -1 = none; the
    first window_len[t] and entry_len[t] count); sink FP32 [H]; turns FP32 [positions, 32, 2].

    Writes codes E4M3 [T, G, H / G * 512] and code_scale FP32 [T, G, H / G * 4] (any strides).
    """
    tokens, heads = q.shape[:2]
    assert q.shape == (tokens, heads, HEAD_DIM) and sink.shape == (heads,), (q.shape, sink.shape)
    assert q.dtype in (torch.bfloat16, torch.float16), q.dtype
    assert (entries is None) == (entry_rows is None) == (entry_len is None), "a pool comes with its lists"
    assert codes.is_contiguous() and codes.shape[2] * codes.shape[1] == heads * HEAD_DIM, codes.shape
    assert code_scale.shape == (tokens, codes.shape[1], codes.shape[2] // 128), code_scale.shape
    args = (q, window, window_rows, window_len, entries, entry_rows, entry_len, sink, scale)
    if q.is_cuda:
        from worker_svc.ops.paged_attention import triton

        triton.paged_attention(*args, turns, positions, codes, code_scale)
    else:
        ref.paged_attention(*args, turns, positions, codes, code_scale)
