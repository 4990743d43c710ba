"""Rotary tables: frequencies of a layer type, with YaRN where the config asks, and unit complex turns by position.

Window-only layers turn by rope_theta without scaling; C4 and C128 layers (queries, window keys, entries and indexer
alike) by compress_rope_theta with YaRN. Nothing is multiplied into cos, sin or the softmax scale.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.checkpoint.config import RopeScaling, V4Config

_TABLE_STEP = 256


def frequencies(config: V4Config, *, compressed: bool) -> Tensor:
    """[r/2] FP32 angles per position."""
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    plain = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if not compressed or config.rope_scaling is None:
        return plain
    return _yarn(plain, width, base, config.rope_scaling)


def _yarn(plain: Tensor, width: int, base: float, scaling: RopeScaling) -> Tensor:
    """Blend each frequency with itself / factor, by how many turns it makes in the original context."""

    def pair_of(turns: float) -> float:
        period = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return width * math.log(period) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high: float = min(math.ceil(pair_of(scaling.beta_slow)), width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


@dataclass(frozen=True, slots=True)
class Turns:
    """Unit complex turns of a step's tokens [S, r/2], and the inverse ones, which the attention output needs."""

    forward: Tensor
    inverse: Tensor


class RopeTable:
    """Turns e^(i p f) for every position below `positions`, complex64 [positions, r/2].

    A table, not a computation per step: the same position always gives the same bits.
    """

    def __init__(self, freqs: Tensor, positions: int) -> None:
        rounded = -(-positions // _TABLE_STEP) * _TABLE_STEP
        angles = torch.arange(rounded, dtype=torch.float32).unsqueeze(1) * freqs
        self.turns = torch.complex(angles.cos(), angles.sin())
        self.inverse = torch.complex(angles.cos(), -angles.sin())

    def at(self, positions: Tensor) -> Turns:
        """Turns of positions [S]."""
        return Turns(self.turns.index_select(0, positions), self.inverse.index_select(0, positions))
