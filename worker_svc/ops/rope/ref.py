"""Rotation of adjacent pairs as a complex product: (a + ib)(cos + i sin) = (a cos - b sin) + i(a sin + b cos)."""

import torch
from torch import Tensor


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply the pairs of x's last 2 * turns.shape[-1] dims by `turns`, in place."""
    half = turns.shape[-1]
    last = x[..., x.shape[-1] - 2 * half :]
    torch.view_as_complex(last.view(*last.shape[:-1], half, 2)).mul_(turns)
    return x
