"""RMS normalisation in plain torch. The eps sits inside the root.

`square().sum(-1)` reduces each row by itself, in an order that does not depend on the number of rows (measured).
"""

from functools import cache

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last dimension, kept as size 1."""
    reciprocal, offset = _scalar(1.0 / x.shape[-1], x.device), _scalar(eps, x.device)
    return x.square().sum(-1, keepdim=True).mul_(reciprocal).add_(offset).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x times its inverse RMS, times weight where there is one."""
    out = x * inverse_rms(x, eps)
    return out if weight is None else out.mul_(weight)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    """A constant as FP32 tensor: an operation with a Python number converts it first, which costs as much again."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)
