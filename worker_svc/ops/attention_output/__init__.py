"""The attention output before its projection: turned back at the query's position and quantised to FP8 by groups."""

import torch
from torch import Tensor

from worker_svc.ops.attention_output import ref
from worker_svc.ops.kv_rows import HEAD_DIM

__all__ = ["attention_output", "scales"]

BLOCK = 128


def scales(tokens: int, groups: int, width: int, device: torch.device | str) -> Tensor:
    """FP32 [T, G, width / 128], column-major inside each group with columns of a multiple of 16 bytes: the layout that
    grouped FP8 products read without a transposing launch."""
    aligned = -(-tokens // 4) * 4
    return torch.empty(groups, width // BLOCK, aligned, dtype=torch.float32, device=device).permute(2, 0, 1)[:tokens]


def attention_output(o: Tensor, turns: Tensor, positions: Tensor, codes: Tensor, scale: Tensor) -> None:
    """o bf16 [T, H, 512] contiguous, turns FP32 [positions, 32, 2] -> codes e4m3 [T, G, H / G * 512] contiguous and
    scale FP32 [T, G, H / G * 4] (any strides), one per 128 values."""
    tokens, heads = o.shape[:2]
    groups = codes.shape[1]
    assert o.shape == (tokens, heads, HEAD_DIM) and o.dtype == torch.bfloat16 and o.is_contiguous(), o.shape
    assert heads % groups == 0 and codes.shape == (tokens, groups, heads // groups * HEAD_DIM), codes.shape
    assert codes.is_contiguous() and scale.shape == (tokens, groups, codes.shape[2] // BLOCK), scale.shape
    assert scale.dtype == turns.dtype == torch.float32 and turns.shape[1:] == (32, 2)
    assert positions.dtype == torch.int32 and positions.shape == (tokens,)
    if o.is_cuda:
        from worker_svc.ops.attention_output import triton

        triton.attention_output(o, turns, positions, codes, scale)
    else:
        ref.attention_output(o, turns, positions, codes, scale)
