"""The boundary in plain torch, with the roundings of the kernels: BF16 streams and BF16 input, FP32 in between."""

from __future__ import annotations

import torch
from torch import Tensor

from worker_svc.ops import invariant
from worker_svc.ops.hyper_boundary.mixer import STREAMS, BoundaryRules, Mixer
from worker_svc.ops.hyper_mix import collapse, expand
from worker_svc.ops.hyper_mix.ref import mix_weights
from worker_svc.ops.matmul import matmul
from worker_svc.ops.partial_sums import added
from worker_svc.ops.quant_fp8 import ACTIVATION_BLOCK, quantise, scale_value
from worker_svc.ops.rms_norm import inverse_rms, rms_norm


def embed_mix(ids: Tensor, embed: Tensor, x_out: Tensor) -> None:
    """See the door."""
    x_out.copy_(embed[ids.long()].unsqueeze(1).expand_as(x_out))


def post_mix(
    x_in: Tensor,
    x_out: Tensor,
    post: Tensor,
    comb: Tensor,
    out: Tensor | None,
    rows: Tensor | None,
    shared: Tensor | None,
) -> None:
    """See the door."""
    tokens, _, width = x_in.shape
    if out is None:
        assert rows is not None and shared is not None
        sublayer = rows.view(tokens, -1, width).float().sum(1) + shared.float()
    else:
        sublayer = added(out, 2).float()
    mixed = expand(sublayer, x_in.float(), post, comb.view(-1, STREAMS, STREAMS), deterministic=invariant.on())
    x_out.copy_(mixed)


def pre_norm(
    x: Tensor,
    mixer: Mixer,
    norm_weight: Tensor,
    rules: BoundaryRules,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    q: Tensor | None,
    sf: Tensor | None,
    sf2: Tensor | None,
) -> None:
    """See the door."""
    sizes = torch.tensor([STREAMS, STREAMS, STREAMS * STREAMS], device=x.device)
    mixes = _mixes(x, mixer, torch.repeat_interleave(mixer.scale, sizes), rules)
    pre, new_post, new_comb = mix_weights(mixes, STREAMS, rules.iterations, rules.eps)
    post.copy_(new_post)
    comb.copy_(new_comb.flatten(1))
    collapsed = collapse(x.float(), pre).bfloat16().float()
    y.copy_(rms_norm(collapsed, norm_weight.float(), rules.norm_eps))
    if q is None:
        return
    assert sf is not None
    codes, exponent = quantise(y.float(), ACTIVATION_BLOCK)
    q.copy_(codes)
    sf.copy_(scale_value(exponent))
    if sf2 is not None:
        sf2.copy_(sf)


def head_norm(x: Tensor, mixer: Mixer, norm_weight: Tensor, rules: BoundaryRules, rows: Tensor, z: Tensor) -> None:
    """See the door."""
    chosen = x[rows.long()]
    pre = _mixes(chosen, mixer, mixer.scale, rules).sigmoid() + rules.eps
    collapsed = collapse(chosen.float(), pre).bfloat16().float()
    z.copy_(rms_norm(collapsed, norm_weight.float(), rules.norm_eps))


def _mixes(x: Tensor, mixer: Mixer, scale: Tensor, rules: BoundaryRules) -> Tensor:
    flat = x.flatten(1).float()
    return (
        matmul(flat, mixer.fn.t(), deterministic=invariant.on()) * inverse_rms(flat, rules.norm_eps) * scale
        + mixer.base
    )
