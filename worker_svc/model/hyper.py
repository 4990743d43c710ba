"""Manifold-constrained hyper-connections: N residual streams, collapsed before a sublayer and mixed after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops.hyper_mix import collapse, expand, mix_weights
from worker_svc.ops.matmul import matmul
from worker_svc.ops.rms_norm import inverse_rms


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """What all mixers of a model share."""

    streams: int
    iterations: int
    eps: float
    norm_eps: float
    deterministic: bool


class HyperConnection:
    """The mixer around one sublayer: hc_fn [(2+N)N, N*D], base [(2+N)N], scale [3] (pre, post, comb)."""

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, shared: HyperParameters) -> None:
        n = shared.streams
        self.base, self.shared = base, shared
        self.fn_t = _scaled(fn, torch.repeat_interleave(scale, torch.tensor([n, n, n * n])))

    def collapse(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [S, N, D] -> the sublayer's input [S, D], post [S, N], comb [S, N, N]."""
        s = self.shared
        mixes = _mixes(x, self.fn_t, self.base, s)
        pre, post, comb = mix_weights(mixes, s.streams, s.iterations, s.eps)
        return collapse(x, pre), post, comb

    def expand(self, out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Write the sublayer's output [S, D] back into the streams: the transpose of comb mixes the old ones."""
        return expand(out, x, post, comb, deterministic=self.shared.deterministic)


class HyperHead:
    """The last collapse: hc_head_fn [N, N*D], base [N], scale [1]."""

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, shared: HyperParameters) -> None:
        self.fn_t, self.base, self.shared = _scaled(fn, scale), base, shared

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, N, D] -> [S, D]."""
        gates = _mixes(x, self.fn_t, self.base, self.shared)
        # 1 / (1 + exp(-v)): torch's sigmoid rounds the last elements of an array differently.
        return collapse(x, gates.neg().exp_().add_(1).reciprocal_().add_(self.shared.eps))


def _scaled(fn: Tensor, scale: Tensor) -> Tensor:
    """The projection with each output's scale folded in, input-major."""
    return (fn * scale.unsqueeze(1)).t().contiguous()


def _mixes(x: Tensor, fn_t: Tensor, base: Tensor, shared: HyperParameters) -> Tensor:
    """The mixer's projection of the RMS-normed flattened streams; the norm's factor is applied after the product."""
    flat = x.flatten(1)
    mixes = matmul(flat, fn_t, deterministic=shared.deterministic)
    return mixes.mul_(inverse_rms(flat, shared.norm_eps)).add_(base)
