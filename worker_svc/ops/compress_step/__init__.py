"""Compressors of one layer on paged state: keep each token's state in its ring, write the entries that tokens close.

`compress_step` serves decode and verify rows (one launch on a GPU), `compress_chunk` prefill chunks of any length: its
entries must be made before the ring is overwritten (two launches). A token's state is (kv, z) of the main compressor,
then, in C4 layers, of the indexer's; `ape` is added to z here, by absolute position. A token closes entry
positions[t] // ratio iff write_rows[t] >= 0. What comes out is normed, rotated at the entry's first position, and for
the indexer Hadamard-transformed, then quantised into the pools.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops.compress_step import ref
from worker_svc.ops.kv_rows import BF16_PAGE_BYTES, FP8_PAGE_BYTES, HEAD_DIM, INDEX_DIM, INDEX_PAGE_BYTES

__all__ = ["IndexCompressor", "compress_chunk", "compress_step", "state_width"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCompressor:
    """The indexer's side of a C4 layer: norm FP32 [128] and the index pool uint8 [pages, 8448]."""

    norm: Tensor
    pool: Tensor


def state_width(ratio: int) -> int:
    """Floats of one token's state."""
    return 4 * (HEAD_DIM + INDEX_DIM) if ratio == 4 else 2 * HEAD_DIM


def compress_step(
    raw: Tensor,
    ape: Tensor,
    norm: Tensor,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    first_token: Tensor,
    states: Tensor,
    write_rows: Tensor,
    pool: Tensor,
    *,
    ratio: int,
    ring: int,
    eps: float,
    index: IndexCompressor | None = None,
) -> None:
    """raw FP32 [T, >= W] (any row stride), ape FP32 [ratio, W] with zeros in the kv columns, norm FP32 [512], turns
    FP32 [positions, 32, 2], states FP32 [slots * ring, W] addressed by slot * ring + position % ring.

    first_token int32 [T]: index of the first token of the token's row; earlier states come from the ring, later ones
    from `raw`. With rows of k tokens, ring >= 8 + k - 1 (C4) or 128 + k - 1 (C128), for all of it happens at once.
    """
    args = (raw, ape, norm, turns, positions, slots, first_token, states, write_rows, pool)
    _check(*args, ratio=ratio, ring=ring, index=index)
    if raw.is_cuda:
        from worker_svc.ops.compress_step import triton

        triton.compress_step(*args, ratio=ratio, ring=ring, eps=eps, index=index)
    else:
        ref.compress(*args, None, ratio, ring, eps, index)


def compress_chunk(
    raw: Tensor,
    ape: Tensor,
    norm: Tensor,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    first_token: Tensor,
    last_position: Tensor,
    states: Tensor,
    write_rows: Tensor,
    pool: Tensor,
    *,
    ratio: int,
    ring: int,
    eps: float,
    index: IndexCompressor | None = None,
) -> None:
    """As `compress_step` for rows longer than the ring; last_position int32 [T] is that of the row's last token."""
    args = (raw, ape, norm, turns, positions, slots, first_token, states, write_rows, pool)
    _check(*args, ratio=ratio, ring=ring, index=index)
    assert last_position.dtype == torch.int32 and last_position.shape == positions.shape
    if raw.is_cuda:
        from worker_svc.ops.compress_step import triton

        triton.compress_chunk(*args, last_position, ratio=ratio, ring=ring, eps=eps, index=index)
    else:
        ref.compress(*args, last_position, ratio, ring, eps, index)


def _check(
    raw: Tensor,
    ape: Tensor,
    norm: Tensor,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    first_token: Tensor,
    states: Tensor,
    write_rows: Tensor,
    pool: Tensor,
    *,
    ratio: int,
    ring: int,
    index: IndexCompressor | None,
) -> None:
    width = state_width(ratio)
    assert ratio in (4, 128) and (index is not None) == (ratio == 4), ratio
    assert ring >= (8 if ratio == 4 else 128), (ratio, ring)
    assert raw.dtype == torch.float32 and raw.shape[1] >= width and raw.stride(1) == 1, (raw.dtype, raw.shape)
    assert ape.shape == (ratio, width) and states.shape[1] == width and states.is_contiguous(), (
        ape.shape,
        states.shape,
    )
    assert states.shape[0] % ring == 0 and norm.shape == (HEAD_DIM,) and turns.shape[1:] == (32, 2)
    for tensor in (ape, norm, turns, states):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    for tensor in (positions, slots, first_token, write_rows):
        assert tensor.dtype == torch.int32 and tensor.shape == raw.shape[:1], (tensor.dtype, tensor.shape)
    assert pool.dtype == torch.uint8 and pool.shape[1] in (FP8_PAGE_BYTES, BF16_PAGE_BYTES), pool.shape
    if index is not None:
        assert index.norm.shape == (INDEX_DIM,) and index.pool.shape[1] == INDEX_PAGE_BYTES, index.pool.shape
