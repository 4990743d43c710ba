"""Load a checkpoint folder: every tensor accounted for, quantised weights typed, nothing converted.

Weights stay as views of the mapped files (no copy); `dequantise` gives their exact float32 values on demand.
Missing, unexpected, wrongly shaped or typed tensors and impossible values (NaN scales, NaN weights, expert ids
out of range) are collected and reported together. Does not place anything on a device and does no maths but that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_svc.checkpoint import names
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.errors import TensorError, UnsupportedModelError
from worker_svc.checkpoint.names import ExpertFormat, WeightSpec
from worker_svc.checkpoint.safetensors_file import TensorFolder, open_folder
from worker_svc.ops import quant_fp4, quant_fp8

Progress = Callable[[int, int], None]
"""Called with (bytes checked, bytes in all) while loading."""

_DSPARK_SIGNS = ("main_proj", "markov_head", "confidence_head")
_V41_SIGNS = ("engram",)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """E4M3 codes [..., out, in] with one E8M0 byte per 128x128 tile [..., ceil(out/128), ceil(in/128)]."""

    data: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]."""
        return self.data.shape

    def dequantise(self) -> torch.Tensor:
        """Exact float32 values [..., out, in]."""
        return quant_fp8.dequantise_weight(self.data, self.scale)


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """E2M1 pairs uint8 [..., out, in/2], even input in the low nibble; E8M0 bytes uint8 [..., out, in/32]."""

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[..., out, in], unpacked."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def dequantise(self) -> torch.Tensor:
        """Exact float32 values [..., out, in]."""
        return quant_fp4.dequantise(self.packed, self.scale)


Weight = torch.Tensor | Fp8Weight | Fp4Weight


class Checkpoint:
    """A checked checkpoint. `checkpoint[name]` is a weight by its name without `.weight`.

    Dense weights are tensors as stored (BF16, F32, I64), quantised ones Fp8Weight or Fp4Weight. Names are those of
    the file: `embed`, `layers.0.attn.wq_a`, `layers.0.ffn.gate.bias`, `mtp.0.e_proj`, ...
    """

    def __init__(self, config: V4Config, expert_format: ExpertFormat, weights: Mapping[str, Weight]) -> None:
        self.config = config
        self.expert_format: ExpertFormat = expert_format
        self.weights = weights

    def __getitem__(self, name: str) -> Weight:
        return self.weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def dense(self, name: str) -> torch.Tensor:
        """A weight that is stored unquantised, as stored."""
        weight = self.weights[name]
        assert isinstance(weight, torch.Tensor), f"{name} is quantised"
        return weight

    def float32(self, name: str) -> torch.Tensor:
        """Exact float32 values of any floating-point weight, in memory of its own."""
        weight = self.weights[name]
        if isinstance(weight, torch.Tensor):
            assert weight.is_floating_point(), f"{name} holds integers"
            return weight.to(torch.float32, copy=True)
        return weight.dequantise()

    def experts(self, layer: int, name: str) -> Fp8Weight | Fp4Weight:
        """Routed experts of a layer stacked into one weight [E, out, in]; `name` is w1 (gate), w2 (down) or w3 (up).

        `layer` counts on through the MTP layer (num_hidden_layers). Copies: keep the result, drop the parts.
        """
        prefix = f"{names.layer_prefix(self.config, layer)}.ffn.experts."
        parts = [self.weights[f"{prefix}{expert}.{name}"] for expert in range(self.config.n_routed_experts)]
        scale = torch.stack([_quantised(part).scale for part in parts])
        if isinstance(parts[0], Fp4Weight):
            return Fp4Weight(torch.stack([part.packed for part in parts if isinstance(part, Fp4Weight)]), scale)
        codes = [part.data.view(torch.uint8) for part in parts if isinstance(part, Fp8Weight)]
        return Fp8Weight(torch.stack(codes).view(torch.float8_e4m3fn), scale)


def _quantised(weight: Weight) -> Fp8Weight | Fp4Weight:
    assert not isinstance(weight, torch.Tensor), "not a quantised weight"
    return weight


def load_checkpoint(folder: str | Path, *, progress: Progress | None = None, check_values: bool = True) -> Checkpoint:
    """Open and check a checkpoint folder; raises a CheckpointError that names what is wrong.

    `check_values=False` skips the pass over all bytes (NaN scales, NaN weights, expert ids), which on a large
    checkpoint reads everything from disk once.
    """
    config = V4Config.load(folder)
    files = open_folder(folder)
    expert_format = _probe(config, files)
    specs = list(names.weights(config, expert_format))
    problems = _check_tensors(specs, files)
    if problems:
        raise TensorError(str(folder), problems)
    weights = {spec.name: _weight(spec, files) for spec in specs}
    if check_values:
        problems = _check_values(config, specs, weights, progress)
        if problems:
            raise TensorError(str(folder), problems)
    return Checkpoint(config, expert_format, weights)


