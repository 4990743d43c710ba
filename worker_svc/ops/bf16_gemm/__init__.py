"""BF16 products with FP32 results: router, compressor projections, output head. Nothing is rounded after the sum.

On a GPU cuBLAS, and our kernel for few rows; or, for all numbers of rows, the one that is pinned.
"""

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.bf16_gemm import ref

SKINNY_ROWS = 16
"""Up to so many rows our weight-streaming kernel runs; above, cuBLAS."""
PARTS = 8
"""Pieces of K in `bf16_gemm_parts`: a narrow weight is read by that many times more programs."""


def bf16_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """x BF16 [T, K], weight BF16 [N, K] -> FP32 [T, N]."""
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    if not x.is_cuda:
        return ref.bf16_gemm(x, weight)
    chosen = registry.backend("bf16_gemm")
    if chosen == "torch" and x.shape[0] > SKINNY_ROWS:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    out = torch.empty(x.shape[0], weight.shape[0], device=x.device)
    if chosen == "deep_gemm":
        from worker_svc.ops.fp8_gemm.deep_gemm import package

        package().bf16_gemm_nt(x, weight, out)
        return out
    from worker_svc.ops.skinny_gemm import bf16

    return bf16(x, weight, out, tiled=chosen == "triton")


def bf16_gemm_parts(x: Tensor, weight: Tensor) -> Tensor:
    """As `bf16_gemm` for narrow weights: FP32 [T, N], or [parts, T, N] that the reader adds up."""
    if not x.is_cuda or x.shape[0] > SKINNY_ROWS or registry.backend("bf16_gemm") != "torch":
        return bf16_gemm(x, weight)
    from worker_svc.ops.skinny_gemm import bf16

    return bf16(x, weight, torch.empty(PARTS, x.shape[0], weight.shape[0], device=x.device))
