"""The slots as the device has them, and what the host knows about them without asking: pages sent, lengths expected.

A launched step moves lengths on whether or not it has come back: the host counts along, so that it knows which rows
will stand at a page boundary, and the device alone decides which have ended.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.core.work import RowWork, SlotInit
from worker_svc.gpu.send import send
from worker_svc.gpu.step import SlotTables
from worker_svc.ops.slot_step import FIELDS, MAX_STOPS, Field

UNSET = -1


@dataclass(slots=True)
class _Known:
    """What the host knows of one slot."""

    length: int
    fresh_from: int = 0
    pages: int = 0
    last_page: int = UNSET


class DeviceSlots:
    """`slots` slots with room for `pages_per_slot` pages each, all on `device`."""

    def __init__(self, slots: int, pages_per_slot: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        fields = torch.zeros(FIELDS, slots + 1, dtype=torch.int32, device=device)
        fields[Field.STOPS :] = UNSET
        pages = torch.zeros(slots + 1, pages_per_slot, dtype=torch.int32, device=device)
        self.tables = SlotTables(fields=fields, pages=pages)
        self._known: dict[int, _Known] = {}

    def init(self, inits: Sequence[SlotInit]) -> None:
        """These slots start over."""
        columns = np.stack([_column(init) for init in inits], axis=1)
        slots, values = send(self.device, [init.slot for init in inits], columns.reshape(-1))
        self.tables.fields.index_copy_(1, slots.long(), values.view(FIELDS, len(inits)))
        for init in inits:
            self._known[init.slot] = _Known(init.start)

    def copy(self, src: int, dst: int) -> None:
        """dst stands where src stands."""
        fields = self.tables.fields
        fields[Field.LENGTH, dst] = fields[Field.LENGTH, src]
        self._known[dst].length = self._known[src].length

    def length(self, slot: int) -> int:
        """Tokens committed once everything launched has run, if the slot lives on."""
        return self._known[slot].length

    def take_pages(self, rows: Iterable[RowWork]) -> None:
        """Send the pages that have joined the tables of these rows' slots."""
        width = self.tables.pages.shape[1]
        places: list[int] = []
        pages: list[int] = []
        for row in rows:
            known = self._known.setdefault(row.slot, _Known(row.start))
            count = len(row.pages)
            if count == known.pages and (not count or row.pages[count - 1] == known.last_page):
                continue
            kept = known.pages if known.pages <= count and _agree(row.pages, known) else 0
            places += range(row.slot * width + kept, row.slot * width + count)
            pages += row.pages[kept:count]
            known.pages, known.last_page = count, row.pages[count - 1] if count else UNSET
        if places:
            at, values = send(self.device, places, pages)
            self.tables.pages.view(-1).index_copy_(0, at.long(), values)

    def set_bounds(self, rows: Iterable[RowWork]) -> None:
        """fresh_from and write_from of rows whose ids the host has."""
        changed = [row for row in rows if row.fresh_from or row.write_from or self._known[row.slot].fresh_from]
        if changed:
            slots, fresh, write = send(
                self.device, *zip(*((row.slot, row.fresh_from, row.write_from) for row in changed))
            )
            self.tables.fields[Field.FRESH_FROM].index_copy_(0, slots.long(), fresh)
            self.tables.fields[Field.WRITE_FROM].index_copy_(0, slots.long(), write)
        for row in changed:
            self._known[row.slot].fresh_from = row.fresh_from

    def moved(self, slot: int, length: int, *, on_device: bool) -> None:
        """The slot will stand at `length`; `on_device`: the step itself books that there."""
        self._known[slot].length = length
        if not on_device:
            self.tables.fields[Field.LENGTH, slot] = length

    def stands(self, slot: int, length: int, following: int) -> None:
        """Put a slot back to `length`, where it feeds id `following`."""
        self._known[slot].length = length
        self.tables.fields[Field.LENGTH, slot] = length
        self.tables.fields[Field.NEXT, slot] = following


def _agree(pages: Sequence[int], known: _Known) -> bool:
    return known.pages == 0 or pages[known.pages - 1] == known.last_page


def _column(init: SlotInit) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """One slot's fields."""
    p, column = init.params, np.zeros(FIELDS, dtype=np.int64)
    floats = np.array([p.temperature, p.top_p, p.min_p], dtype=np.float32).view(np.int32)
    column[[Field.TEMPERATURE, Field.TOP_P, Field.MIN_P]] = floats
    column[Field.TOP_K], column[Field.CHOICE] = p.top_k, init.choice
    column[Field.SEED_LOW], column[Field.SEED_HIGH] = init.seed & 0xFFFFFFFF, init.seed >> 32
    column[Field.EMITTED], column[Field.MAX_TOKENS], column[Field.LENGTH] = init.n_emitted, p.max_tokens, init.start
    stops = sorted(init.stops)
    if len(stops) > MAX_STOPS:
        raise ValueError(f"slot {init.slot} has {len(stops)} stop ids; the device keeps {MAX_STOPS}")
    column[Field.STOPS :] = UNSET
    column[Field.STOPS : Field.STOPS + len(stops)] = stops
    return column
