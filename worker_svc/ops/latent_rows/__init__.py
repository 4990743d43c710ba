"""What follows the first attention projection: the query latent, normed and quantised, and the token's KV row, stored.

One launch on a GPU. The KV row is normed, rotated, rounded to the pool's format and written to the window ring; prefill
also gets it, as it reads back, in the BF16 workspace. Projections and attention are elsewhere.
"""

import torch
from torch import Tensor

from worker_svc.ops.kv_rows import BF16_PAGE_BYTES, FP8_PAGE_BYTES, HEAD_DIM
from worker_svc.ops.latent_rows import ref

__all__ = ["latent_rows"]


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
    *,
    eps: float,
    workspace: Tensor | None = None,
    workspace_rows: Tensor | None = None,
) -> None:
    """qkv BF16 [T, q_lora + 512] (any row stride), or FP32 [parts, T, q_lora + 512] of a split product, to be added up;
    norm weights FP32 [q_lora] and [512], turns FP32 [positions, 32, 2].

    Writes q_codes e4m3 [T, q_lora] and q_scale FP32 [T, q_lora / 128] (any strides) of the normed latent, the KV row
    into row window_write[t] of window_pool (-1: nowhere), and the rounded row into workspace[workspace_rows[t]].
    """
    tokens, width = positions.shape[0], q_weight.shape[0]
    assert qkv.shape[-2:] == (tokens, width + HEAD_DIM) and qkv.stride(-1) == 1, qkv.shape
    assert qkv.dtype == (torch.bfloat16 if qkv.dim() == 2 else torch.float32), (qkv.shape, qkv.dtype)
    assert q_codes.shape == (tokens, width) and q_codes.is_contiguous() and width % 128 == 0, q_codes.shape
    assert q_scale.shape == (tokens, width // 128) and q_scale.dtype == torch.float32, q_scale.shape
    assert q_weight.dtype == kv_weight.dtype == turns.dtype == torch.float32 and kv_weight.shape == (HEAD_DIM,)
    assert turns.shape[1:] == (32, 2) and turns.is_contiguous(), turns.shape
    assert window_pool.dtype == torch.uint8 and window_pool.shape[1] in (FP8_PAGE_BYTES, BF16_PAGE_BYTES)
    assert positions.dtype == window_write.dtype == torch.int32 and window_write.shape == positions.shape
    assert (workspace is None) == (workspace_rows is None)
    args = (qkv, q_weight, kv_weight, turns, positions, window_write, window_pool, q_codes, q_scale)
    if qkv.is_cuda:
        from worker_svc.ops.latent_rows import triton

        triton.latent_rows(*args, eps=eps, workspace=workspace, workspace_rows=workspace_rows)
    else:
        ref.latent_rows(*args, eps, workspace, workspace_rows)
