"""Manifold-constrained hyper-connections: N residual streams, collapsed before a sublayer and mixed after it."""

import torch
from torch import Tensor

from worker_svc.model.glue import Glue
from worker_svc.model.norm import RMSNorm
from worker_svc.ops.matmul import matmul


class HyperConnection:
    """The mixer around one sublayer: hc_fn [(2+N)N, N*D], base [(2+N)N], scale [3] (pre, post, comb)."""

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, glue: Glue) -> None:
        n = glue.shapes.streams
        self.base, self.glue = base, glue
        self.fn_t = _scaled(fn, torch.repeat_interleave(scale, torch.tensor([n, n, n * n])))

    def collapse(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """x [S, N, D] -> the sublayer's normed input [S, D], post [S, N], comb [S, N, N]."""
        return self.glue.boundary(_mixes(x, self.fn_t, self.glue), x, self.base, norm.weight)

    def expand(self, out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Write the sublayer's output [S, D] back into the streams: the transpose of comb mixes the old ones."""
        return self.glue.expand(out, x, post, comb)


class HyperHead:
    """The last collapse: hc_head_fn [N, N*D], base [N], scale [1]."""

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, glue: Glue) -> None:
        self.fn_t, self.base, self.glue = _scaled(fn, scale), base, glue

    def __call__(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [S, N, D] -> normed [S, D]."""
        return self.glue.head(_mixes(x, self.fn_t, self.glue), x, self.base, norm.weight)


def _scaled(fn: Tensor, scale: Tensor) -> Tensor:
    """The projection with each output's scale folded in, input-major."""
    return (fn * scale.unsqueeze(1)).t().contiguous()


def _mixes(x: Tensor, fn_t: Tensor, glue: Glue) -> Tensor:
    """The mixer's projection of the flattened streams; the glue applies the factor of their RMS norm to it."""
    return matmul(x.flatten(1), fn_t, deterministic=glue.deterministic)
