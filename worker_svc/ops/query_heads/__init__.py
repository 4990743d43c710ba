"""Query heads after their projection: RMS over each head, rotary turn; and the indexer's queries from the same product.

One launch on a GPU. Heads are normalised without a weight and rotated at the token's position. Indexer queries are
rotated (no norm), Hadamard-transformed and quantised to FP8; their scales are powers of two and go into the head
weights together with e^-0.5 h^-0.5, so that scores are sums of w * relu(codes . key).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops.kv_rows import HEAD_DIM, INDEX_DIM
from worker_svc.ops.query_heads import ref

__all__ = ["IndexQuery", "query_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexQuery:
    """raw bf16 [T, h * 128] and weights FP32 [T, h] may be views with any row stride; codes e4m3 [T, H, 128] and folded
    FP32 [T, H] are outputs, H >= h: heads from h on are padding for kernels that want 32 or 64: zeros."""

    raw: Tensor
    weights: Tensor
    codes: Tensor
    folded: Tensor


def query_heads(
    q: Tensor,
    turns: Tensor,
    positions: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
    index: IndexQuery | None = None,
) -> Tensor:
    """q bf16 [T, H * 512] (any row stride) -> [T, H, 512], in place or into `out`; returns it.

    `out` BF16 or FP16, heads together, any token stride; it may be the memory of q itself, viewed as FP16.

    turns FP32 [positions, 32, 2]. The index outputs, if asked for, are filled too.
    """
    tokens, heads = positions.shape[0], q.shape[1] // HEAD_DIM
    assert q.shape == (tokens, heads * HEAD_DIM) and q.dtype == torch.bfloat16 and q.stride(1) == 1, q.shape
    assert turns.dtype == torch.float32 and turns.shape[1:] == (32, 2) and positions.dtype == torch.int32
    view = q.as_strided((tokens, heads, HEAD_DIM), (q.stride(0), HEAD_DIM, 1))
    target = view if out is None else out
    assert target.shape == view.shape and target.dtype in (torch.bfloat16, torch.float16), target.shape
    assert target.stride(2) == 1 and target.stride(1) == HEAD_DIM, target.stride()
    if index is not None:
        _check_index(index, tokens)
    if q.is_cuda:
        from worker_svc.ops.query_heads import triton

        triton.query_heads(view, turns, positions, target, eps=eps, index=index)
    else:
        ref.query_heads(view, turns, positions, target, eps, index)
    return target


def _check_index(index: IndexQuery, tokens: int) -> None:
    heads = index.weights.shape[1]
    assert index.raw.shape == (tokens, heads * INDEX_DIM) and index.raw.dtype == torch.bfloat16, index.raw.shape
    assert index.raw.stride(1) == 1 and index.weights.dtype == torch.float32 and index.weights.stride(1) == 1
    assert index.codes.shape[0] == tokens and index.codes.shape[1] >= heads and index.codes.shape[2] == INDEX_DIM
    assert index.codes.is_contiguous() and index.codes.dtype == torch.float8_e4m3fn
    assert index.folded.shape == index.codes.shape[:2] and index.folded.is_contiguous()
    assert index.folded.dtype == torch.float32
