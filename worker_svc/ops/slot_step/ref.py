"""Slot bookkeeping in plain torch. Field numbers are those of the door."""

import torch
from torch import Tensor

EMITTED, LENGTH, NEXT, FINISHED, MAX_TOKENS, STOPS = 7, 8, 9, 10, 11, 14


def begin_step(rows: Tensor, table: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
    """See the door."""
    column = torch.where(rows >= 0, rows, table.shape[1] - 1).long()
    live = (rows >= 0) & (table[FINISHED, column] == 0)
    slots.copy_(column)
    positions.copy_(torch.where(live, table[LENGTH, column], -1))
    ids.copy_(torch.where(live, table[NEXT, column], 0))


def end_step(
    slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor, faults: Tensor, table: Tensor, out: Tensor
) -> None:
    """See the door."""
    live = positions >= 0
    failed = faults[live] != 0
    out.copy_(torch.where(live, torch.where(faults != 0, -1 - faults, tokens), -1))
    column, token, fed = slots[live].long(), tokens[live], ids[live]
    emitted = table[EMITTED, column] + torch.where(failed, 0, 1).to(torch.int32)
    ended = (table[STOPS:, column] == token).any(0) | (emitted >= table[MAX_TOKENS, column]) | failed
    table[EMITTED, column] = emitted
    table[LENGTH, column] = positions[live] + torch.where(ended, 0, 1).to(torch.int32)
    table[NEXT, column] = torch.where(ended, fed, token)
    table[FINISHED, column] = ended.to(torch.int32)
