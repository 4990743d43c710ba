"""FP8 with power-of-two (E8M0) scales, in plain torch: weights in 128x128 blocks, activations and KV per row.

The scale rule is exact: it reads the FP32 bits of amax * (1 / max) instead of calling log2, so every backend can
reproduce it bit for bit. Rounding is to nearest even, saturating. All arithmetic is FP32; a scale travels as its
exponent byte b, meaning 2^(b - 127).
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
AMAX_FLOOR = 1e-4
"""Smallest block maximum of FP8: an all-zero block still gets a normal scale."""
ACTIVATION_BLOCK = 128
KV_BLOCK = 64
WEIGHT_BLOCK = 128

_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}


_MANTISSA = 0x7FFFFF
_LARGEST = 0x7F000000  # bits of 2^127, the largest scale: byte 254


def pow2_scale(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """uint8 exponents of s = 2^ceil(log2(amax / limit)), from the bits of the FP32 product amax * (1 / limit).

    amax: float32, positive (apply the floor first). A NaN or infinite amax gives the largest finite scale.
    """
    return (_ceiled_bits(amax, limit) >> 23).to(torch.uint8)


def pow2_scale_value(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """float32 value of `pow2_scale`, for normal scales (any amax above limit * 2^-127)."""
    return (_ceiled_bits(amax, limit) & ~_MANTISSA).view(torch.float32)


def _ceiled_bits(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """int32 bits whose exponent is rounded up: a mantissa that is not zero carries into it."""
    return (amax * (1.0 / limit)).view(torch.int32).clamp(max=_LARGEST) + _MANTISSA


def scale_value(exponent: torch.Tensor) -> torch.Tensor:
    """float32 2^(b - 127) of E8M0 bytes, exact for 0..254 (2^-127 is subnormal); 255 is NaN."""
    wide = exponent.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def quantise(
    x: torch.Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn, floor: float = AMAX_FLOOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] -> (codes [..., n] of `dtype`, exponents uint8 [..., ceil(n / block)]), blocks along the last dim."""
    limit = _MAX[dtype]
    blocks = _blocked(x.float(), block)
    exponent = pow2_scale(blocks.abs().amax(-1).clamp(min=floor), limit)
    scaled = (blocks / scale_value(exponent)[..., None]).clamp(-limit, limit)
    return _unblocked(scaled.to(dtype), x.shape[-1]), exponent


def dequantise(codes: torch.Tensor, exponent: torch.Tensor, block: int) -> torch.Tensor:
    """Inverse of `quantise`: float32 [..., n]."""
    blocks = _blocked(codes.float(), block)
    return _unblocked(blocks * scale_value(exponent)[..., None], codes.shape[-1])


def fake_quant(
    x: torch.Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn, floor: float = AMAX_FLOOR
) -> torch.Tensor:
    """x as it reads back after `quantise`, in x's dtype."""
    limit = _MAX[dtype]
    blocks = _blocked(x.float(), block)
    scale = pow2_scale_value(blocks.abs().amax(-1, keepdim=True).clamp_(min=floor), limit)
    rounded = (blocks / scale).clamp_(-limit, limit).to(dtype).float()
    return _unblocked(rounded.mul_(scale), x.shape[-1]).to(x.dtype)


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., out, in] -> (E4M3 codes of that shape, exponents uint8 [..., ceil(out/128), ceil(in/128)])."""
    rows, columns = weight.shape[-2:]
    tiles = _tiled(weight.float())
    exponent = pow2_scale(tiles.abs().amax((-3, -1)).clamp(min=AMAX_FLOOR), E4M3_MAX)
    scaled = (tiles / scale_value(exponent)[..., :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).flatten(-4, -3).flatten(-2, -1)
    return codes.view(torch.uint8)[..., :rows, :columns].contiguous().view(torch.float8_e4m3fn), exponent


def dequantise_weight(codes: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Exact float32 values of a 128x128-block weight: codes [..., out, in], exponents [..., out/128, in/128]."""
    rows, columns = codes.shape[-2:]
    scale = scale_value(exponent).repeat_interleave(WEIGHT_BLOCK, -1)[..., :columns]
    return codes.float() * scale.repeat_interleave(WEIGHT_BLOCK, -2)[..., :rows, :]


def _blocked(x: torch.Tensor, block: int) -> torch.Tensor:
    """[..., n] -> [..., ceil(n / block), block]; zeros fill the last block, which changes no maximum."""
    short = -x.shape[-1] % block
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _unblocked(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.flatten(-2, -1)[..., :n]


def _tiled(weight: torch.Tensor) -> torch.Tensor:
    """[..., out, in] -> [..., out/128, 128, in/128, 128], zero padded."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    rows, columns = padded.shape[-2:]
    tiles = (rows // WEIGHT_BLOCK, WEIGHT_BLOCK, columns // WEIGHT_BLOCK, WEIGHT_BLOCK)
    return padded.reshape(*weight.shape[:-2], *tiles)
