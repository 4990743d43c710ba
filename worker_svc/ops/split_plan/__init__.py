"""How a decode step's attention is cut over the GPU's processors: one plan for each kind of layer, made in one launch.

The library of `ops.sparse_attention` takes such a plan, or makes one with a single thread. Here keys count in blocks
of 64, and every part gets the same number of consecutive blocks: whole requests where all are equally long and that is
cheaper, for a part pays for each request that it touches. Kinds: window alone, with C4 entries, with C128 entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops.split_plan import ref

__all__ = ["FIELDS", "SplitPlans", "split_plans"]

FIELDS = 8
"""Of a part: first and last request (both inside), first block and the one behind the last, number of its first split
in its request, whether its first and last request are shared with other parts, nothing."""


@dataclass(frozen=True, slots=True)
class SplitPlans:
    """parts int32 [3, P, FIELDS]; splits int32 [3, B + 1]: running sum of the parts that share a request. A part that
    has nothing to do begins at request B."""

    parts: Tensor
    splits: Tensor


def split_plans(near: Tensor, c4: Tensor, c128: Tensor, parts: int) -> SplitPlans:
    """near, c4, c128 int32 [B]: window keys and entries that each request reads. An empty window counts as a block."""
    batch = near.shape[0]
    assert batch > 0 and parts > 0, (batch, parts)
    for lengths in (near, c4, c128):
        assert lengths.dtype == torch.int32 and lengths.shape == (batch,) and lengths.is_contiguous(), lengths.shape
    plans = SplitPlans(
        torch.empty(3, parts, FIELDS, dtype=torch.int32, device=near.device),
        torch.empty(3, batch + 1, dtype=torch.int32, device=near.device),
    )
    if near.is_cuda:
        from worker_svc.ops.split_plan import triton

        triton.split_plans(near, c4, c128, plans)
    else:
        ref.split_plans(near, c4, c128, plans)
    return plans
