"""A product whose K is cut writes FP32 partial sums [parts, ...], and the operation that reads it adds them up.

Nothing is rounded in between, and no launch of its own adds. `parts_of` says how many parts a tensor comes in where a
whole one has so many dimensions, `added` is the sum in plain torch, `triton_rows.added` the one of kernels.
"""

from torch import Tensor


def parts_of(x: Tensor, dimensions: int) -> int:
    """1 for a whole tensor."""
    assert x.dim() in (dimensions, dimensions + 1), (x.shape, dimensions)
    return x.shape[0] if x.dim() > dimensions else 1


def added(x: Tensor, dimensions: int) -> Tensor:
    """Without the parts."""
    return x.sum(0) if x.dim() > dimensions else x
