"""Products of a few rows with a large weight: streaming the weight once is all the work, and what these are built for.

Up to MAX_ROWS rows; above, a general GEMM wins. CPU tensors run plain torch on the same layouts. All write `out`.
`tiled` products take any number of rows, MAX_ROWS to a program even if there is one: a row's sums are then always the
same (see `ops.invariant`), and large steps read the weight from cache many times.
"""

from __future__ import annotations

from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.skinny_gemm import ref

MAX_ROWS = 64


def fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor, *, tiled: bool = False
) -> Tensor:
    """codes E4M3 [M, K], scale FP32 [M, K / 128] of any strides, weight E4M3 [N, K], its scale FP32 [N / 128, K / 128]

    -> out BF16 or FP32 [M, N], or FP32 [parts, M, N]: partial sums over K, as in `bf16`. Returned.
    """
    grouped = (codes.unsqueeze(1), scale.unsqueeze(1), weight.unsqueeze(0), weight_scale.unsqueeze(0))
    return fp8_grouped(*grouped, out.unsqueeze(-2), tiled=tiled).squeeze(-2)


def fp8_grouped(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor, *, tiled: bool = False
) -> Tensor:
    """Block-diagonal: codes E4M3 [M, G, K], scale FP32 [M, G, K / 128], weight E4M3 [G, N, K], its scale [G, N / 128,
    K / 128] -> out [M, G, N] or FP32 [parts, M, G, N], returned."""
    rows, groups, inner = codes.shape
    assert (tiled or rows <= MAX_ROWS) and inner % 128 == 0, codes.shape
    assert weight.shape == (groups, out.shape[-1], inner) and weight.is_contiguous(), (weight.shape, codes.shape)
    assert scale.shape == (rows, groups, inner // 128) and out.shape[-3:-1] == (rows, groups), (scale.shape, out.shape)
    assert weight_scale.shape == (groups, -(-out.shape[-1] // 128), inner // 128) and weight_scale.is_contiguous()
    assert out.dim() == 3 or inner % (128 * out.shape[0]) == 0, (out.shape, inner)
    if registry.on_kernel("skinny_gemm", codes.is_cuda):
        from worker_svc.ops.skinny_gemm import triton

        triton.fp8_grouped(codes, scale, weight, weight_scale, out, tiled=tiled)
    else:
        ref.fp8_grouped(codes, scale, weight, weight_scale, out)
    return out


def bf16(x: Tensor, weight: Tensor, out: Tensor, *, tiled: bool = False) -> Tensor:
    """x BF16 [M, K], weight BF16 [N, K] -> out BF16 or FP32 [M, N], or FP32 [parts, M, N]: partial sums over K.

    With `parts` a narrow weight is read by more programs; the reader of the result adds the parts up. Returns out.
    """
    rows, inner = x.shape
    assert (tiled or rows <= MAX_ROWS) and x.stride(1) == 1 and weight.shape == (out.shape[-1], inner), (
        x.shape,
        weight.shape,
    )
    assert weight.is_contiguous() and out.is_contiguous() and out.shape[-2] == rows, (out.shape, x.shape)
    if registry.on_kernel("skinny_gemm", x.is_cuda):
        from worker_svc.ops.skinny_gemm import triton

        triton.bf16(x, weight, out, tiled=tiled)
    else:
        ref.bf16(x, weight, out)
    return out
