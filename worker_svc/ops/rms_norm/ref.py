"""RMS normalisation in plain torch. The eps sits inside the root.

`square().mean(-1)` reduces each row by itself, in an order that does not depend on the number of rows (measured).
"""

from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last dimension, kept as size 1."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x times its inverse RMS, times weight where there is one."""
    out = x * inverse_rms(x, eps)
    return out if weight is None else out.mul_(weight)
