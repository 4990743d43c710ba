"""Mixture of clamped-SwiGLU experts, the shared expert included as the last of the stack."""

from collections.abc import Callable

from torch import Tensor

from worker_svc.ops.swiglu_experts import ref


def swiglu_experts(
    x: Tensor,
    w13_t: Tensor,
    w2_t: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    limit: float,
    deterministic: bool = False,
    round_input: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """x [S, D] -> [S, D].

    w13_t [E+1, D, 2I] (gate then up), w2_t [E+1, I, D]; expert E is the shared one, applied to every token with
    weight 1. experts [S, K] int64 distinct in each row, weights [S, K]. `round_input` quantises the input of each
    product (activations in FP8); None leaves it exact.
    """
    assert experts.shape == weights.shape and experts.shape[0] == x.shape[0]
    assert w13_t.shape[1] == x.shape[1] == w2_t.shape[2] and w13_t.shape[2] == 2 * w2_t.shape[1]
    return ref.swiglu_experts(x, w13_t, w2_t, experts, weights, limit, deterministic, round_input)


def clamped_swiglu(hidden: Tensor, limit: float) -> Tensor:
    """[..., 2I] (gate then up) -> [..., I]: silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return ref.clamped_swiglu(hidden, limit)
