"""Mixing weights through numpy: the Sinkhorn loop is 78 steps on 16 numbers, and a step costs half of torch's.

Element by element the same formula as ref.py, FP32 throughout; every sum is over N numbers of one token, so a token's
result does not depend on the batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Floats = NDArray[np.float32]


def mix_weights(mixes: Tensor, streams: int, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See the door."""
    raw: _Floats = mixes.numpy()
    gates = _sigmoid(raw[:, : 2 * streams])
    pre = gates[:, :streams] + np.float32(eps)
    post = gates[:, streams:] * np.float32(2)
    comb = _sinkhorn(raw[:, 2 * streams :].reshape(-1, streams, streams), iterations, np.float32(eps))
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb)


def _sigmoid(x: _Floats) -> _Floats:
    # exp(-x) may overflow to inf, which is right: 1 / (1 + inf) = 0. Clipping keeps numpy from warning about it.
    decay: _Floats = np.exp(-np.maximum(x, np.float32(-87)))
    decay += np.float32(1)
    gates: _Floats = np.divide(np.float32(1), decay, out=decay)
    return gates


def _sinkhorn(scores: _Floats, iterations: int, eps: np.float32) -> _Floats:
    comb = scores - scores.max(axis=2, keepdims=True)
    np.exp(comb, out=comb)
    comb /= comb.sum(axis=2, keepdims=True)
    comb += eps
    columns = np.empty_like(comb[:, :1])
    rows = np.empty_like(comb[:, :, :1])
    add, divide = np.add.reduce, np.divide
    for last in range(iterations):
        add(comb, axis=1, keepdims=True, out=columns, initial=eps)
        divide(comb, columns, out=comb)
        if last == iterations - 1:
            break
        add(comb, axis=2, keepdims=True, out=rows, initial=eps)
        divide(comb, rows, out=comb)
    mixed: _Floats = comb
    return mixed
