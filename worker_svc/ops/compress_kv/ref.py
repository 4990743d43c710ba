"""Window compression in plain torch: each channel has its own weights over the slots."""

from torch import Tensor


def compress_kv(values: Tensor, scores: Tensor) -> Tensor:
    """sum over slots of softmax(scores) * values."""
    return (scores.softmax(1) * values).sum(1)


def compress_each(values: Tensor, scores: Tensor) -> Tensor:
    """The same, one window at a time: the reduction's order cannot follow the number of windows."""
    out = values.new_empty(values.shape[0], values.shape[2])
    for window in range(values.shape[0]):
        out[window] = (scores[window].contiguous().softmax(0) * values[window]).sum(0)
    return out
