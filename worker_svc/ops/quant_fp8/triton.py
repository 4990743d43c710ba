"""Row quantisation in Triton: one program per row and piece of 128-wide blocks, scales stored wherever asked."""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.partial_sums import parts_of
from worker_svc.ops.triton_numbers import pow2_scale, scaled_e4m3
from worker_svc.ops.triton_rows import added


def quantise_rows(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """See the door."""
    rows, width = codes.shape
    if rows == 0:
        return
    blocks = triton.cdiv(width, 128)
    piece = min(triton.next_power_of_2(blocks), 8 if rows < 128 else 32)
    _quantise_rows[(rows, triton.cdiv(blocks, piece))](
        x,
        codes,
        scale,
        x.stride(-2),
        x.stride(0) if x.dim() == 3 else 0,
        *scale.stride(),
        WIDTH=width,
        BLOCKS=piece,
        PARTS=parts_of(x, 2),
        num_warps=min(piece, 8),
    )


@chained
@triton.jit(do_not_specialize=["scale_row", "scale_block"])
def _quantise_rows(
    x_ptr, codes_ptr, scale_ptr, x_row, x_part, scale_row, scale_block,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    after_others()
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    d = b[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = added(x_ptr + row * x_row + d, x_part, d < WIDTH, PARTS)
    scale = pow2_scale(tl.max(tl.abs(x), axis=1))
    tl.store(codes_ptr + row * WIDTH + d, scaled_e4m3(x, scale[:, None]), mask=d < WIDTH)
    tl.store(scale_ptr + row * scale_row + b * scale_block, scale, mask=b * 128 < WIDTH)
