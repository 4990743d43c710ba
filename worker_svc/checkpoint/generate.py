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
from worker_svc.checkpoint.names import ExpertFormat, TensorSpec, WeightSpec
from worker_svc.checkpoint.writer import DEFAULT_SHARD_BYTES, write_checkpoint
from worker_svc.ops import quant_fp4, quant_fp8

Content = Literal["flat", "lively"]

_FLAT_STD = 0.0156
_FLAT_FP8_EXPONENT = 127 - 6
_FLAT_FP4_EXPONENTS = (127 - 9, 127 - 6)


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
    maker = _Maker(config, seed, expert_format, content)
    specs = list(names.tensors(config, expert_format))
    return write_checkpoint(config, specs, maker, out_dir, shard_bytes=shard_bytes, progress=progress)


class _Maker:
    """Draws one tensor of the file at a time. Keeps the scale of the weight it quantised last."""

    def __init__(self, config: V4Config, seed: int, expert_format: ExpertFormat, content: Content) -> None:
        self._config, self._seed, self._content = config, seed, content
        self._owner: dict[str, WeightSpec] = {}
        for weight in names.weights(config, expert_format):
            self._owner |= dict.fromkeys((tensor.name for tensor in weight.tensors()), weight)
        self._pair: tuple[str, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, spec: TensorSpec) -> torch.Tensor:
        weight = self._owner[spec.name]
        if weight.kind != "dense":
            return self._quantised(weight)[spec.name.endswith(".scale")]
        if spec.dtype == "I64":
            return self._expert_table(spec)
        values = self._flat(spec) if self._content == "flat" else self._lively(spec)
        return values.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)

    def _rng(self, name: str) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
        values = self._rng(name).standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values).mul_(std)

    def _quantised(self, weight: WeightSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes in the file's dtype, E8M0 bytes), the same for both tensors of the pair."""
        if self._pair is None or self._pair[0] != weight.name:
            make = self._flat_codes if self._content == "flat" else self._lively_codes
            self._pair = (weight.name, *make(weight))
        return self._pair[1:]

    def _flat_codes(self, weight: WeightSpec) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = weight.tensors()
        if weight.kind == "fp8":
            codes = self._normal(data.name, data.shape, 1.0).to(torch.float8_e4m3fn)
            return codes, torch.full(scale.shape, _FLAT_FP8_EXPONENT, dtype=torch.uint8)
        rng = self._rng(data.name)
        packed = np.frombuffer(rng.bytes(data.num_bytes), dtype=np.int8).reshape(data.shape).copy()
        low, high = _FLAT_FP4_EXPONENTS
        exponents = rng.integers(low, high, scale.shape, dtype=np.uint8, endpoint=True)
        return torch.from_numpy(packed), torch.from_numpy(exponents)

    def _lively_codes(self, weight: WeightSpec) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._normal(weight.name, weight.shape, weight.shape[1] ** -0.5)
        # Scales that differ from block to block: a loader that mixes blocks up must not get away with it.
        rows = self._rng(weight.name + "/rows").uniform(0.5, 2.0, (weight.shape[0], 1))
        values = values * torch.from_numpy(rows.astype(np.float32))
        if weight.kind == "fp8":
            return quant_fp8.quantise_weight(values)
        packed, exponents = quant_fp4.quantise(values)
        return packed.view(torch.int8), exponents

    def _expert_table(self, spec: TensorSpec) -> torch.Tensor:
        """Distinct experts for every token id."""
        order = self._rng(spec.name).random((spec.shape[0], self._config.n_routed_experts)).argsort(1)
        return torch.from_numpy(order[:, : spec.shape[1]].astype(np.int64))

    def _flat(self, spec: TensorSpec) -> torch.Tensor:
        leaf = _leaf(spec.name)
        if leaf.endswith("norm"):
            return torch.ones(spec.shape)
        if leaf.endswith("_scale"):
            return torch.ones(spec.shape)
        if leaf.endswith("_base") or leaf in ("attn_sink", "bias"):
            return torch.zeros(spec.shape)
        if leaf.endswith("_fn"):
            return self._normal(spec.name, spec.shape, 0.01)
        return self._normal(spec.name, spec.shape, 1.0 if leaf == "embed" else _FLAT_STD)

    def _lively(self, spec: TensorSpec) -> torch.Tensor:
        leaf = _leaf(spec.name)
        if leaf.endswith("norm"):
            return 1.0 + self._normal(spec.name, spec.shape, 0.25)
        if leaf.endswith("_scale"):
            return torch.from_numpy(self._rng(spec.name).uniform(0.5, 1.5, spec.shape).astype(np.float32))
        if leaf == "bias":
            return self._normal(spec.name, spec.shape, 0.3)
        if leaf.endswith("_base") or leaf in ("attn_sink", "ape", "embed"):
            return self._normal(spec.name, spec.shape, 1.0)
        # Matrices keep the scale of what they read; the mixers read an RMS-normed vector, hence order one.
        return self._normal(spec.name, spec.shape, spec.shape[1] ** -0.5)


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


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
