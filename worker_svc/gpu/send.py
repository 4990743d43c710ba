"""Integers from the host to the device without waiting: packed into one pinned buffer, one copy for all of them.

Each column begins at a multiple of 16 bytes, whatever the others are long: kernels are compiled apart for pointers that
do and that do not, and nothing should be compiled while somebody is served.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Column = npt.NDArray[np.integer] | Sequence[int]
ALIGNED: Final = 4
"""int32 values in 16 bytes."""


def send(device: torch.device, *columns: Column) -> list[Tensor]:
    """Each column as int32 tensor on `device`. Values must fit 32 bits; unsigned ones are given by their bits."""
    arrays = [column if isinstance(column, np.ndarray) else np.asarray(column, dtype=np.int64) for column in columns]
    begins = [0]
    for array in arrays:
        begins.append(begins[-1] + -(-len(array) // ALIGNED) * ALIGNED)
    # The host allocator keeps the buffer until the copy has run.
    flat = torch.empty(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    host: npt.NDArray[np.int32] = flat.numpy()
    for begin, array in zip(begins, arrays):
        host[begin : begin + len(array)] = array
    if device.type == "cuda":
        flat = flat.to(device, non_blocking=True)
    return [flat[begin : begin + len(array)] for begin, array in zip(begins, arrays)]
