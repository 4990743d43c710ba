"""FP8 quantisation with E8M0 scales: the door. See `ref` for the rules.

`quantise` / `dequantise` / `fake_quant` work on rows (block 128 for activations, 64 for KV), the `_weight` pair
on 128x128 tiles; CPU and GPU tensors alike run the plain torch path. `quantise_rows` is the GPU forward's: a kernel
there, outputs the caller's, scales as FP32 numbers.
"""

import torch

from worker_svc.ops import registry
from worker_svc.ops.partial_sums import added
from worker_svc.ops.quant_fp8 import ref
from worker_svc.ops.quant_fp8.ref import (
    ACTIVATION_BLOCK,
    AMAX_FLOOR,
    E4M3_MAX,
    KV_BLOCK,
    WEIGHT_BLOCK,
    pow2_scale,
    scale_value,
)

__all__ = [
    "ACTIVATION_BLOCK",
    "AMAX_FLOOR",
    "E4M3_MAX",
    "KV_BLOCK",
    "WEIGHT_BLOCK",
    "dequantise",
    "dequantise_weight",
    "fake_quant",
    "pow2_scale",
    "quantise",
    "quantise_rows",
    "quantise_weight",
    "scale_value",
]

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantise(
    x: torch.Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] floating -> (codes [..., n] of `dtype`, E8M0 bytes uint8 [..., ceil(n / block)])."""
    assert x.is_floating_point() and x.shape[-1] > 0 and block > 0, (x.dtype, x.shape, block)
    assert dtype in _FORMATS, dtype
    return ref.quantise(x, block, dtype)


def quantise_rows(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """x BF16 or FP32 [T, n], n % 128 == 0, or FP32 [parts, T, n] of a split product, to be added up

    -> codes E4M3 [T, n], scale FP32 [T, n / 128] of any strides.
    """
    rows, width = codes.shape
    assert x.shape[-2:] == codes.shape and x.stride(-1) == 1 and codes.is_contiguous(), (x.shape, codes.shape)
    assert width % ACTIVATION_BLOCK == 0 and scale.shape == (rows, width // ACTIVATION_BLOCK), (width, scale.shape)
    if registry.on_kernel("quant_fp8", x.is_cuda):
        from worker_svc.ops.quant_fp8 import triton

        triton.quantise_rows(x, codes, scale)
    else:
        rounded, exponent = ref.quantise(added(x, 2), ACTIVATION_BLOCK)
        codes.copy_(rounded)
        scale.copy_(scale_value(exponent))


def dequantise(codes: torch.Tensor, exponent: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [..., n] of codes [..., n] and E8M0 bytes [..., ceil(n / block)]."""
    assert codes.dtype in _FORMATS and exponent.dtype == torch.uint8, (codes.dtype, exponent.dtype)
    assert exponent.shape == (*codes.shape[:-1], -(-codes.shape[-1] // block)), (codes.shape, exponent.shape)
    return ref.dequantise(codes, exponent, block)


def fake_quant(x: torch.Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """x as it reads back from FP8, same shape and dtype."""
    assert x.is_floating_point() and x.shape[-1] > 0 and block > 0, (x.dtype, x.shape, block)
    assert dtype in _FORMATS, dtype
    return ref.fake_quant(x, block, dtype)


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., out, in] floating -> (E4M3 codes [..., out, in], E8M0 bytes [..., ceil(out/128), ceil(in/128)])."""
    assert weight.is_floating_point() and weight.dim() >= 2, (weight.dtype, weight.shape)
    return ref.quantise_weight(weight)


def dequantise_weight(codes: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Exact float32 [..., out, in] of a 128x128-block weight."""
    rows, columns = codes.shape[-2:]
    tiles = (*codes.shape[:-2], -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    assert codes.dtype == torch.float8_e4m3fn and exponent.dtype == torch.uint8, (codes.dtype, exponent.dtype)
    assert exponent.shape == tiles, (exponent.shape, tiles)
    return ref.dequantise_weight(codes, exponent)
