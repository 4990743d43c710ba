"""Routing in plain torch.

Of the transcendental functions only exp and log1p are used: torch's sigmoid and softplus take another code path for
the last elements of an array, so their bits depend on the batch; these two do not (measured).
"""

import torch
from torch import Tensor


def gate_scores(logits: Tensor) -> Tensor:
    """sqrt(max(v, 0) + log1p(exp(-|v|)))."""
    softplus = logits.abs().neg_().exp_().log1p_().add_(logits.clamp_min(0))
    return softplus.sqrt_()


def pick_experts(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """A stable descending sort keeps equal values in index order."""
    return torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :k]


def expert_weights(scores: Tensor, experts: Tensor, factor: float) -> Tensor:
    """Normalised before scaling; the bias never enters a weight."""
    chosen = scores.gather(1, experts)
    return chosen.div_(chosen.sum(-1, keepdim=True)).mul_(factor)


def summed(logits: Tensor) -> Tensor:
    """[T, E] of logits that may come in parts; a copy, because the steps above work in place."""
    return logits.sum(0) if logits.dim() == 3 else logits.clone()


def write(
    scores: Tensor, chosen: Tensor, experts: Tensor, weights: Tensor, factor: float, positions: Tensor | None
) -> None:
    """The outputs of `select`: chosen int64 [T, K] and its weights, padding tokens blanked."""
    experts.copy_(chosen)
    weights.copy_(expert_weights(scores, chosen, factor))
    if positions is not None:
        padding = (positions < 0).unsqueeze(1)
        experts.masked_fill_(padding, -1)
        weights.masked_fill_(padding, 0.0)
