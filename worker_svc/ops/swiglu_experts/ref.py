"""Experts in plain torch: tokens grouped by expert, experts in ascending order.

The order of the additions into a token is its experts' ascending order, then the shared expert: fixed for the token,
whoever else is in the batch. The routing weight multiplies before w2, as in the published inference code (it matters
once w2's input is quantised).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.ops.matmul import matmul
from worker_svc.ops.quant_fp8 import quantise_rows

Activation = Callable[[Tensor, Tensor], Tensor]


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
    activate: Activation | None = None,
) -> Tensor:
    """See the door."""
    if round_input is not None:
        x = round_input(x)
    if x.shape[0] == 1:
        return _one_token(x, w13_t, w2_t, experts, weights, limit, deterministic, round_input, activate)
    out = torch.zeros_like(x)
    for expert, tokens, scale in _groups(experts, weights):
        hidden = matmul(x[tokens], w13_t[expert], deterministic=deterministic)
        inner = clamped_swiglu(hidden, limit).mul_(scale) if activate is None else activate(hidden, scale)
        if round_input is not None:
            inner = round_input(inner)
        part = matmul(inner, w2_t[expert], deterministic=deterministic)
        out.index_add_(0, tokens, part)
    hidden = matmul(x, w13_t[-1], deterministic=deterministic)
    inner = clamped_swiglu(hidden, limit) if activate is None else activate(hidden, x.new_ones(x.shape[0], 1))
    return out.add_(matmul(inner if round_input is None else round_input(inner), w2_t[-1], deterministic=deterministic))


def _one_token(
    x: Tensor,
    w13_t: Tensor,
    w2_t: Tensor,
    experts: Tensor,
    weights: Tensor,
    limit: float,
    deterministic: bool,
    round_input: Callable[[Tensor], Tensor] | None,
    activate: Activation | None,
) -> Tensor:
    """The same for a single token: one activation over all its experts instead of one for each. Same bits."""
    order = experts[0].argsort()
    chosen = [*experts[0][order].tolist(), -1]
    hidden = torch.cat([matmul(x, w13_t[expert], deterministic=deterministic) for expert in chosen])
    scale = weights[0][order].unsqueeze(1)
    if activate is None:
        inner = clamped_swiglu(hidden, limit)
        inner[:-1].mul_(scale)
    else:
        inner = activate(hidden, torch.cat([scale, scale.new_ones(1, 1)]))
    if round_input is not None:
        inner = round_input(inner)
    out = torch.zeros_like(x)
    for place, expert in enumerate(chosen):
        out.add_(matmul(inner[place : place + 1], w2_t[expert], deterministic=deterministic))
    return out


def _groups(experts: Tensor, weights: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens, their weights [n, 1]) by ascending expert; unused experts are skipped."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    tokens, scales = order // k, weights.flatten()[order].unsqueeze(1)
    groups: list[tuple[int, Tensor, Tensor]] = []
    end = 0
    for expert, count in enumerate(experts.flatten().bincount().tolist()):
        begin, end = end, end + count
        if count:
            groups.append((expert, tokens[begin:end], scales[begin:end]))
    return groups


def weighted(hidden: Tensor, weights: Tensor | None, limit: float) -> Tensor:
    """BF16 [R, I] of BF16 hidden [R, 2I], FP32 in between."""
    inner = clamped_swiglu(hidden.float(), limit)
    return (inner if weights is None else inner * weights.unsqueeze(1)).bfloat16()


def middle(hidden: Tensor, codes: Tensor, scale: Tensor, weights: Tensor | None, limit: float) -> None:
    """One stack of the door's `middle`."""
    quantise_rows(weighted(hidden, weights, limit), codes, scale)
