"""Routing: sqrt(softplus) scores, biased top-k with lowest-index ties, weights normalised over the chosen experts.

`gate_scores`, `pick_experts` and `expert_weights` are the steps one by one; `select` and `select_hash` take router
logits to experts and weights in one call, on caller's outputs, and know padding tokens.
"""

from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.topk_gate import ref


def gate_scores(logits: Tensor) -> Tensor:
    """[S, E] router logits -> [S, E] scores, sqrt(softplus(logit))."""
    return ref.gate_scores(logits)


def pick_experts(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """[S, E] scores, [E] bias -> [S, K] int64: the K highest of score + bias, the lower index first among equals."""
    assert bias.shape == scores.shape[1:] and k <= scores.shape[1]
    return ref.pick_experts(scores, bias, k)


def expert_weights(scores: Tensor, experts: Tensor, factor: float) -> Tensor:
    """[S, E], [S, K] -> [S, K]: the chosen scores (without bias) over their sum, times `factor`."""
    assert scores.shape[0] == experts.shape[0]
    return ref.expert_weights(scores, experts, factor)


def select(
    logits: Tensor,
    bias: Tensor,
    experts: Tensor,
    weights: Tensor,
    factor: float,
    positions: Tensor | None = None,
) -> None:
    """FP32 logits [T, E], or [parts, T, E] to be summed, and bias [E] -> experts int32 [T, K], weights FP32 [T, K].

    A token with positions[t] < 0 is padding: expert -1, weight 0.
    """
    _check(logits, experts, weights)
    if registry.on_kernel("topk_gate", logits.is_cuda):
        from worker_svc.ops.topk_gate import triton

        triton.select(logits, bias, experts, weights, factor, positions)
    else:
        scores = gate_scores(ref.summed(logits))
        ref.write(scores, pick_experts(scores, bias, experts.shape[1]), experts, weights, factor, positions)


def select_hash(
    logits: Tensor,
    table: Tensor,
    ids: Tensor,
    experts: Tensor,
    weights: Tensor,
    factor: float,
    positions: Tensor | None = None,
) -> None:
    """As `select`, experts by token: table int32 [V, K], ids int32 or int64 [T]; logits give the weights alone."""
    _check(logits, experts, weights)
    assert table.shape[1] == experts.shape[1] and ids.shape == experts.shape[:1], (table.shape, ids.shape)
    if registry.on_kernel("topk_gate", logits.is_cuda):
        from worker_svc.ops.topk_gate import triton

        triton.select_hash(logits, table, ids, experts, weights, factor, positions)
    else:
        scores = gate_scores(ref.summed(logits))
        ref.write(scores, table[ids.long()].long(), experts, weights, factor, positions)


def _check(logits: Tensor, experts: Tensor, weights: Tensor) -> None:
    assert logits.dim() in (2, 3) and logits.is_contiguous(), logits.shape
    assert experts.shape == weights.shape and experts.shape[0] == logits.shape[-2], (experts.shape, logits.shape)
    assert experts.is_contiguous() and weights.is_contiguous()
