"""Rows for gateways: collected while one event is handled, then sent as one TokenFrame each."""

from dataclasses import dataclass, field

import numpy as np

from meshkit.frames import LogprobColumns, RowError, TokenFrame
from meshkit.types import FinishReason

Entry = tuple[list[int], list[float]]
"""Log-probabilities of one token: ids and values, the token itself first."""


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
    errors: list[RowError] = field(default_factory=list)
    lp_rows: list[int] = field(default_factory=list)
    lp_widths: list[int] = field(default_factory=list)
    lp_ids: list[int] = field(default_factory=list)
    lp_values: list[float] = field(default_factory=list)

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
    ) -> None:
        """One row: its new ids from output position `base` on, and how it ended, if it did."""
        index = len(self.rows)
        self.rows.append(row)
        self.row_gens.append(row_gen)
        self.bases.append(base)
        self.counts.append(len(ids))
        self.ids.extend(ids)
        self.finishes.append(finish)
        self.cached.append(cached)
        if finish is FinishReason.ERROR:
            self.errors.append(RowError(index, *error))
        for lp_ids, lp_values in logprobs or ():
            self.lp_rows.append(index)
            self.lp_widths.append(len(lp_ids))
            self.lp_ids.extend(lp_ids)
            self.lp_values.extend(lp_values)

    def frame(self, step: int) -> TokenFrame:
        logprobs = LogprobColumns()
        if self.lp_rows:
            logprobs = LogprobColumns(
                np.array(self.lp_rows, np.int32),
                np.array(self.lp_widths, np.uint8),
                np.array(self.lp_ids, np.int32),
                np.array(self.lp_values, np.float32),
            )
        return TokenFrame(
            step=step,
            rows=np.array(self.rows, np.int32),
            row_gens=np.array(self.row_gens, np.int32),
            bases=np.array(self.bases, np.int32),
            counts=np.array(self.counts, np.int32),
            ids=np.array(self.ids, np.int32),
            finishes=np.array(self.finishes, np.uint8),
            cached=np.array(self.cached, np.int32),
            logprobs=logprobs,
            errors=tuple(self.errors),
        )
