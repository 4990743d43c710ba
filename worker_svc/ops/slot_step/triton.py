"""Slot bookkeeping as two small kernels, one thread per row: nothing is waited for, a graph can replay them."""
# ruff: noqa: ANN001, ANN202, N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disable-error-code="import-untyped"

import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
EMITTED = tl.constexpr(7)
LENGTH = tl.constexpr(8)
NEXT = tl.constexpr(9)
FINISHED = tl.constexpr(10)
MAX_TOKENS = tl.constexpr(11)
STOPS = tl.constexpr(14)


def begin_step(rows: Tensor, table: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
    """See the door."""
    grid = (triton.cdiv(rows.shape[0], ROWS),)
    _begin_step[grid](rows, table, slots, positions, ids, rows.shape[0], table.shape[1], BLOCK=ROWS)


def end_step(
    slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor, faults: Tensor, table: Tensor, out: Tensor
) -> None:
    """See the door."""
    grid, stops = (triton.cdiv(tokens.shape[0], ROWS),), table.shape[0] - STOPS.value
    _end_step[grid](
        *(slots, positions, ids, tokens, faults, table, out, tokens.shape[0], table.shape[1]),
        NUM_STOPS=stops,
        PADDED_STOPS=triton.next_power_of_2(stops),
        BLOCK=ROWS,
    )


@triton.jit
def _begin_step(rows_ptr, table_ptr, slots_ptr, positions_ptr, ids_ptr, count, columns, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row = tl.load(rows_ptr + place, mask=inside, other=-1)
    column = tl.where(row >= 0, row, columns - 1)
    ended = tl.load(table_ptr + FINISHED * columns + column)
    live = (row >= 0) & (ended == 0)
    length = tl.load(table_ptr + LENGTH * columns + column)
    following = tl.load(table_ptr + NEXT * columns + column)
    tl.store(slots_ptr + place, column, mask=inside)
    tl.store(positions_ptr + place, tl.where(live, length, -1), mask=inside)
    tl.store(ids_ptr + place, tl.where(live, following, 0), mask=inside)


@triton.jit
def _end_step(
    slots_ptr,
    positions_ptr,
    ids_ptr,
    tokens_ptr,
    faults_ptr,
    table_ptr,
    out_ptr,
    count,
    columns,
    NUM_STOPS: tl.constexpr,
    PADDED_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    position = tl.load(positions_ptr + place, mask=inside, other=-1)
    column = tl.load(slots_ptr + place, mask=inside, other=0)
    token = tl.load(tokens_ptr + place, mask=inside, other=0)
    fed = tl.load(ids_ptr + place, mask=inside, other=0)
    live = position >= 0
    fault = tl.load(faults_ptr + place, mask=inside, other=0)
    tl.store(out_ptr + place, tl.where(live, tl.where(fault != 0, -1 - fault, token), -1), mask=inside)
    emitted = tl.load(table_ptr + EMITTED * columns + column) + tl.where(fault != 0, 0, 1)
    most = tl.load(table_ptr + MAX_TOKENS * columns + column)
    stop = tl.arange(0, PADDED_STOPS)
    listed = tl.load(
        table_ptr + (stop + STOPS)[None, :] * columns + column[:, None], mask=(stop < NUM_STOPS)[None, :], other=-1
    )
    met = tl.sum((listed == token[:, None]).to(tl.int32), axis=1)
    stopped = (met > 0) | (emitted >= most) | (fault != 0)
    tl.store(table_ptr + EMITTED * columns + column, emitted, mask=live)
    tl.store(table_ptr + LENGTH * columns + column, position + tl.where(stopped, 0, 1), mask=live)
    tl.store(table_ptr + NEXT * columns + column, tl.where(stopped, fed, token), mask=live)
    tl.store(table_ptr + FINISHED * columns + column, stopped.to(tl.int32), mask=live)
