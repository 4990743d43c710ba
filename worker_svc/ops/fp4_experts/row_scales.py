"""FP8 rows with one scale for the whole row, made of rows with a scale per 128 channels.

The tensor cores then add up a whole row without an FP32 step in between. Codes are the E4M3 codes that were, times the
power of two between their block's scale and the row's largest: exact, but for values below 2^-6 of the row's unit (its
largest lies between 224 and 448 units), which keep a precision of 2^-9 units. `fold` does it to rows that exist,
`folded_middle` to the experts' middle as it is quantised. Torch on the CPU, Triton on a GPU.
"""

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.swiglu_experts import ref as swiglu


def fold(codes: Tensor, scale: Tensor, out: Tensor, out_scale: Tensor) -> None:
    """codes E4M3 [R, W], scale FP32 [R, W / 128] powers of two -> out E4M3 [R, W], out_scale FP32 [R]."""
    assert codes.is_contiguous() and scale.is_contiguous() and out.is_contiguous() and out.shape == codes.shape
    assert scale.shape == (codes.shape[0], codes.shape[1] // 128) and out_scale.shape == codes.shape[:1], scale.shape
    if registry.on_kernel("swiglu_middle", codes.is_cuda):
        from worker_svc.ops.fp4_experts import triton

        triton.fold(codes, scale, out, out_scale)
    else:
        fold_ref(codes, scale, out, out_scale)


def folded_middle(hidden: Tensor, weights: Tensor, limit: float, codes: Tensor, scale: Tensor) -> None:
    """hidden BF16 [R, 2I] (gate, then up), weights FP32 [R] -> codes E4M3 [R, I], scale FP32 [R].

    As `swiglu_experts.middle` with its scale per 128, then `fold`.
    """
    rows, inner = codes.shape
    assert hidden.shape == (rows, 2 * inner) and hidden.is_contiguous() and codes.is_contiguous() and inner % 128 == 0
    assert weights.shape == scale.shape == (rows,), (weights.shape, scale.shape)
    if registry.on_kernel("swiglu_middle", hidden.is_cuda):
        from worker_svc.ops.fp4_experts import triton

        triton.folded_middle(hidden, weights, limit, codes, scale)
    else:
        middle_ref(hidden, weights, limit, codes, scale)


def fold_ref(codes: Tensor, scale: Tensor, out: Tensor, out_scale: Tensor) -> None:
    """`fold` in plain torch."""
    out_scale.copy_(scale.amax(1))
    blocks = codes.float().view(codes.shape[0], -1, 128) * (scale / out_scale[:, None])[..., None]
    out.copy_(blocks.flatten(1).to(torch.float8_e4m3fn))


def middle_ref(hidden: Tensor, weights: Tensor, limit: float, codes: Tensor, scale: Tensor) -> None:
    """`folded_middle` in plain torch."""
    blocks = torch.empty(codes.shape[0], codes.shape[1] // 128, device=codes.device)
    fine = torch.empty_like(codes)
    swiglu.middle(hidden, fine, blocks, weights, limit)
    fold_ref(fine, blocks, codes, scale)
