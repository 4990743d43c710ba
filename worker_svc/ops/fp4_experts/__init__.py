"""Routed FP4 experts of one layer on quantised tokens: sort, w13, middle, w2. The door and its weight container.

`load_experts` takes the checkpoint's bytes and picks a backend; `run` returns one row per (token, choice), the routing
weight already in it, for the combine that is part of the next mHC boundary. Nothing in `run` waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.swiglu_experts import Hidden

Activation = Literal["fp8", "bf16"]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A layer's routed experts as the checkpoint stores them, stacked; all uint8.

    w13 [E, 2I, D / 2]: the gate's rows (w1), then up's (w3), low nibble first; w13_scale [E, 2I, D / 32] E8M0;
    w2 [E, D, I / 2], w2_scale [E, D, I / 32].
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    def __post_init__(self) -> None:
        experts, double, half = self.w13.shape
        hidden, inner = half * 2, double // 2
        assert self.w13_scale.shape == (experts, double, hidden // 32), self.w13_scale.shape
        assert self.w2.shape == (experts, hidden, inner // 2), self.w2.shape
        assert self.w2_scale.shape == (experts, hidden, inner // 32), self.w2_scale.shape
        assert all(t.dtype == torch.uint8 for t in (self.w13, self.w13_scale, self.w2, self.w2_scale))

    @property
    def hidden(self) -> int:
        """D."""
        return self.w2.shape[1]

    @property
    def inner(self) -> int:
        """I."""
        return self.w13.shape[1] // 2


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """How a step of so many tokens runs: block size of the sort, and the tiles of both products (backend's own).

    invariant: tiles and kernels are those of deterministic mode (`ops.invariant`).
    """

    tokens: int
    block: int
    up: str = ""
    down: str = ""
    invariant: bool = False


class Fp4Experts(Protocol):
    """One layer's experts, loaded."""

    name: str
    activation: Activation

    def plan(self, tokens: int, k: int) -> ExpertPlan:
        """Tiles for `tokens` tokens of k experts each; remembered, cheap."""
        ...

    def prepare(self, steps: Iterable[int], k: int) -> int:
        """Compile the kernels of steps of so many tokens; how many there are."""
        ...

    def run(
        self,
        plan: ExpertPlan,
        x: Tensor,
        scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        shared: Hidden | None = None,
    ) -> Tensor:
        """x E4M3 [T, D] with row-major FP32 scale [T, D / 128] (activation fp8), or BF16 x and no scale (bf16).

        ids int32 [T, K], -1 for padding tokens, weights FP32 [T, K] -> BF16 [T * K, D]; rows of padding tokens hold
        anything. `shared`: the shared expert's middle, done in the same launch (fp8 only).
        """
        ...


def load_experts(
    packed: PackedExperts, *, limit: float, backend: str | None = None, activation: Activation = "fp8"
) -> Fp4Experts:
    """Experts on the device of `packed`. backend None: the registry's choice on a GPU, torch on the CPU.

    Raises ImportError, naming the package, if the backend cannot run here; ValueError for an unknown backend.
    """
    chosen = backend or (registry.backend("experts") if packed.w13.is_cuda else "torch")
    if chosen == "torch":
        from worker_svc.ops.fp4_experts.ref import TorchExperts

        return TorchExperts(packed, limit, activation)
    if chosen == "humming":
        from worker_svc.ops.fp4_experts.humming import HummingExperts

        return HummingExperts(packed, limit, activation)
    raise ValueError(f"--kernel experts={chosen}: choose one of humming, torch")
