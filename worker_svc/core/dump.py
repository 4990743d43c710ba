"""A worker's state as Dump frames: what a scheduler that attaches learns first. Chunks stay below 1 MiB encoded."""

from collections.abc import Iterator
from typing import Any

from meshkit.frames import Dump, DumpSlot, PublishedPage, PublishedTail
from worker_svc.core.table import Slot, SlotTable

CHUNK_BYTES = 900_000  # of the 1 MiB limit: the rest is for framing and the estimate's error
_PAGE_BYTES = 32
_TAIL_BYTES = 8


def dump_frames(table: SlotTable, limit: int = CHUNK_BYTES) -> list[Dump]:
    """Everything the table holds, in order of slot and publication; the last frame says so, also when empty."""
    frames: list[Dump] = []
    parts: list[Any] = []
    size = 0
    for item, cost in _items(table):
        if parts and size + cost > limit:
            frames.append(_dump(parts, False))
            parts, size = [], 0
        parts.append(item)
        size += cost
    frames.append(_dump(parts, True))
    return frames


def _items(table: SlotTable) -> Iterator[tuple[DumpSlot | PublishedPage | PublishedTail, int]]:
    for number in sorted(table.slots):
        slot = table.slots[number]
        yield _dump_slot(slot), 128 + 4 * (len(slot.last_ids) + len(slot.pages))
    for entry in table.published.values():
        yield entry, _PAGE_BYTES
    for tail, page in table.tails.items():
        yield PublishedTail(tail, page), _TAIL_BYTES


def _dump_slot(slot: Slot) -> DumpSlot:
    return DumpSlot(
        slot=slot.slot,
        slot_gen=slot.gen,
        request_id=slot.request_id,
        attempt=slot.attempt,
        choice=slot.choice,
        length=slot.length,
        n_emitted=slot.n_emitted,
        next=max(slot.next, 0),
        finished=slot.finished,
        last_ids=tuple(slot.last_ids),
        pages=tuple(slot.pages),
        spare=slot.spare,
        spare_pos=slot.spare_pos,
        grammar_id=slot.grammar_id,
    )


def _dump(parts: list[Any], last: bool) -> Dump:
    return Dump(
        slots=tuple(part for part in parts if isinstance(part, DumpSlot)),
        pages=tuple(part for part in parts if isinstance(part, PublishedPage)),
        tails=tuple(part for part in parts if isinstance(part, PublishedTail)),
        last=last,
    )
