"""MXFP4 (E2M1 with one E8M0 scale per 32 values of a row) in plain torch: expert weights and indexer rows.

Two codes share a byte, the even element in the low nibble. Rounding is to nearest even by the boundaries of
the eight magnitudes; a negative value that rounds to zero keeps its sign bit, as the hardware conversion does.
"""

from __future__ import annotations

import torch

from worker_svc.ops.quant_fp8.ref import pow2_scale, scale_value

E2M1_MAX = 6.0
BLOCK = 32
AMAX_FLOOR = 6.0 * 2.0**-126
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of codes 0..7; bit 3 is the sign."""

_VALUES = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float32)
# Where the magnitude rounds up: ties go to the even code, so every second boundary includes its own value.
_ABOVE = (0.25, 1.25, 2.5, 5.0)
_FROM = (0.75, 1.75, 3.5)


def round_codes(scaled: torch.Tensor) -> torch.Tensor:
    """float32 values already divided by their scale -> uint8 codes 0..15, saturating at 6."""
    magnitude = scaled.abs()
    code = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for bound in _ABOVE:
        code += magnitude > bound
    for bound in _FROM:
        code += magnitude >= bound
    return code | (torch.signbit(scaled).to(torch.uint8) << 3)


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
    return dequantise(*quantise(x, floor)).to(x.dtype)


def _blocked(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n / 32, 32]."""
    return x.reshape(*x.shape[:-1], -1, BLOCK)
