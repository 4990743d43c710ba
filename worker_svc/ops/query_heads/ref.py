"""Query heads in plain torch. The indexer's rotated query is rounded to BF16 before the transform, as on a GPU, where
the transform is a product with a matrix of +-1 on the tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_svc.ops import quant_fp8
from worker_svc.ops.hadamard import hadamard
from worker_svc.ops.rms_norm import rms_norm
from worker_svc.ops.rope import rotate_

if TYPE_CHECKING:
    from worker_svc.ops.query_heads import IndexQuery


def query_heads(q: Tensor, turns: Tensor, positions: Tensor, out: Tensor, eps: float, index: IndexQuery | None) -> None:
    """q, out [T, H, 512]; see the door."""
    at = torch.view_as_complex(turns[positions.clamp(min=0).long()]).unsqueeze(1)
    out.copy_(rotate_(rms_norm(q.float(), None, eps), at))
    if index is None:
        return
    tokens, heads = index.weights.shape
    raw = index.raw.float().reshape(tokens, heads, -1)
    width = raw.shape[2]
    turned = hadamard(rotate_(raw, at).bfloat16().float())
    codes, exponent = quant_fp8.quantise(turned, quant_fp8.ACTIVATION_BLOCK)
    index.codes.view(torch.uint8).zero_()[:, :heads] = codes.view(torch.uint8)
    index.folded.zero_()
    index.folded[:, :heads] = index.weights * (width**-0.5 * heads**-0.5) * quant_fp8.scale_value(exponent)[..., 0]
