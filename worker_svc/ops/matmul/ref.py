"""Matrix product in calls of a fixed number of rows.

Measured with MKL (torch 2.13, AVX-512): one row, two rows, and many rows take different kernels; where the switch
lies depends on K, N and the number of threads, so padding to "at least 4 rows" is not enough. Inside one kernel a
row's result does not depend on its place or on its neighbours.
"""

import torch
from torch import Tensor

ROWS = 8
"""Rows of every call: near peak speed already, and small enough not to hurt a decode step of one row."""


def rows_agree(weight_t: Tensor) -> bool:
    """Multiply ROWS copies of one row."""
    row = torch.linspace(-1.0, 1.0, weight_t.shape[0]).sin_()
    out = fixed_rows(row.expand(ROWS, -1), weight_t)
    return torch.equal(out, out[:1].expand_as(out))


def fixed_rows(x: Tensor, weight_t: Tensor) -> Tensor:
    """[S, K] @ [K, N] -> [S, N] by products of exactly ROWS rows, the last one padded with zeros."""
    rows, inner = x.shape
    blocks = -(-rows // ROWS)
    padded = x.new_zeros(blocks * ROWS, inner)
    padded[:rows] = x
    out = x.new_empty(blocks * ROWS, weight_t.shape[1])
    for block in range(0, blocks * ROWS, ROWS):
        torch.mm(padded[block : block + ROWS], weight_t, out=out[block : block + ROWS])
    return out[:rows]
