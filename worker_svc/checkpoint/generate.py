"""Make checkpoints in the original format for any config: for tests and benchmarks that need no download.

    python -m worker_svc.checkpoint.generate --config flash --layers 8 --out DIR --seed 0

Two kinds of content. `flat`: the statistics under which step times are compared (norms 1, near-uniform routing),
cheap to make. `lively`: every tensor has an effect of order one (norms, sinks, ape, mixer bases and scales,
router bias), so that a rule broken anywhere shows in the logits. The words carry no meaning in either.
Each tensor is drawn from (seed, its name): sharding, order and cut layers do not change its values.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from worker_svc.checkpoint import names
from worker_svc.checkpoint.census import PRESETS, preset
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.errors import CheckpointError
from worker_svc.checkpoint.names import ExpertFormat, WeightSpec
from worker_svc.checkpoint.safetensors_file import DTYPES
from worker_svc.checkpoint.writer import DEFAULT_SHARD_BYTES, write_checkpoint
from worker_svc.ops import quant_fp4, quant_fp8

Content = Literal["flat", "lively"]

_FLAT_STD = 0.0156
_FLAT_FP8_EXPONENT = 127 - 6
_FLAT_FP4_EXPONENTS = (127 - 9, 127 - 6)
_PIECE = 1 << 18  # elements drawn at a time: small enough to stay in a core's cache


def generate_checkpoint(
    config: V4Config,
    out_dir: str | Path,
    seed: int,
    *,
    layers: int | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    expert_format: ExpertFormat = "fp4",
    content: Content = "flat",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a random checkpoint of `config`, cut to its first `layers` layers if given; returns the folder."""
    if layers is not None:
        config = config.with_layers(layers)
    weights = list(names.weights(config, expert_format))
    maker = _Maker(config, seed, content)
    return write_checkpoint(config, weights, maker, out_dir, shard_bytes=shard_bytes, progress=progress)


class _Maker:
    """Draws one weight at a time; holds no state, so threads may share it."""

    def __init__(self, config: V4Config, seed: int, content: Content) -> None:
        self._config, self._seed, self._content = config, seed, content

    def __call__(self, weight: WeightSpec) -> tuple[torch.Tensor, ...]:
        if weight.kind != "dense":
            return self._flat_codes(weight) if self._content == "flat" else self._lively_codes(weight)
        if weight.dtype == "I64":
            return (self._expert_table(weight),)
        return (self._flat(weight) if self._content == "flat" else self._lively(weight),)

    def _rng(self, name: str) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))

    def _normal(self, weight: WeightSpec, mean: float, std: float, dtype: torch.dtype) -> torch.Tensor:
        """Normal values of the weight's shape; drawn in pieces, so that a large tensor never exists in FP32."""
        rng, values = self._rng(weight.name), torch.empty(weight.shape, dtype=dtype)
        flat = values.view(-1)
        for begin in range(0, flat.numel(), _PIECE):
            piece = flat[begin : begin + _PIECE]
            drawn = torch.from_numpy(rng.standard_normal(len(piece), dtype=np.float32))
            piece.copy_(drawn.mul_(std).add_(mean))
        return values

    def _uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.from_numpy(self._rng(name).uniform(low, high, shape).astype(np.float32))

    def _flat_codes(self, weight: WeightSpec) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = weight.tensors()
        if weight.kind == "fp8":
            codes = self._normal(weight, 0.0, 1.0, torch.float8_e4m3fn)
            return codes, torch.full(scale.shape, _FLAT_FP8_EXPONENT, dtype=torch.uint8)
        rng = self._rng(weight.name)
        words = rng.integers(0, 1 << 64, -(-data.num_bytes // 8), dtype=np.uint64)
        packed = words.view(np.int8)[: data.num_bytes].reshape(data.shape)
        low, high = _FLAT_FP4_EXPONENTS
        exponents = rng.integers(low, high, scale.shape, dtype=np.uint8, endpoint=True)
        return torch.from_numpy(packed), torch.from_numpy(exponents)

    def _lively_codes(self, weight: WeightSpec) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._normal(weight, 0.0, weight.shape[1] ** -0.5, torch.float32)
        # Scales that differ from block to block: a loader that mixes blocks up must not get away with it.
        values *= self._uniform(weight.name + "/rows", (weight.shape[0], 1), 0.5, 2.0)
        if weight.kind == "fp8":
            return quant_fp8.quantise_weight(values)
        packed, exponents = quant_fp4.quantise(values)
        return packed.view(torch.int8), exponents

    def _expert_table(self, weight: WeightSpec) -> torch.Tensor:
        """Distinct experts for every token id."""
        order = self._rng(weight.name).random((weight.shape[0], self._config.n_routed_experts)).argsort(1)
        return torch.from_numpy(order[:, : weight.shape[1]].astype(np.int64))

    def _flat(self, weight: WeightSpec) -> torch.Tensor:
        leaf, dtype = _leaf(weight.name), DTYPES[weight.dtype][1]
        if leaf.endswith(("norm", "_scale")):
            return torch.ones(weight.shape, dtype=dtype)
        if leaf.endswith("_base") or leaf in ("attn_sink", "bias"):
            return torch.zeros(weight.shape, dtype=dtype)
        std = 0.01 if leaf.endswith("_fn") else 1.0 if leaf == "embed" else _FLAT_STD
        return self._normal(weight, 0.0, std, dtype)

    def _lively(self, weight: WeightSpec) -> torch.Tensor:
        leaf, dtype = _leaf(weight.name), DTYPES[weight.dtype][1]
        if leaf.endswith("norm"):
            return self._normal(weight, 1.0, 0.25, dtype)
        if leaf.endswith("_scale"):
            return self._uniform(weight.name, weight.shape, 0.5, 1.5)
        if leaf == "bias":
            return self._normal(weight, 0.0, 0.3, dtype)
        if leaf.endswith("_base") or leaf in ("attn_sink", "ape", "embed"):
            return self._normal(weight, 0.0, 1.0, dtype)
        # Matrices keep the scale of what they read; the mixers read an RMS-normed vector, hence order one.
        return self._normal(weight, 0.0, weight.shape[1] ** -0.5, dtype)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def main(argv: list[str]) -> int:
    """Command line; prints the folder on stdout, progress on stderr if that is a terminal."""
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.checkpoint.generate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--config", required=True, help=f"{', '.join(PRESETS)}, or a folder with a config.json")
    parser.add_argument("--layers", type=int, help="keep the first N layers only")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", choices=("fp4", "fp8"), default="fp4", help="format of the routed experts")
    parser.add_argument("--content", choices=("flat", "lively"), default="flat")
    parser.add_argument("--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES)
    options = parser.parse_args(argv)
    try:
        config = preset(options.config) if options.config in PRESETS else V4Config.load(options.config)
        folder = generate_checkpoint(
            config,
            options.out,
            options.seed,
            layers=options.layers,
            shard_bytes=options.shard_bytes,
            expert_format=options.experts,
            content=options.content,
            progress=_bar() if sys.stderr.isatty() else None,
        )
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{folder}\n")
    return 0


def _bar() -> Callable[[int, int], None]:
    """A progress line, redrawn at most ten times a second."""
    last = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 0.1 and done < total:
            return
        last = now
        filled = 40 * done // total
        end = "\n" if done == total else ""
        bar = "#" * filled + "." * (40 - filled)
        sys.stderr.write(f"\r[{bar}] {done / 1e9:.2f} of {total / 1e9:.2f} GB{end}")
        sys.stderr.flush()

    return draw


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
