"""A checkpoint of zeros: the shapes and formats of a model, for compiling its kernels without its weights.

Layers repeat, so one of each kind is enough; which expert a zero router picks does not matter. For timing kernels the
numbers are drawn instead: a GPU multiplies zeros with less power, and so at other clocks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from worker_svc.checkpoint import names
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Fp4Weight, Fp8Weight, Weight
from worker_svc.checkpoint.names import ExpertFormat, layer_prefix

_ONE = 127  # E8M0 of 1
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def one_of_each(config: V4Config) -> V4Config:
    """The config cut to one layer of each compression ratio, the first of them routed by id if any layer is."""
    ratios = tuple(sorted(set(config.layer_ratios)))
    return dataclasses.replace(
        config,
        num_hidden_layers=len(ratios),
        compress_ratios=(*ratios, *config.compress_ratios[config.num_hidden_layers :]),
        num_hash_layers=min(1, config.num_hash_layers),
    )


class HollowSource:
    """Implements the loader's `WeightSource`. drawn: random numbers, not zeros; scales are one in either case."""

    def __init__(self, config: V4Config, device: torch.device, *, drawn: bool = False) -> None:
        self.config, self.device = config, device
        self._draw = torch.Generator(device).manual_seed(0) if drawn else None
        self.expert_format: ExpertFormat = "fp4"
        self._specs = {spec.name: spec for spec in names.weights(config, "fp4")}

    def __getitem__(self, name: str) -> Weight:
        """Zeros in the weight's format; norms and scales one."""
        spec = self._specs[name]
        if spec.kind == "fp8":
            rows, columns = spec.shape
            codes = self._numbers(rows, columns).to(torch.float8_e4m3fn)
            return Fp8Weight(codes, self._bytes((-(-rows // 128), -(-columns // 128)), _ONE))
        if spec.kind == "fp4":
            return self._fp4(spec.shape)
        dtype = _DTYPES[spec.dtype]
        if not dtype.is_floating_point:
            return torch.zeros(spec.shape, dtype=dtype, device=self.device)
        return self._numbers(*spec.shape).to(dtype)

    def experts(self, layer: int, name: str) -> Fp4Weight:
        """All experts of a layer."""
        spec = self._specs[f"{layer_prefix(self.config, layer)}.ffn.experts.0.{name}"]
        return self._fp4((self.config.n_routed_experts, *spec.shape))

    def _fp4(self, shape: tuple[int, ...]) -> Fp4Weight:
        packed = (*shape[:-1], shape[-1] // 2)
        codes = self._bytes(packed, 0)
        if self._draw is not None:
            codes.random_(0, 256, generator=self._draw)
        return Fp4Weight(codes, self._bytes((*shape[:-1], shape[-1] // 32), _ONE))

    def _numbers(self, *shape: int) -> Tensor:
        if self._draw is None:
            return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        return torch.randn(shape, dtype=torch.bfloat16, generator=self._draw, device=self.device)

    def _bytes(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.uint8, device=self.device)
