"""Attention over numbered rows and the quantising join: two launches of the kernels of `ops.sparse_attention`."""

from torch import Tensor

from worker_svc.ops.sparse_attention.triton import attend, join_quantised


def paged_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    sink: Tensor,
    scale: float,
    turns: Tensor,
    positions: Tensor,
    codes: Tensor,
    code_scale: Tensor,
) -> None:
    """See the door."""
    part, lse = attend(q, window, window_rows, window_len, entries, entry_rows, entry_len, scale)
    join_quantised(part, lse, sink, turns, positions, codes, code_scale)
