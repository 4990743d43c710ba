"""Rows for gateways: collected while one event is handled, then sent as one TokenFrame each."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from meshkit.frames import LogprobColumns, RowError, TokenFrame
from meshkit.types import FinishReason

Column = npt.NDArray[np.int64]
Entry = tuple[list[int], list[float]]
"""Log-probabilities of one token: ids and values, the token itself first."""
_NOBODY: npt.NDArray[np.int32] = np.empty((0, 2), np.int32)


@dataclass(slots=True, eq=False)
class Outbox:
    """Rows of one gateway, collected while one event is handled and sent as one TokenFrame."""

    rows: list[int] = field(default_factory=list)
    row_gens: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    waited: list[tuple[int, int]] = field(default_factory=list)  # (index of a row, ms)
    errors: list[RowError] = field(default_factory=list)
    lp_rows: list[int] = field(default_factory=list)
    lp_widths: list[int] = field(default_factory=list)
    lp_ids: list[int] = field(default_factory=list)
    lp_values: list[float] = field(default_factory=list)
    blocks: list[tuple[Column, Column, Column, Column, Column]] = field(default_factory=list)  # before the rows above
    many: int = 0  # rows in blocks

    def add(
        self,
        row: int,
        row_gen: int,
        base: int,
        ids: list[int],
        cached: int,
        finish: FinishReason,
        error: tuple[str, str],
        logprobs: list[Entry] | None,
        waited_ms: int = -1,
    ) -> None:
        """One row: its new ids from output position `base` on, how it ended, if it did, and how long it had queued."""
        index = self.many + len(self.rows)
        self.rows.append(row)
        self.row_gens.append(row_gen)
        self.bases.append(base)
        self.counts.append(len(ids))
        self.ids.extend(ids)
        self.finishes.append(finish)
        self.cached.append(cached)
        if finish is FinishReason.ERROR:
            self.errors.append(RowError(index, *error))
        if waited_ms >= 0 and ids:
            self.waited.append((index, waited_ms))
        for lp_ids, lp_values in logprobs or ():
            self.lp_rows.append(index)
            self.lp_widths.append(len(lp_ids))
            self.lp_ids.extend(lp_ids)
            self.lp_values.extend(lp_values)

    def add_many(self, rows: Column, row_gens: Column, bases: Column, ids: Column, cached: Column) -> None:
        """Rows of one id each that go on, as columns: before all rows that come one by one."""
        assert not self.rows, "a row that ends comes behind the ids booked in front of it"
        self.blocks.append((rows, row_gens, bases, ids, cached))
        self.many += len(rows)

    def frame(self, step: int) -> TokenFrame:
        logprobs = LogprobColumns()
        if self.lp_rows:
            logprobs = LogprobColumns(
                np.array(self.lp_rows, np.int32),
                np.array(self.lp_widths, np.uint8),
                np.array(self.lp_ids, np.int32),
                np.array(self.lp_values, np.float32),
            )
        waited = np.array(self.waited, np.int32) if self.waited else _NOBODY
        return TokenFrame(
            step=step,
            rows=self._column(self.rows, 0),
            row_gens=self._column(self.row_gens, 1),
            bases=self._column(self.bases, 2),
            counts=_behind(np.ones(self.many, np.int32), self.counts),
            ids=self._column(self.ids, 3),
            finishes=_behind(np.zeros(self.many, np.uint8), self.finishes),
            cached=self._column(self.cached, 4),
            logprobs=logprobs,
            errors=tuple(self.errors),
            waited_rows=waited[:, 0],
            waited_ms=waited[:, 1],
        )

    def _column(self, values: list[int], field_at: int) -> npt.NDArray[np.int32]:
        """The blocks, then the rows one by one."""
        if len(self.blocks) == 1 and not values:  # a step that only decodes
            return self.blocks[0][field_at].astype(np.int32)
        parts = [*(block[field_at].astype(np.int32) for block in self.blocks), np.array(values, np.int32)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _behind(many: npt.NDArray[Any], values: list[int]) -> npt.NDArray[Any]:
    """A column of the blocks' rows, then of the rows one by one."""
    return np.concatenate([many, np.array(values, many.dtype)]) if values else many
