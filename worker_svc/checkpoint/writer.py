"""Write a checkpoint folder in the original format: config.json, one model.safetensors or shards with an index.

Streams: tensors are made one at a time, by name, when their bytes are due, so a folder may be far larger than memory.
config.json is written last: a folder whose writing was interrupted does not pass for a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.names import TensorSpec
from worker_svc.checkpoint.safetensors_file import DTYPES, INDEX_NAME, SINGLE_NAME

MakeTensor = Callable[[TensorSpec], torch.Tensor]
"""Gives the tensor of a spec: its shape, and its file dtype as `safetensors_file.DTYPES` maps it."""

DEFAULT_SHARD_BYTES = 4 << 30


def write_checkpoint(
    config: V4Config,
    specs: Sequence[TensorSpec],
    make: MakeTensor,
    out_dir: str | Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write `specs` to `out_dir` (created), in shards of at most `shard_bytes` (one tensor at least)."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan(specs, shard_bytes)
    total, done = sum(spec.num_bytes for spec in specs), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((spec.name for spec in shard), name)
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for spec in shard:
                file.write(_bytes(spec, make(spec)))
                done += spec.num_bytes
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    return folder


def _plan(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut into shards; widest elements first within one, so that every tensor lies aligned to its element."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return [sorted(shard, key=lambda spec: -DTYPES[spec.dtype][0]) for shard in shards]


def _header(shard: list[TensorSpec]) -> bytes:
    content: dict[str, object] = {}
    at = 0
    for spec in shard:
        offsets = [at, at + spec.num_bytes]
        content[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(spec: TensorSpec, tensor: torch.Tensor) -> memoryview:
    expected = DTYPES[spec.dtype][1]
    assert tensor.dtype == expected, f"{spec.name}: {tensor.dtype}, the file wants {expected}"
    assert tuple(tensor.shape) == spec.shape, f"{spec.name}: {tuple(tensor.shape)}, the file wants {spec.shape}"
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return flat.data
