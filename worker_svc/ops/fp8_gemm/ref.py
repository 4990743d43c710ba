"""FP8 products in plain torch: dequantise exactly, multiply in FP32, round the result to BF16 once."""

import torch
from torch import Tensor

from worker_svc.ops import invariant
from worker_svc.ops.matmul import matmul

BLOCK = 128


def fp8_gemm(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See the door."""
    rows, tiles = dequantise_rows(codes, scale), dequantise_tiles(weight, weight_scale)
    return matmul(rows, tiles.t(), deterministic=invariant.on()).bfloat16()


def fp8_grouped(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See the door."""
    rows, tiles = dequantise_rows(codes, scale), dequantise_tiles(weight, weight_scale)
    if invariant.on():
        groups = [matmul(rows[:, g], tiles[g].t(), deterministic=True) for g in range(len(tiles))]
        return torch.stack(groups, 1).bfloat16()
    return torch.einsum("tgk,grk->tgr", rows, tiles).bfloat16()


def dequantise_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """FP32 [..., K] of codes [..., K] and scales [..., K/128]."""
    return codes.float() * scale.repeat_interleave(BLOCK, -1)


def dequantise_tiles(codes: Tensor, scale: Tensor) -> Tensor:
    """FP32 [..., N, K] of codes [..., N, K] and scales [..., N/128, K/128]."""
    return codes.float() * scale.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
