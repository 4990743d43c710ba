"""Paged compression in plain torch: gathers each closed window, compresses, writes; then the states go to the ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_svc.ops import kv_rows
from worker_svc.ops.compress_kv import compress_kv
from worker_svc.ops.hadamard import hadamard
from worker_svc.ops.rms_norm import rms_norm
from worker_svc.ops.rope import rotate_

if TYPE_CHECKING:
    from worker_svc.ops.compress_step import IndexCompressor


def compress(
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
    last_position: Tensor | None,
    ratio: int,
    ring: int,
    eps: float,
    index: IndexCompressor | None,
) -> None:
    """See the door; last_position None: every token's state is kept."""
    own = raw[:, : states.shape[1]] + ape[(positions % ratio).long()]
    closing = (write_rows >= 0).nonzero().flatten()
    if closing.numel():
        rows = write_rows[closing]
        window, exists = _windows(own, positions, slots, first_token, states, closing, ratio, ring)
        at = torch.view_as_complex(turns[(positions[closing] + 1 - ratio).long()])
        main = 4 * kv_rows.HEAD_DIM if ratio == 4 else states.shape[1]
        kv_rows.insert_rows(_entries(window[..., :main].contiguous(), exists, norm, at, ratio, eps), pool, rows)
        if index is not None:
            keys = _entries(window[..., main:].contiguous(), exists, index.norm, at, ratio, eps)
            kv_rows.insert_index_rows(hadamard(keys), index.pool, rows)
    kept = positions >= 0
    if last_position is not None:
        kept &= positions > last_position - ring
    states[(slots * ring + positions % ring)[kept].long()] = own[kept]


def _windows(
    own: Tensor,
    positions: Tensor,
    slots: Tensor,
    first_token: Tensor,
    states: Tensor,
    closing: Tensor,
    ratio: int,
    ring: int,
) -> tuple[Tensor, Tensor]:
    """States [E, w, W] of the w positions up to each closing token, and which of these positions exist [E, w]."""
    width = 8 if ratio == 4 else 128
    position = positions[closing].unsqueeze(1) + torch.arange(1 - width, 1)
    start = positions[first_token[closing].long()].unsqueeze(1)
    token = (closing.unsqueeze(1) + torch.arange(1 - width, 1)).clamp(min=0)
    row = (slots[closing].unsqueeze(1) * ring + position % ring).long()
    return torch.where((position >= start).unsqueeze(2), own[token], states[row]), position >= 0


def _entries(window: Tensor, exists: Tensor, norm: Tensor, at: Tensor, ratio: int, eps: float) -> Tensor:
    """[E, e] from states [E, w, 4e (C4: kv a, b, z a, b) or 2e]."""
    width = norm.shape[0]
    if ratio == 4:
        parts = window.view(*window.shape[:2], 4, width)
        values = torch.cat([parts[:, :4, 0], parts[:, 4:, 1]], dim=1)
        scores = torch.cat([parts[:, :4, 2], parts[:, 4:, 3]], dim=1)
    else:
        values, scores = window[..., :width], window[..., width:]
    hidden = ~exists.unsqueeze(2)
    entries = compress_kv(values.masked_fill(hidden, 0.0), scores.masked_fill(hidden, -torch.inf))
    return rotate_(rms_norm(entries, norm, eps), at)
