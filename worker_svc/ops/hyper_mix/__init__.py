"""Mixing weights of the hyper-connections (mHC) and the two mixes that use them.

N residual streams; `mixes` are the (2 + N) N raw numbers of one token: N pre, N post, N x N comb (row-major).
"""

from torch import Tensor

from worker_svc.ops.hyper_mix import host, ref


def mix_weights(mixes: Tensor, streams: int, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """[S, (2+N)N], scale and base applied -> pre [S, N], post [S, N], comb [S, N, N] (doubly stochastic)."""
    assert mixes.dim() == 2 and mixes.shape[1] == (2 + streams) * streams, mixes.shape
    weights = host.mix_weights if mixes.device.type == "cpu" else ref.mix_weights
    return weights(mixes, streams, iterations, eps)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """x [S, N, D], pre [S, N] -> sum_j pre[j] x[j], [S, D]."""
    assert x.shape[:2] == pre.shape
    return ref.collapse(x, pre)


def expand(out: Tensor, x: Tensor, post: Tensor, comb: Tensor, *, deterministic: bool = False) -> Tensor:
    """out [S, D] of the sublayer, x [S, N, D] -> post[k] out + sum_j comb[j, k] x[j], [S, N, D]."""
    assert comb.shape == (*x.shape[:2], x.shape[1]) and out.shape == (x.shape[0], x.shape[2])
    return ref.expand_exact_order(out, x, post, comb) if deterministic else ref.expand(out, x, post, comb)
