"""Hadamard transform: the door. Applied to the indexer's queries and keys, always to both."""

import torch

from worker_svc.ops.hadamard import ref

__all__ = ["hadamard"]


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthogonal Sylvester-order transform of the last dim (a power of two): same shape and dtype."""
    n = x.shape[-1]
    assert x.is_floating_point() and n > 0 and n & (n - 1) == 0, (x.dtype, x.shape)
    return ref.hadamard(x.contiguous())
