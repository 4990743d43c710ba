"""Mixture of clamped-SwiGLU experts, the shared expert included as the last of the stack.

`swiglu_experts` is the whole of it on the CPU. `middle` is what lies between the two products on a GPU, for routed
and shared rows in one launch: clamp, SiLU, routing weight, rounding to BF16, quantisation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.swiglu_experts import ref

Activation = ref.Activation


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
    activate: Activation | None = None,
) -> Tensor:
    """x [S, D] -> [S, D].

    w13_t [E+1, D, 2I] (gate then up), w2_t [E+1, I, D]; expert E is the shared one, applied to every token with
    weight 1. experts [S, K] int64 distinct in each row, weights [S, K]. `round_input` quantises the input of each
    product (activations in FP8); None leaves it exact. `activate(hidden [R, 2I], scale [R, 1])` computes
    clamped_swiglu(hidden, limit) * scale in place of plain torch.
    """
    assert experts.shape == weights.shape and experts.shape[0] == x.shape[0]
    assert w13_t.shape[1] == x.shape[1] == w2_t.shape[2] and w13_t.shape[2] == 2 * w2_t.shape[1]
    return ref.swiglu_experts(x, w13_t, w2_t, experts, weights, limit, deterministic, round_input, activate)


def clamped_swiglu(hidden: Tensor, limit: float) -> Tensor:
    """[..., 2I] (gate then up) -> [..., I]: silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return ref.clamped_swiglu(hidden, limit)


@dataclass(frozen=True, slots=True)
class Hidden:
    """One stack of rows: hidden BF16 [R, 2I] in (gate then up), codes E4M3 [R, I] and scale FP32 [R, I / 128] out.

    weights FP32 [R] multiply before the rounding; None leaves rows as they are (the shared expert). scale may have
    any strides.
    """

    hidden: Tensor
    codes: Tensor
    scale: Tensor
    weights: Tensor | None = None


def middle(routed: Hidden, shared: Hidden | None, limit: float) -> None:
    """codes, scale = FP8(BF16(weight * silu(min(gate, limit)) * clamp(up, -limit, limit))) of both stacks."""
    for stack in (routed, shared):
        if stack is not None:
            assert stack.hidden.shape == (stack.codes.shape[0], 2 * stack.codes.shape[1]), stack.hidden.shape
            assert stack.hidden.is_contiguous() and stack.codes.is_contiguous() and stack.codes.shape[1] % 128 == 0
            assert stack.scale.shape == (stack.codes.shape[0], stack.codes.shape[1] // 128), stack.scale.shape
    if registry.on_kernel("swiglu_middle", routed.hidden.is_cuda):
        from worker_svc.ops.swiglu_experts import triton

        triton.middle(routed, shared, limit)
    else:
        ref.middle(routed.hidden, routed.codes, routed.scale, routed.weights, limit)
        if shared is not None:
            ref.middle(shared.hidden, shared.codes, shared.scale, shared.weights, limit)


def middle_bf16(hidden: Tensor, weights: Tensor, out: Tensor, limit: float) -> None:
    """The same without quantisation: out BF16 [R, I], for products of BF16 activations."""
    assert hidden.shape == (out.shape[0], 2 * out.shape[1]) and hidden.is_contiguous() and out.is_contiguous()
    if registry.on_kernel("swiglu_middle", hidden.is_cuda):
        from worker_svc.ops.swiglu_experts import triton

        triton.middle_bf16(hidden, weights, out, limit)
    else:
        out.copy_(ref.weighted(hidden, weights, limit))
