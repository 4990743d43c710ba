"""Names of choices on one attachment: small row numbers, each use with a fresh generation; batched row commands."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.journal.entry import Choice, Entry
from meshkit.frames import CancelRows, StopRows


@dataclass(slots=True)
class RowTable:
    """Rows of the attachment in force. `clear` forgets them all: the next attachment mints its own."""

    _rows: dict[int, tuple[Entry, Choice]] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _minted: int = 0
    _gens: int = 0
    _cancels: list[tuple[int, int]] = field(default_factory=list)
    _stops: list[tuple[int, int, int]] = field(default_factory=list)

    def bind(self, entry: Entry, choice: Choice) -> None:
        """Give a choice a row."""
        if self._free:
            choice.row = self._free.pop()
        else:
            choice.row, self._minted = self._minted, self._minted + 1
        self._gens += 1
        choice.row_gen = self._gens
        self._rows[choice.row] = (entry, choice)

    def find(self, row: int, row_gen: int) -> tuple[Entry, Choice] | None:
        """Whose row this is, or None if it is of an earlier attempt, closed or never ours."""
        found = self._rows.get(row)
        return found if found is not None and found[1].row_gen == row_gen else None

    def release(self, choice: Choice) -> None:
        """Take a choice's row back; does nothing if it has none."""
        if choice.row >= 0:
            del self._rows[choice.row]
            self._free.append(choice.row)
            choice.row = -1

    def cancel(self, choice: Choice) -> None:
        """Release a row and tell the scheduler with the next batch."""
        if choice.row >= 0:
            self._cancels.append((choice.row, choice.row_gen))
            self.release(choice)

    def stop(self, choice: Choice, keep: int) -> None:
        """As `cancel`, with the number of ids that count."""
        if choice.row >= 0:
            self._stops.append((choice.row, choice.row_gen, keep))
            self.release(choice)

    @property
    def pending(self) -> bool:
        """True if a batch waits to be sent."""
        return bool(self._cancels or self._stops)

    def take_batches(self) -> list[Any]:
        """The frames to send now."""
        frames: list[Any] = []
        if self._cancels:
            rows, gens = np.array(self._cancels, np.int32).T
            frames.append(CancelRows(rows.copy(), gens.copy()))
        if self._stops:
            rows, gens, keeps = np.array(self._stops, np.int32).T
            frames.append(StopRows(rows.copy(), gens.copy(), keeps.copy()))
        self._cancels, self._stops = [], []
        return frames

    def clear(self) -> None:
        """The attachment is gone, and every name with it."""
        for _, choice in self._rows.values():
            choice.row = -1
        self._rows.clear()
        self._free.clear()
        self._cancels.clear()
        self._stops.clear()
        self._minted = 0
        self._gens = 0
