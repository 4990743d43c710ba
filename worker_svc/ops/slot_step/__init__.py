"""What happens to the slots before and after a step, on the device: where each row stands, and what its token changes.

The table int32 [FIELDS, slots + 1] holds one column per slot; the last one belongs to nobody and serves padding rows.
The rules are those of `worker_svc.core.resident`, so a step can be launched before the one in front of it is known.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from worker_svc.ops.slot_step import ref

MAX_STOPS: Final = 72
"""Ids that may end one slot: more than a gateway lets through, EOS included."""


class Field(IntEnum):
    """Rows of the table. Floats lie there by their bits. The first SAMPLER_FIELDS are what the sampler reads."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    SEED_LOW = 4
    SEED_HIGH = 5
    CHOICE = 6
    EMITTED = 7
    LENGTH = 8
    NEXT = 9
    FINISHED = 10
    MAX_TOKENS = 11
    FRESH_FROM = 12
    WRITE_FROM = 13
    STOPS = 14


SAMPLER_FIELDS: Final = 8
FIELDS: Final = Field.STOPS + MAX_STOPS


@dataclass(frozen=True, slots=True)
class StepRows:
    """int32 [B] each: the column of the table, the position computed (-1: padding or ended), the id fed there."""

    slots: Tensor
    positions: Tensor
    ids: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device) -> "StepRows":
        """Room for `rows` rows."""
        return StepRows(*(torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3)))


def begin_step(rows: Tensor, table: Tensor, out: StepRows) -> None:
    """rows int32 [B] of slot numbers, -1 padding -> where each stands."""
    _check(rows, table)
    if rows.is_cuda:
        from worker_svc.ops.slot_step import triton

        triton.begin_step(rows, table, out.slots, out.positions, out.ids)
    else:
        ref.begin_step(rows, table, out.slots, out.positions, out.ids)


def end_step(at: StepRows, tokens: Tensor, faults: Tensor, table: Tensor, out: Tensor) -> None:
    """Book tokens int32 [B], sampled at `at`: lengths, next ids and ends move on. A row with faults[b] != 0 emits
    nothing and ends. out int32 [B]: the token, -1 where the row did not count, -1 - fault where it failed. No slot may
    appear twice among live rows."""
    _check(tokens, table)
    assert faults.dtype == torch.int32 and faults.shape == tokens.shape == out.shape, (faults.shape, out.shape)
    if tokens.is_cuda:
        from worker_svc.ops.slot_step import triton

        triton.end_step(at.slots, at.positions, at.ids, tokens, faults, table, out)
    else:
        ref.end_step(at.slots, at.positions, at.ids, tokens, faults, table, out)


def _check(rows: Tensor, table: Tensor) -> None:
    assert rows.dtype == table.dtype == torch.int32 and rows.dim() == 1, (rows.dtype, table.dtype)
    assert table.shape[0] == FIELDS and table.is_contiguous(), table.shape
