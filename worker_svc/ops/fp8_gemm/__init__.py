"""FP8 products of the GPU forward: E4M3 activations with a scale per 128 of K, E4M3 weights with one per 128x128 tile.

All scales are FP32 powers of two. On a CUDA device DeepGEMM multiplies, up to `SKINNY_ROWS` rows our own kernel; on the
CPU plain torch does, on the same layouts. In deterministic mode (`ops.invariant`) one serves all numbers of rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from worker_svc import tuning
from worker_svc.ops import invariant, registry
from worker_svc.ops.fp8_gemm import ref
from worker_svc.ops.skinny_gemm import MAX_ROWS

BLOCK: Final = 128
SKINNY_ROWS: Final = 8
"""Up to so many rows our weight-streaming kernel runs; above, DeepGEMM's tiles are filled well enough.
`tuning` measures it anew."""
PARTS_ROWS: Final = 16
"""Up to so many rows `fp8_gemm_parts` and `fp8_grouped_parts` cut K. A whole step of 8 Flash layers on an H200, cut and
whole: 1.380 and 1.497 ms at 1 row, 2.447 and 2.556 at 8, 3.458 and 3.519 at 16, no difference at 32.
`tuning` measures it anew."""
MOST_PARTS, LEAST_K, MOST_PROGRAMS, PARTS_COLUMNS = 8, 512, 512, 64
"""How they cut it: in at most so many pieces of at least so much, unless columns alone make enough programs."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """codes E4M3 [T, K] contiguous; scale FP32 [T, K/128] with strides (1, T rounded up to 4)."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def empty(rows: int, width: int, device: torch.device) -> "Fp8Rows":
        """Room for quantised rows, in the layout that the products read without a copy."""
        padded = -(-rows // 4) * 4
        scale = torch.empty(width // BLOCK, padded, device=device).t()[:rows]
        return Fp8Rows(torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device), scale)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """codes E4M3 [..., N, K]; scale FP32 [..., N/128, K/128]."""

    codes: Tensor
    scale: Tensor


def fp8_gemm(x: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    """[T, K] times [N, K] transposed -> BF16 [T, N], FP32 sums."""
    assert x.codes.shape[1] == weight.codes.shape[1], (x.codes.shape, weight.codes.shape)
    chosen = _backend(x.codes)
    if chosen == "torch":
        return ref.fp8_gemm(x.codes, x.scale, weight.codes, weight.scale)
    if chosen == "triton":
        from worker_svc.ops.skinny_gemm import fp8

        out = torch.empty(x.codes.shape[0], weight.codes.shape[0], dtype=torch.bfloat16, device=x.codes.device)
        return fp8(x.codes, x.scale, weight.codes, weight.scale, out, tiled=invariant.on())
    from worker_svc.ops.fp8_gemm import deep_gemm

    return deep_gemm.fp8_gemm(x.codes, x.scale, weight.codes, weight.scale)


def fp8_gemm_parts(x: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    """As `fp8_gemm`, for a reader that adds up what is cut (`partial_sums`): BF16 [T, N] or FP32 [parts, T, N].

    Not for products beside others: the shared expert's, cut, took from the router what they gained.

    A few rows stream the weight, and what limits them is how many programs do: on an H200 a row times wo_b takes
    18.9 us by columns alone and 11.0 in 8 parts; its bytes alone 7.8.
    """
    parts = _parts(x.codes, weight.codes)
    if parts == 1:
        return fp8_gemm(x, weight)
    from worker_svc.ops.skinny_gemm import fp8

    out = torch.empty(parts, x.codes.shape[0], weight.codes.shape[0], device=x.codes.device)
    return fp8(x.codes, x.scale, weight.codes, weight.scale, out)


def _parts(codes: Tensor, weight: Tensor) -> int:
    """In how many pieces of K this product is cut; 1 wherever another kernel than ours may run."""
    ours = codes.is_cuda and not invariant.on() and registry.backend("fp8_gemm") == "deep_gemm"
    few = codes.shape[0] <= tuning.value("fp8_gemm.parts_rows", PARTS_ROWS)
    return cuts(weight.shape) if ours and few else 1


def cuts(shape: Sequence[int]) -> int:
    """Pieces of K of a weight [..., N, K] where rows are few."""
    *groups, columns, inner = shape
    programs = math.prod(groups) * -(-columns // PARTS_COLUMNS)
    for parts in range(MOST_PARTS, 1, -1):
        if inner % (parts * BLOCK) == 0 and inner >= parts * LEAST_K and programs * parts <= MOST_PROGRAMS:
            return parts
    return 1


def _backend(codes: Tensor) -> str:
    """Of a product with these rows: our kernel only while they are few, unless one has to serve all."""
    if not codes.is_cuda:
        return "torch"
    chosen, rows = registry.backend("fp8_gemm"), codes.shape[0]
    if invariant.on():
        return chosen
    if chosen == "triton":
        return chosen if rows <= MAX_ROWS else "torch"
    few = rows <= tuning.value("fp8_gemm.skinny_rows", SKINNY_ROWS)
    return "triton" if chosen == "deep_gemm" and few else chosen


def empty_groups(rows: int, groups: int, width: int, device: torch.device) -> Fp8Rows:
    """codes [T, G, K] contiguous, scale [T, G, K/128] stored group by group, T innermost, padded to 4."""
    padded = -(-rows // 4) * 4
    scale = torch.empty(groups, width // BLOCK, padded, device=device).permute(2, 0, 1)[:rows]
    return Fp8Rows(torch.empty(rows, groups, width, dtype=torch.float8_e4m3fn, device=device), scale)


def fp8_grouped(x: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    """Block-diagonal product (wo_a): x [T, G, K], weight [G, R, K] -> BF16 [T, G, R]."""
    assert x.codes.shape[1:] == (weight.codes.shape[0], weight.codes.shape[2]), (x.codes.shape, weight.codes.shape)
    chosen = _backend(x.codes)
    if chosen == "torch":
        return ref.fp8_grouped(x.codes, x.scale, weight.codes, weight.scale)
    if chosen == "triton":
        from worker_svc.ops.skinny_gemm import fp8_grouped as skinny

        shape = (x.codes.shape[0], *weight.codes.shape[:2])
        out = torch.empty(shape, dtype=torch.bfloat16, device=x.codes.device)
        return skinny(x.codes, x.scale, weight.codes, weight.scale, out, tiled=invariant.on())
    from worker_svc.ops.fp8_gemm import deep_gemm

    return deep_gemm.fp8_grouped(x.codes, x.scale, weight.codes, weight.scale)


def fp8_grouped_parts(x: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    """As `fp8_grouped`, cut as `fp8_gemm_parts` is: BF16 [T, G, R] or FP32 [parts, T, G, R]."""
    parts = _parts(x.codes, weight.codes)
    if parts == 1:
        return fp8_grouped(x, weight)
    from worker_svc.ops.skinny_gemm import fp8_grouped as skinny

    out = torch.empty(parts, x.codes.shape[0], *weight.codes.shape[:2], device=x.codes.device)
    return skinny(x.codes, x.scale, weight.codes, weight.scale, out)
