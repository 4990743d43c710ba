"""Training weights under the checkpoint's names: to BF16 files and back, and to DeepSeek's format.

`state` maps the model's parameter names to tensors. Export rounds with the project's codecs through the project's
writer; `merge` turns an export of several shards into the one file that ships.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tools.nano.model import NanoModel
from worker_svc.checkpoint import names
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Fp4Weight, Fp8Weight, load_checkpoint
from worker_svc.checkpoint.names import WeightSpec
from worker_svc.checkpoint.safetensors_file import DTYPES
from worker_svc.checkpoint.writer import DEFAULT_SHARD_BYTES, write_checkpoint
from worker_svc.ops import quant_fp4, quant_fp8

MAX_FILE_BYTES = 20_000_000
_SMALL = 5000
"""Tensors of fewer values stay FP32 in BF16 files: norms, sinks, mixers."""


def checkpoint_name(name: str) -> str:
    """`layers.0.hc_attn.fn` -> `layers.0.hc_attn_fn`, `gate__bias` -> `gate.bias`."""
    return re.sub(r"(hc_attn|hc_ffn|hc_head)\.", r"\1_", name).replace("__", ".")


def named_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every logical weight of the checkpoint by its name there, experts one by one."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        own = checkpoint_name(name)
        if ".ffn.experts." in own:
            prefix, leaf = own.rsplit(".", 1)
            found |= {f"{prefix}.{expert}.{leaf}": part for expert, part in enumerate(value)}
        else:
            found[own] = value
    return found


def export(config: V4Config, state: Mapping[str, Tensor], out: Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Path:
    """Write a checkpoint folder in DeepSeek's format: FP4 experts, FP8 dense weights, the rest as it is."""
    found = named_weights(state)

    def make(spec: WeightSpec) -> tuple[Tensor, ...]:
        value = found[spec.name].detach().cpu()
        if spec.kind == "fp8":
            return quant_fp8.quantise_weight(value.float())
        if spec.kind == "fp4":
            packed, scale = quant_fp4.quantise(value.float())
            return packed.view(torch.int8), scale
        return (value.to(DTYPES[spec.dtype][1]).contiguous(),)

    return write_checkpoint(config, list(names.weights(config, "fp4")), make, out, shard_bytes=shard_bytes)


def save_shards(state: Mapping[str, Tensor], out: Path, count: int = 3) -> None:
    """Large tensors as BF16, in `count` files of about equal size."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    groups: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, value in state.items():
        value = value.detach().cpu()
        if value.is_floating_point() and value.numel() > _SMALL:
            value = value.bfloat16()
        smallest = sizes.index(min(sizes))
        groups[smallest][name] = value.contiguous().clone()
        sizes[smallest] += value.numel() * value.element_size()
    for number, group in enumerate(groups):
        save_file(group, str(out / f"weights-{number}.safetensors"))


def load_shards(folder: Path) -> dict[str, Tensor]:
    """What `save_shards` wrote, FP32 again."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        state |= load_file(str(path))
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def model_of(config: V4Config, state: Mapping[str, Tensor], length: int) -> NanoModel:
    """A model with these weights."""
    model = NanoModel(config, length)
    model.load_state_dict(dict(state))
    return model


def merge(source: Path, out: Path) -> int:
    """Rewrite a checkpoint as one file; returns its size and refuses one too large to ship."""
    checkpoint = load_checkpoint(source)

    def make(spec: WeightSpec) -> tuple[Tensor, ...]:
        weight = checkpoint[spec.name]
        if isinstance(weight, Fp8Weight):
            return weight.data, weight.scale
        if isinstance(weight, Fp4Weight):
            return weight.packed.view(torch.int8), weight.scale
        return (weight,)

    write_checkpoint(checkpoint.config, list(names.weights(checkpoint.config, "fp4")), make, out)
    size = (out / "model.safetensors").stat().st_size
    if size > MAX_FILE_BYTES:
        raise SystemExit(f"model.safetensors has {size} bytes; at most {MAX_FILE_BYTES} may ship")
    return size


def main() -> None:
    """`python -m tools.nano.weights_io SOURCE OUT`: merge an export into one file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(f"{merge(options.source, options.out)} bytes")


if __name__ == "__main__":
    main()
