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
