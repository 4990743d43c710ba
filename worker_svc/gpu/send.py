"""Integers from the host to the device without waiting: packed into one pinned buffer, one copy for all of them."""
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Column = npt.NDArray[np.integer] | Sequence[int]


def send(device: torch.device, *columns: Column) -> list[Tensor]:
    """Each column as int32 tensor on `device`. Values must fit 32 bits; unsigned ones are given by their bits."""
    arrays = [np.asarray(column, dtype=np.int64).astype(np.int32) for column in columns]
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        # The host allocator keeps the buffer until the copy has run.
        flat = flat.pin_memory().to(device, non_blocking=True)
    return list(flat.split([len(array) for array in arrays]))
