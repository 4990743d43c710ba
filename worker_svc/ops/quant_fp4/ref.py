"""MXFP4 (E2M1 with one E8M0 scale per 32 values of a row) in plain torch: expert weights and indexer rows.

Two codes share a byte, the even element in the low nibble. Rounding is to nearest even by the boundaries of
the eight magnitudes; a negative value that rounds to zero keeps its sign bit, as the hardware conversion does.
"""

from __future__ import annotations

import torch

from worker_svc.ops.quant_fp8.ref import pow2_scale, pow2_scale_value, scale_value

E2M1_MAX = 6.0
BLOCK = 32
AMAX_FLOOR = 6.0 * 2.0**-126
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of codes 0..7; bit 3 is the sign."""

_VALUES = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float32)
_SMALLEST, _LARGEST = 127, 129  # biased exponents of the binades [1, 2) and [4, 8)


def _steps(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Binade of each value, int32 0 (below 2), 1 (below 4) or 2, and the distance of codes there: .5, 1 or 2.

    Counted in steps, the codes of a binade are consecutive integers whose parity is the code's own, so rounding to
    the nearest even integer is rounding to the nearest even code.
    """
    exponent = ((scaled.view(torch.int32) >> 23) & 0xFF).clamp_(_SMALLEST, _LARGEST)
    return exponent - _SMALLEST, ((exponent - 1) << 23).view(torch.float32)


def round_codes(scaled: torch.Tensor) -> torch.Tensor:
    """float32 values already divided by their scale -> uint8 codes 0..15, saturating at 6."""
    binade, step = _steps(scaled)
    code = (scaled.abs() / step).round_().clamp_(max=4).to(torch.int32) + 2 * binade
    return code.clamp_(max=7).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., n] -> bytes [..., n / 2], element 2b in the low nibble of byte b."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 bytes [..., n / 2] -> codes 0..15 [..., n]."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def quantise(x: torch.Tensor, floor: float = AMAX_FLOOR) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n], n a multiple of 32 -> (packed uint8 [..., n / 2], E8M0 bytes uint8 [..., n / 32])."""
    blocks = _blocked(x.float())
    exponent = pow2_scale(blocks.abs().amax(-1).clamp(min=floor), E2M1_MAX)
    codes = round_codes(blocks / scale_value(exponent)[..., None])
    return pack(codes.flatten(-2)), exponent


def dequantise(packed: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Exact float32 [..., n] of packed bytes [..., n / 2] and E8M0 bytes [..., n / 32]."""
    values = _VALUES.to(packed.device)[unpack(packed).int()]
    return (_blocked(values) * scale_value(exponent)[..., None]).flatten(-2)


def fake_quant(x: torch.Tensor, floor: float = AMAX_FLOOR) -> torch.Tensor:
    """x as it reads back after `quantise`, in x's dtype."""
    blocks = _blocked(x.float())
    scale = pow2_scale_value(blocks.abs().amax(-1, keepdim=True).clamp_(min=floor), E2M1_MAX)
    scaled = blocks / scale
    _, step = _steps(scaled)
    rounded = (scaled / step).round_().mul_(step).clamp_(-E2M1_MAX, E2M1_MAX)
    return rounded.mul_(scale).flatten(-2).to(x.dtype)


def _blocked(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n / 32, 32]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
