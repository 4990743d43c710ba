"""Plans one part at a time, in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from worker_svc.ops.split_plan import SplitPlans

BLOCK = 64
REQUEST_COST = 5
"""Blocks' worth of work that a part spends on each request it touches: queries in, results out."""


def split_plans(near: Tensor, c4: Tensor, c128: Tensor, plans: SplitPlans) -> None:
    """See the door."""
    for kind, far in enumerate((torch.zeros_like(near), c4, c128)):
        blocks = [max(1, -(-a // BLOCK)) + -(-b // BLOCK) for a, b in zip(near.tolist(), far.tolist())]
        rows, splits = _plan(blocks, plans.parts.shape[1])
        plans.parts[kind] = torch.tensor(rows, dtype=torch.int32)
        plans.splits[kind] = torch.tensor(splits, dtype=torch.int32)


def share(blocks: list[int], parts: int) -> int:
    """Blocks of every part."""
    most, least, each = max(blocks), min(blocks), -(-sum(blocks) // parts)
    per_part = -(-len(blocks) // parts)
    aligned = most == least and (most % each == 0 or each % most == 0)
    touched = max(1, each // most) if aligned else 1 + -(-(each - 1) // least)
    whole = most == least and most * per_part + REQUEST_COST * per_part < each + REQUEST_COST * touched
    return most * per_part if whole else each


def _plan(blocks: list[int], parts: int) -> tuple[list[list[int]], list[int]]:
    each, starts = share(blocks, parts), [sum(blocks[:i]) for i in range(len(blocks) + 1)]
    rows = []
    for part in range(parts):
        begin, end = (min(starts[-1], each * (part + more)) for more in (0, 1))
        if begin == end:
            rows.append([len(blocks), len(blocks) - 1, 0, 0, 0, 0, 0, 0])
            continue
        first = next(i for i in range(len(blocks)) if starts[i + 1] > begin)
        last = next(i for i in range(len(blocks)) if starts[i + 1] >= end)
        cut = [begin > starts[first], end < starts[last + 1]]
        if first == last:
            cut = [any(cut)] * 2
        at = [begin - starts[first], end - starts[last], part - starts[first] // each]
        rows.append([first, last, *at, *map(int, cut), 0])
    shared = [(starts[i + 1] - 1) // each - starts[i] // each + 1 for i in range(len(blocks))]
    return rows, [sum(shared[:i]) for i in range(len(blocks) + 1)]
