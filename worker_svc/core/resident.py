"""What an executor keeps per slot between steps: committed length, next token, tokens emitted, whether it has ended.

The same rules in plain Python that a GPU applies to its slot arrays. A row without ids is resolved against this state,
and the state moves only when the step is through: a step that failed leaves it as it was. Torch-free.
"""

from dataclasses import dataclass

from meshkit.types import PAGE_TOKENS
from worker_svc.core.work import RowWork, SlotInit


@dataclass(slots=True)
class Place:
    """State of one slot. `next` is fed at position `length`; -1: nothing was sampled yet."""

    length: int
    n_emitted: int
    max_tokens: int
    stops: frozenset[int]
    next: int = -1
    finished: bool = False


class ResidentSlots:
    """All slots of one executor."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}

    def init(self, init: SlotInit) -> None:
        """The slot starts over."""
        self.places[init.slot] = Place(init.start, init.n_emitted, init.params.max_tokens, init.stops)

    def copy(self, src: int, dst: int) -> None:
        """dst stands where src stands; what it has emitted is its own."""
        if src in self.places and dst in self.places:
            self.places[dst].length = self.places[src].length

    def resolve(self, row: RowWork) -> RowWork | None:
        """The row with its ids, or None for a decode row of a slot that has ended."""
        if row.ids:
            return row
        place = self.places[row.slot]
        if place.finished:
            return None
        assert place.next >= 0, f"slot {row.slot} decodes before it sampled"
        return RowWork(
            slot=row.slot,
            start=place.length,
            ids=(place.next,),
            pages=row.pages,
            fresh_from=row.fresh_from,
            out_pos=place.n_emitted,
            spare=row.spare,
        )

    def ended(self, slot: int) -> bool:
        """True once the slot's last token was booked, or a fault."""
        place = self.places.get(slot)
        return place is not None and place.finished

    def advance(self, row: RowWork, tokens: tuple[int, ...], *, failed: bool = False) -> int:
        """Book what a resolved row sampled; `failed`: nothing, and the slot ends.

        Returns the position at which its spare must be refreshed now, 0 = not.
        """
        place = self.places.get(row.slot)
        if place is None:  # a row by hand, on a slot that was never given to anybody
            return 0
        end = row.start + len(row.ids)
        if not row.sample_last:
            place.length = end
            return 0
        sure = len(row.ids) - row.sample_last  # ids in front of the first sampled place
        if not tokens:
            place.length, place.next, place.finished = row.start + sure, row.ids[sure], failed
            return 0
        place.n_emitted += len(tokens)
        place.length = row.start + sure + len(tokens)
        if tokens[-1] in place.stops or place.n_emitted >= place.max_tokens:
            place.finished = True
            place.length -= 1
            place.next = row.ids[sure + len(tokens) - 1]
            return 0
        place.next = tokens[-1]
        return place.length if row.spare >= 0 and place.length % PAGE_TOKENS == 0 else 0
