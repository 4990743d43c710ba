"""MXFP4 quantisation: the door. See `ref` for the rules.

Used for routed expert weights (read) and indexer queries and keys (written). All blocks are 32 values of a row.
"""

import torch

from worker_svc.ops.quant_fp4 import ref
from worker_svc.ops.quant_fp4.ref import AMAX_FLOOR, BLOCK, E2M1_MAX, MAGNITUDES

__all__ = [
    "AMAX_FLOOR",
    "BLOCK",
    "E2M1_MAX",
    "MAGNITUDES",
    "dequantise",
    "fake_quant",
    "pack",
    "quantise",
    "unpack",
]


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] floating, n % 32 == 0 -> (packed uint8 [..., n / 2], E8M0 bytes uint8 [..., n / 32])."""
    assert x.is_floating_point() and x.shape[-1] % BLOCK == 0, (x.dtype, x.shape)
    return ref.quantise(x)


def dequantise(packed: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Exact float32 [..., n] of packed uint8 [..., n / 2] and E8M0 bytes uint8 [..., n / 32]."""
    assert packed.dtype == torch.uint8 and exponent.dtype == torch.uint8, (packed.dtype, exponent.dtype)
    assert packed.shape == (*exponent.shape[:-1], exponent.shape[-1] * BLOCK // 2), (packed.shape, exponent.shape)
    return ref.dequantise(packed, exponent)


def fake_quant(x: torch.Tensor) -> torch.Tensor:
    """x [..., n], n % 32 == 0, as it reads back from FP4: same shape and dtype."""
    assert x.is_floating_point() and x.shape[-1] % BLOCK == 0, (x.dtype, x.shape)
    return ref.fake_quant(x)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., n] -> bytes [..., n / 2], even element in the low nibble."""
    assert codes.dtype == torch.uint8 and codes.shape[-1] % 2 == 0, (codes.dtype, codes.shape)
    return ref.pack(codes)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 bytes [..., n / 2] -> codes 0..15 [..., n]."""
    assert packed.dtype == torch.uint8, packed.dtype
    return ref.unpack(packed)
