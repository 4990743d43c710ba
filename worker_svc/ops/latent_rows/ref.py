"""Query latent and KV row in plain torch, FP32 inside; only what is stored is rounded."""

import torch
from torch import Tensor

from worker_svc.ops import kv_rows, quant_fp8
from worker_svc.ops.kv_rows.ref import round_rows
from worker_svc.ops.partial_sums import added
from worker_svc.ops.rms_norm import rms_norm
from worker_svc.ops.rope import rotate_


def latent_rows(
    qkv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    turns: Tensor,
    positions: Tensor,
    window_write: Tensor,
    window_pool: Tensor,
    q_codes: Tensor,
    q_scale: Tensor,
    eps: float,
    workspace: Tensor | None,
    workspace_rows: Tensor | None,
) -> None:
    """See the door."""
    width = q_weight.shape[0]
    qkv = added(qkv, 2)
    latent, kv = qkv[:, :width].float(), qkv[:, width:].float()
    codes, exponent = quant_fp8.quantise(rms_norm(latent, q_weight, eps), quant_fp8.ACTIVATION_BLOCK)
    q_codes.copy_(codes)
    q_scale.copy_(quant_fp8.scale_value(exponent))
    rows = rotate_(rms_norm(kv, kv_weight, eps), turns_at(turns, positions))
    kv_rows.insert_rows(rows, window_pool, window_write)
    if workspace is not None and workspace_rows is not None:
        live = positions >= 0
        rounded = round_rows(rows, bf16=window_pool.shape[1] == kv_rows.BF16_PAGE_BYTES)
        workspace[workspace_rows[live].long()] = rounded[live].bfloat16()


def turns_at(turns: Tensor, positions: Tensor) -> Tensor:
    """complex64 [T, r/2] of a table FP32 [positions, r/2, 2]; padding tokens take position 0."""
    return torch.view_as_complex(turns[positions.clamp(min=0).long()])
