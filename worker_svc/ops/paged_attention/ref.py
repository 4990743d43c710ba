"""The two operations one after the other, with a BF16 output in between."""

import torch
from torch import Tensor

from worker_svc.ops import attention_output
from worker_svc.ops.sparse_attention import DecodePlan, decode_attention


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
    rows = (window, window_rows, window_len, entries, entry_rows, entry_len)
    out = decode_attention(q.to(torch.bfloat16).contiguous(), *rows, sink, scale, DecodePlan())
    attention_output.ref.attention_output(out, turns, positions, codes, code_scale)
