"""Routing: sqrt(softplus) scores, biased top-k with lowest-index ties, weights normalised over the chosen experts."""

from torch import Tensor

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
