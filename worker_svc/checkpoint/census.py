"""Count of tensors and bytes of a checkpoint, from its config alone.

The two published checkpoints state both numbers in their index, so the name table can be proved complete
without downloading a byte.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from importlib import resources

from worker_svc.checkpoint import names
from worker_svc.checkpoint.config import V4Config

PUBLISHED = {"flash": (69_187, 159_609_485_896), "pro": (145_116, 864_704_792_696)}
"""Preset -> (tensors, bytes) that DeepSeek's index files state."""

PRESETS = ("tiny", "nano", "flash", "pro")


@dataclass(frozen=True, slots=True)
class Census:
    """What a checkpoint holds: tensors, bytes, tensors by dtype."""

    num_tensors: int
    num_bytes: int
    by_dtype: dict[str, int]


def preset(name: str) -> V4Config:
    """One of the shipped configs: tiny (every layer type, for tests), nano, flash, pro."""
    if name not in PRESETS:
        raise ValueError(f"config {name!r} is not known; there are {', '.join(PRESETS)}")
    text = resources.files("worker_svc.checkpoint").joinpath("configs", f"{name}.json").read_text("utf-8")
    return V4Config.from_dict(json.loads(text), source=f"configs/{name}.json")


def census(config: V4Config, expert_format: names.ExpertFormat = "fp4") -> Census:
    """Count the tensors that the name table expects for `config`."""
    by_dtype: Counter[str] = Counter()
    num_bytes = 0
    for spec in names.tensors(config, expert_format):
        by_dtype[spec.dtype] += 1
        num_bytes += spec.num_bytes
    return Census(by_dtype.total(), num_bytes, dict(by_dtype))
