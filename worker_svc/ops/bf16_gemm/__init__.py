"""BF16 products with FP32 results: router, compressor projections, output head. Nothing is rounded after the sum.

On a GPU by the number of rows: our kernel for few, DeepGEMM for some rows of wide weights (cuBLAS splits K there, which
costs a launch), else cuBLAS. A pin, or deterministic mode, takes one for all numbers of rows.
"""

import torch
from torch import Tensor

from worker_svc import tuning
from worker_svc.ops import invariant, registry
from worker_svc.ops.bf16_gemm import ref

SKINNY_ROWS = 16
"""Up to so many rows our weight-streaming kernel runs."""
DEEP_ROWS, DEEP_WIDTH = 64, 2048
"""From there up to so many rows DeepGEMM runs products with weights of at least so many rows. `tuning` measures both
numbers of rows anew."""
PARTS = 8
"""Pieces of K in `bf16_gemm_parts`: a narrow weight is read by that many times more programs."""


def bf16_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """x BF16 [T, K], weight BF16 [N, K] -> FP32 [T, N]."""
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    if not x.is_cuda:
        return ref.bf16_gemm(x, weight)
    chosen = _backend(x.shape[0], weight.shape[0])
    if chosen == "torch":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    out = torch.empty(x.shape[0], weight.shape[0], device=x.device)
    if chosen == "deep_gemm":
        from worker_svc.ops.fp8_gemm.deep_gemm import package

        package().bf16_gemm_nt(x, weight, out)
        return out
    from worker_svc.ops.skinny_gemm import bf16

    return bf16(x, weight, out, tiled=chosen == "triton")


def _backend(rows: int, outputs: int) -> str:
    """Of one product on a GPU; "skinny" for the kernel of few rows."""
    chosen = registry.backend("bf16_gemm")
    if not by_rows():
        return "skinny" if chosen == "torch" and rows <= SKINNY_ROWS else chosen
    if rows <= tuning.value("bf16_gemm.skinny_rows", SKINNY_ROWS):
        return "skinny"
    deep = chosen == "deep_gemm" and rows <= deep_rows() and outputs >= DEEP_WIDTH
    return "deep_gemm" if deep else "torch"


def deep_rows() -> int:
    """Up to so many rows DeepGEMM may run, where the number of rows decides."""
    return tuning.value("bf16_gemm.deep_rows", DEEP_ROWS)


def by_rows() -> bool:
    """True if the number of rows decides: neither pinned nor deterministic."""
    return not registry.pinned("bf16_gemm") and not invariant.on()


def bf16_gemm_parts(x: Tensor, weight: Tensor) -> Tensor:
    """As `bf16_gemm` for narrow weights: FP32 [T, N], or [parts, T, N] that the reader adds up."""
    if not x.is_cuda or _backend(x.shape[0], weight.shape[0]) != "skinny":
        return bf16_gemm(x, weight)
    from worker_svc.ops.skinny_gemm import bf16

    return bf16(x, weight, torch.empty(PARTS, x.shape[0], weight.shape[0], device=x.device))
