"""Expert sort in plain torch."""

import torch
from torch import Tensor

CHUNK = 4096
"""Slots that one program of the kernel looks at."""


def sort_slots(ids: Tensor, slots: Tensor, experts: Tensor, num_padded: Tensor, layout: Tensor, block: int) -> None:
    """See the door. What lies behind the padded end is left as it is."""
    flat = ids.flatten().long()
    num_experts = layout.numel() - 1
    live = (flat >= 0).nonzero().flatten()
    counts = torch.bincount(flat[live], minlength=num_experts)
    layout[0] = 0
    layout[1:] = counts.cumsum(0)
    blocks = (counts + block - 1) // block
    num_padded[0] = blocks.sum() * block
    order = live[flat[live].argsort(stable=True)]
    first = (blocks.cumsum(0) - blocks) * block
    slots[: int(num_padded)] = flat.numel()
    place = first[flat[order]] + torch.arange(order.numel(), device=ids.device) - layout[:-1].long()[flat[order]]
    slots[place] = order.int()
    experts[: int(blocks.sum())] = torch.arange(num_experts, device=ids.device).repeat_interleave(blocks).int()
