"""The rounding of the file format and of serving, as a straight-through step of training.

Forward values are those the project's own codecs give, so that export changes nothing; gradients pass as if nothing
had happened. `on` is a 0-d bool tensor: switching it recompiles nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker_svc.ops.quant_fp4.ref import fake_quant as fp4_fake_quant
from worker_svc.ops.quant_fp8.ref import (
    ACTIVATION_BLOCK,
    AMAX_FLOOR,
    E4M3_MAX,
    KV_BLOCK,
    WEIGHT_BLOCK,
    pow2_scale_value,
)
from worker_svc.ops.quant_fp8.ref import fake_quant as fp8_fake_quant


def _straight_through(x: Tensor, rounded: Tensor, on: Tensor) -> Tensor:
    """`rounded` where `on`, x elsewhere, bit for bit; the gradient is that of x."""
    fixed = x.detach()
    return (x - fixed) + torch.where(on, rounded, fixed)


def round_input(x: Tensor, on: Tensor) -> Tensor:
    """The input of an FP8 or FP4 weight: E4M3 per 128 values. x [..., n], n a multiple of 128."""
    return _straight_through(x, fp8_fake_quant(x.detach(), ACTIVATION_BLOCK), on)


def round_key(x: Tensor, rope: int, on: Tensor) -> Tensor:
    """A window key or compressed entry: E4M3 per 64 values on the dims without rope, BF16 on the others. x [..., d]."""
    nope = fp8_fake_quant(x[..., :-rope].detach(), KV_BLOCK)
    return _straight_through(x, torch.cat([nope, x[..., -rope:].detach().bfloat16().to(x.dtype)], -1), on)


def round_index(x: Tensor, on: Tensor) -> Tensor:
    """An indexer query or key after its Hadamard transform: E2M1 per 32 values."""
    return _straight_through(x, fp4_fake_quant(x.detach()), on)


def fp8_weight(weight: Tensor, on: Tensor) -> Tensor:
    """[out, in], both multiples of 128: E4M3 in 128 x 128 tiles."""
    rows, columns = weight.shape
    tiles = weight.detach().view(rows // WEIGHT_BLOCK, WEIGHT_BLOCK, columns // WEIGHT_BLOCK, WEIGHT_BLOCK)
    scale = pow2_scale_value(tiles.abs().amax((1, 3), keepdim=True).clamp(min=AMAX_FLOOR), E4M3_MAX)
    codes = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return _straight_through(weight, (codes.float() * scale).view(rows, columns), on)


def fp4_weight(weight: Tensor, on: Tensor) -> Tensor:
    """[..., in], a multiple of 32: E2M1 with a scale per 32 inputs."""
    return _straight_through(weight, fp4_fake_quant(weight.detach()), on)
