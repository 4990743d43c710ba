"""Query latent and KV row in one launch: two programs per token, one for each.

The KV row is a tile of 8 blocks of 64 values, of which the last is the rotated one: a block maximum is a scale's.
Small and bound by launch and memory latency in decode; in prefill it reads its input and writes its output once.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.ops.kv_rows import BF16_PAGE_BYTES
from worker_svc.ops.launches import after_others, chained
from worker_svc.ops.partial_sums import parts_of
from worker_svc.ops.triton_numbers import pow2_scale
from worker_svc.ops.triton_rows import added, codes_of, inverse, rounded_row, store_row


@triton.jit
def _latent(
    row, part_stride, token, weight, codes, scale, scale_row, scale_column, eps,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    known = place < WIDTH
    x = added(row + place, part_stride, known, PARTS)
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) * (1.0 / WIDTH) + eps)
    y = x * inverse_rms * tl.load(weight + place, mask=known, other=0.0)
    factor = pow2_scale(tl.max(tl.abs(y), 1))
    tl.store(codes + token.to(tl.int64) * WIDTH + place, codes_of(y, inverse(factor)[:, None]), mask=known)
    target = scale + token.to(tl.int64) * scale_row + block.to(tl.int64) * scale_column
    tl.store(target, factor, mask=block * 128 < WIDTH)


@triton.jit
def _kv_row(x_ptr, part_stride, weight, turns, position, eps, PARTS: tl.constexpr):
    """FP32 [8, 64]: norm, and the rotation of the last block."""
    block = tl.arange(0, 8)[:, None]
    place = tl.arange(0, 64)[None, :]
    x = added(x_ptr + block * 64 + place, part_stride, tl.full((8, 64), 1, tl.int1), PARTS)
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) * (1.0 / 512) + eps)
    turning = (block == 7) & (place >= 0)
    other = place ^ 1
    y = x * inverse_rms * tl.load(weight + block * 64 + place)
    partner = added(x_ptr + 448 + other + block * 0, part_stride, turning, PARTS)
    partner = partner * inverse_rms * tl.load(weight + 448 + other + block * 0, mask=turning, other=0.0)
    angle = turns + position.to(tl.int64) * 64 + (place // 2) * 2 + block * 0
    cos = tl.load(angle, mask=turning, other=1.0)
    sin = tl.load(angle + 1, mask=turning, other=0.0)
    return y * cos + partner * tl.where(place % 2 == 0, -sin, sin)


@chained
@triton.jit(do_not_specialize=["scale_column"])
def _latent_rows(
    qkv,
    qkv_stride,
    part_stride,
    q_weight,
    kv_weight,
    turns,
    positions,
    window_write,
    pool,
    page_bytes,
    codes,
    scale,
    scale_row,
    scale_column,
    workspace,
    workspace_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BF16: tl.constexpr,
    KEEP: tl.constexpr,
    PARTS: tl.constexpr,
):
    after_others()
    token = tl.program_id(0)
    own = qkv + token.to(tl.int64) * qkv_stride
    if tl.program_id(1) == 0:
        _latent(own, part_stride, token, q_weight, codes, scale, scale_row, scale_column, eps, WIDTH, BLOCKS, PARTS)
    else:
        position = tl.load(positions + token)
        if position >= 0:
            y = _kv_row(own + WIDTH, part_stride, kv_weight, turns, position, eps, PARTS)
            row = tl.load(window_write + token)
            if row >= 0:
                store_row(y, pool, row, page_bytes, BF16)
            if KEEP:
                place = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
                target = workspace + tl.load(workspace_rows + token).to(tl.int64) * 512
                tl.store(target + place, rounded_row(y, BF16))


def latent_rows(
    qkv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    turns: Tensor,
    positions: Tensor,
    window_write: Tensor,
    window_pool: Tensor,
    q_codes: Tensor,
    q_scale: Tensor,
    *,
    eps: float,
    workspace: Tensor | None,
    workspace_rows: Tensor | None,
) -> None:
    """See the door."""
    width = q_weight.shape[0]
    keep = workspace is not None
    assert workspace is None or (workspace.dtype == torch.bfloat16 and workspace.is_contiguous())
    _latent_rows[(positions.shape[0], 2)](
        qkv,
        qkv.stride(-2),
        qkv.stride(0) if qkv.dim() == 3 else 0,
        q_weight,
        kv_weight,
        turns,
        positions,
        window_write,
        window_pool,
        window_pool.stride(0),
        q_codes,
        q_scale,
        q_scale.stride(0),
        q_scale.stride(1),
        workspace if keep else qkv,
        workspace_rows if keep else positions,
        eps,
        WIDTH=width,
        BLOCKS=triton.next_power_of_2(width // 128),
        BF16=window_pool.shape[1] == BF16_PAGE_BYTES,
        KEEP=keep,
        PARTS=parts_of(qkv, 2),
        num_warps=4,
    )
