"""Experts in plain torch: tokens grouped by expert, experts in ascending order.

The order of the additions into a token is its experts' ascending order, then the shared expert: fixed for the token,
whoever else is in the batch. The routing weight multiplies before w2, as in the published inference code (it matters
once w2's input is quantised).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.ops.matmul import matmul


def clamped_swiglu(hidden: Tensor, limit: float) -> Tensor:
    """The gate is clamped from above only, up on both sides. silu through exp: see topk_gate.ref for why."""
    gate, up = hidden.chunk(2, dim=-1)
    gate = gate.clamp_max(limit)
    return gate.div_(gate.neg().exp_().add_(1)).mul_(up.clamp(-limit, limit))


def swiglu_experts(
    x: Tensor,
    w13_t: Tensor,
    w2_t: Tensor,
    experts: Tensor,
    weights: Tensor,
    limit: float,
    deterministic: bool,
    round_input: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """See the door."""
    if round_input is not None:
        x = round_input(x)
    out = torch.zeros_like(x)
    for expert, tokens, scale in _groups(experts, weights):
        hidden = matmul(x if tokens is None else x[tokens], w13_t[expert], deterministic=deterministic)
        inner = clamped_swiglu(hidden, limit).mul_(scale)
        if round_input is not None:
            inner = round_input(inner)
        part = matmul(inner, w2_t[expert], deterministic=deterministic)
        out = out.add_(part) if tokens is None else out.index_add_(0, tokens, part)
    hidden = matmul(x, w13_t[-1], deterministic=deterministic)
    inner = clamped_swiglu(hidden, limit)
    return out.add_(matmul(inner if round_input is None else round_input(inner), w2_t[-1], deterministic=deterministic))


def _groups(experts: Tensor, weights: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
    """(expert, its tokens or None for all, their weights [n, 1]) by ascending expert; unused experts are skipped."""
    num_tokens, k = experts.shape
    if num_tokens == 1:
        return [
            (expert, None, weights[:, place : place + 1])
            for expert, place in sorted(zip(experts[0].tolist(), range(k)))
        ]
    order = experts.flatten().argsort(stable=True)
    tokens, scales = order // k, weights.flatten()[order].unsqueeze(1)
    groups: list[tuple[int, Tensor | None, Tensor]] = []
    end = 0
    for expert, count in enumerate(experts.flatten().bincount().tolist()):
        begin, end = end, end + count
        if count:
            groups.append((expert, tokens[begin:end], scales[begin:end]))
    return groups
