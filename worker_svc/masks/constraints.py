"""An executor's side of its masks: which of its slots are constrained, the rows of the step at hand, what to tell.

Shared by the executors; each brings its own way to sample. Not thread-safe: it belongs to the thread that computes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from worker_svc.core.work import RowOutcome, SlotInit
from worker_svc.masks.source import READY, Answer, Ask, MaskRows, MaskSource, NoMasks, Told

LEAST_WAIT_S: Final = 0.0003
"""How long a step waits for masks that are late, at least; longer steps wait this share of their forward."""
WAIT_SHARE: Final = 0.05


class Place(NamedTuple):
    """A row that is about to be sampled at `places` output positions from `position` on."""

    slot: int
    position: int
    places: int = 1


@dataclass(frozen=True, slots=True)
class SlotMask:
    """Whether a row may be sampled, and its mask [places, words]; None: nothing is masked."""

    answer: Answer
    rows: MaskRows | None = None


UNMASKED: Final = SlotMask(READY)


class Constraints:
    """`source` may be replaced before the first step."""

    def __init__(self) -> None:
        self.source: MaskSource = NoMasks()
        self._gens: dict[int, int] = {}  # constrained slot -> its generation
        self._rows: MaskRows = np.empty((0, 0), np.int32)

    def __contains__(self, slot: int) -> bool:
        return slot in self._gens

    def begin(self, inits: Sequence[SlotInit]) -> None:
        """A step starts: slots that start over, in front of its forward."""
        self.source.bind(inits)
        for init in inits:
            self._gens.pop(init.slot, None)
            if init.grammar_id:
                self._gens[init.slot] = init.slot_gen

    def take(
        self, sampling: Iterable[Place], *, rows: int, forward_s: float, ahead_s: float = 0.0
    ) -> dict[int, SlotMask]:
        """Masks of the constrained ones among the rows that sample, by slot; valid until the next call.

        `rows` is how many rows of the step do something, sampling or not; `forward_s` is how long its forward takes,
        `ahead_s` how long that will still run: waiting is free meanwhile.
        """
        asks = [Ask(p.slot, self._gens[p.slot], p.position, p.places) for p in sampling if p.slot in self._gens]
        if not asks:
            return {}
        places = sum(ask.places for ask in asks)
        if len(self._rows) < places:
            self._rows = np.empty((places, self.source.words), np.int32)
        wait_s = ahead_s + max(LEAST_WAIT_S, WAIT_SHARE * forward_s)
        answers = self.source.take(asks, self._rows, wait_s=wait_s, alone=len(asks) == rows)
        masks, first = {}, 0
        for ask, answer in zip(asks, answers, strict=True):
            masks[ask.slot] = SlotMask(answer, self._rows[first : first + ask.places])
            first += ask.places
        return masks

    def tell(self, rows: Iterable[tuple[int, int, RowOutcome, bool]]) -> None:
        """The step is through: (slot, first output position, what came out, whether the slot has ended) of its rows."""
        if not self._gens:
            return
        self.source.tell(
            [
                Told(slot, self._gens[slot], position, outcome.tokens, ended)
                for slot, position, outcome, ended in rows
                if slot in self._gens and (outcome.tokens or outcome.fault)  # neither: it was parked
            ]
        )
