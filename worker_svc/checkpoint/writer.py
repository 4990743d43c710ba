"""Write a checkpoint folder in the original format: config.json, one model.safetensors or shards with an index.

Streams: weights are made when their bytes are due, a few ahead by threads, so a folder may be far larger than memory.
config.json is written last: a folder whose writing was interrupted does not pass for a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.names import TensorSpec, WeightSpec
from worker_svc.checkpoint.safetensors_file import DTYPES, INDEX_NAME, SINGLE_NAME

MakeWeight = Callable[[WeightSpec], tuple[torch.Tensor, ...]]
"""Gives the tensors of a weight, in the order of `WeightSpec.tensors`, with the dtypes of `safetensors_file.DTYPES`.

Called from several threads at once, never twice for a weight.
"""

DEFAULT_SHARD_BYTES = 4 << 30
_MAX_WORKERS = 16


def write_checkpoint(
    config: V4Config,
    weights: Sequence[WeightSpec],
    make: MakeWeight,
    out_dir: str | Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write `weights` to `out_dir` (created), in shards of at most `shard_bytes` (one weight at least)."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan(weights, shard_bytes)
    total, done = sum(_num_bytes(weight) for weight in weights), 0
    weight_map: dict[str, str] = {}
    made = _ahead(make, (weight for shard in shards for weight in shard))
    for number, shard in enumerate(shards, 1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        specs = [spec for weight in shard for spec in weight.tensors()]
        weight_map |= dict.fromkeys((spec.name for spec in specs), name)
        with (folder / name).open("wb") as file:
            file.write(_header(specs))
            for weight in shard:
                for spec, tensor in zip(weight.tensors(), next(made), strict=True):
                    file.write(_bytes(spec, tensor))
                done += _num_bytes(weight)
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    return folder


def _ahead(make: MakeWeight, weights: Iterable[WeightSpec]) -> Iterator[tuple[torch.Tensor, ...]]:
    """`make` of each weight in order; as many in the making as there are cores."""
    workers = min(os.cpu_count() or 1, _MAX_WORKERS)
    waiting: deque[Future[tuple[torch.Tensor, ...]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="make-weight") as pool:
        for weight in weights:
            waiting.append(pool.submit(make, weight))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _num_bytes(weight: WeightSpec) -> int:
    return sum(spec.num_bytes for spec in weight.tensors())


def _plan(weights: Sequence[WeightSpec], shard_bytes: int) -> list[list[WeightSpec]]:
    """Cut into shards; widest elements first within one, so that every tensor lies aligned to its element."""
    shards: list[list[WeightSpec]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + _num_bytes(weight) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += _num_bytes(weight)
    return [sorted(shard, key=lambda weight: -DTYPES[weight.tensors()[0].dtype][0]) for shard in shards]


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
