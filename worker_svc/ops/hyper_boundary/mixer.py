"""What a boundary is computed with: the mixer's parameters as the kernels read them, constants, and the workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STREAMS = 4
"""hc_mult of every published V4; the kernels are written out for it."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """hc_fn as the BF16 pair high + low, `both` [2, 32, 4 D] (16 bits of mantissa), with scale and base FP32.

    outputs is 24 (pre, post, comb; three scales) for a sublayer and 4 (one scale) for the head; rows behind are zero.
    """

    both: Tensor
    scale: Tensor
    base: Tensor

    @property
    def outputs(self) -> int:
        """Numbers per token."""
        return self.base.shape[0]

    @property
    def fn(self) -> Tensor:
        """hc_fn FP32 [outputs, 4 D], as far as the pair holds it."""
        return self.both[:, : self.outputs].float().sum(0)


@dataclass(frozen=True, slots=True)
class BoundaryRules:
    """hc_sinkhorn_iters, hc_eps, rms_norm_eps."""

    iterations: int
    eps: float
    norm_eps: float


def prepare_mixer(fn: Tensor, scale: Tensor, base: Tensor) -> Mixer:
    """fn FP32 [24, 4 D] with scale [3], or [4, 4 D] with scale [1]; base [24] or [4]. As the checkpoint holds them."""
    assert fn.shape[1] % STREAMS == 0 and base.shape == fn.shape[:1], (fn.shape, base.shape)
    assert (fn.shape[0], scale.numel()) in ((24, 3), (4, 1)), (fn.shape, scale.shape)
    both = torch.zeros(2, 32, fn.shape[1], dtype=torch.bfloat16, device=fn.device)
    both[0, : fn.shape[0]] = fn
    both[1, : fn.shape[0]] = fn - both[0, : fn.shape[0]].float()
    return Mixer(both, scale.float().contiguous(), base.float().contiguous())


class Workspace:
    """Partial sums between the two calls of a boundary: one serves all boundaries that run on one stream."""

    COLUMNS = 42  # 32 mixer outputs, then the 10 products of streams (or the one sum of squares)

    def __init__(self, max_tokens: int, width: int, device: torch.device | str) -> None:
        # The number of splits falls as tokens rise (see triton.py); 64 tokens' worth of the finest split is the floor.
        splits = -(-width // 64)
        floats = max(64 * splits, max_tokens * 8) * self.COLUMNS
        self.partials = torch.empty(floats if str(device) != "cpu" else 0, dtype=torch.float32, device=device)
