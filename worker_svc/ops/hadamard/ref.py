"""Hadamard transform of the last dimension, natural (Sylvester) order, scaled to be orthogonal.

y = x H_n n^-0.5 with H[a, b] = (-1)^popcount(a & b). Computed as log2(n) butterflies of FP32 additions: the result of
a row never depends on how many rows there are, and the order of additions is fixed.
"""

from __future__ import annotations

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., n], n a power of two -> same shape and dtype."""
    n = x.shape[-1]
    y = x.float().reshape(-1, n)
    half = 1
    while half < n:
        pairs = y.view(-1, n // (2 * half), 2, half)
        low, high = pairs.unbind(-2)
        mixed = torch.empty_like(pairs)
        torch.add(low, high, out=mixed.select(-2, 0))
        torch.sub(low, high, out=mixed.select(-2, 1))
        y = mixed.view(-1, n)
        half *= 2
    return torch.mul(y, n**-0.5).view(x.shape).to(x.dtype)