def _probe(config: V4Config, files: TensorFolder) -> ExpertFormat:
    """FP4 or FP8 experts, told by one tensor's dtype; also recognises other models by their tensor names."""
    for name in files.names():
        if any(sign in name.lower() for sign in _V41_SIGNS):
            raise UnsupportedModelError(str(files.folder), "tensor", name, "this is DeepSeek-V4.1; it is not supported")
        if name.startswith("mtp.") and any(sign in name for sign in _DSPARK_SIGNS):
            raise UnsupportedModelError(
                str(files.folder), "tensor", name, "the DSpark drafter is not supported; use the undated revision"
            )
    probe = names.expert_probe(config)
    if probe in files.where and files.entry(probe).dtype == "F8_E4M3":
        return "fp8"
    return "fp4"


def _check_tensors(specs: list[WeightSpec], files: TensorFolder) -> list[str]:
    """Compare the headers with the name table; one line for each difference."""
    problems: list[str] = []
    left = {name for name in files.names() if not names.is_dropped_copy(name)}
    for spec in specs:
        for tensor in spec.tensors():
            if tensor.name not in files.where:
                problems.append(f"{tensor.name}: missing ({tensor.dtype} {list(tensor.shape)})")
                continue
            left.discard(tensor.name)
            entry = files.entry(tensor.name)
            if entry.shape != tensor.shape:
                problems.append(f"{tensor.name}: shape {list(entry.shape)}, expected {list(tensor.shape)}")
            if entry.dtype != tensor.dtype and not (entry.dtype == "U8" and tensor.dtype == "I8"):
                problems.append(f"{tensor.name}: dtype {entry.dtype}, expected {tensor.dtype}")
    return problems + [f"{name}: unexpected" for name in sorted(left)]


def _weight(spec: WeightSpec, files: TensorFolder) -> Weight:
    tensors = [files.tensor(tensor.name) for tensor in spec.tensors()]
    if spec.kind == "fp8":
        return Fp8Weight(tensors[0], tensors[1])
    if spec.kind == "fp4":
        return Fp4Weight(tensors[0].view(torch.uint8), tensors[1])
    return tensors[0]


def _check_values(
    config: V4Config, specs: list[WeightSpec], weights: Mapping[str, Weight], progress: Progress | None
) -> list[str]:
    """One pass over all bytes, on all cores; one line for each weight that holds a value that cannot be."""

    def check(spec: WeightSpec) -> list[str]:
        weight = weights[spec.name]
        if isinstance(weight, torch.Tensor):
            if not weight.is_floating_point():
                return _check_ids(config, spec.name, weight)
            return [f"{spec.name}{spec.suffix}: holds NaN"] if _holds_nan(weight) else []
        problems = [f"{spec.name}.scale: holds NaN (byte 255)"] if int(weight.scale.max()) == 255 else []
        if isinstance(weight, Fp8Weight) and _holds_nan(weight.data):
            problems.append(f"{spec.name}.weight: holds NaN")
        return problems

    problems: list[str] = []
    sizes = [sum(tensor.num_bytes for tensor in spec.tensors()) for spec in specs]
    total, done = sum(sizes), 0
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16), thread_name_prefix="check-weight") as pool:
        for size, found in zip(sizes, pool.map(check, specs), strict=True):
            problems += found
            done += size
            if progress is not None:
                progress(done, total)
    return problems


# torch dtype -> (view as integers, bits of the magnitude, largest magnitude that is a number or infinity)
_MAGNITUDES: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0x7E),  # has no infinity
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
}
_PIECE = 1 << 18


def _holds_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN, by integer comparison, in pieces that stay in a core's cache."""
    integers, bits, largest = _MAGNITUDES[tensor.dtype]
    flat = tensor.view(integers).view(-1).numpy()
    return any(int((flat[at : at + _PIECE] & bits).max()) > largest for at in range(0, len(flat), _PIECE))


def _check_ids(config: V4Config, name: str, table: torch.Tensor) -> list[str]:
    low, high = int(table.min()), int(table.max())
    if low >= 0 and high < config.n_routed_experts:
        return []
    return [f"{name}: holds expert ids {low}..{high}, expected 0..{config.n_routed_experts - 1}"]
