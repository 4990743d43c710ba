"""Slots with a grammar on a device that runs ahead: masks are taken while the forward runs, right before sampling.

What the step before sampled must be told first, so its tokens are waited for; this step's forward runs on meanwhile.
A row whose mask has not come is parked: it computes, samples nothing, and stands where it stood.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker_svc.core.work import Fault, RowOutcome, RowWork, SlotInit
from worker_svc.masks.constraints import Constraints, Place
from worker_svc.masks.source import MaskSource

EVERYTHING = -1
"""A mask word of ones."""

Outcomes = Callable[[], Sequence[RowOutcome]]
"""Waits for a launched step's rows."""


@dataclass(slots=True)
class _Standing:
    """A constrained slot: the output position that comes next, and what ends it."""

    emitted: int
    max_tokens: int
    stops: frozenset[int]
    ended: bool = False


@dataclass(slots=True)
class Masked:
    """Masks of rows about to be sampled: int32 [rows, words] on the device; rows that sample nothing this time."""

    masks: Tensor
    parked: list[int] = field(default_factory=list)
    failed: dict[int, Fault] = field(default_factory=dict)


class ConstrainedSlots:
    """Belongs to the thread that launches steps."""

    def __init__(self, device: torch.device) -> None:
        self._constraints, self._device = Constraints(), device
        self._standing: dict[int, _Standing] = {}
        self._untold: list[tuple[Sequence[RowWork], Outcomes]] = []

    def use(self, masks: MaskSource) -> None:
        """Where masks come from; before the first step."""
        self._constraints.source = masks

    def begin(self, inits: Sequence[SlotInit]) -> None:
        """Slots that start over, in front of a step's forward."""
        if not inits:
            return
        self.tell()  # about those that had these numbers before
        self._constraints.begin(inits)
        for init in inits:
            self._standing.pop(init.slot, None)
            if init.grammar_id:
                self._standing[init.slot] = _Standing(init.n_emitted, init.params.max_tokens, init.stops)

    def any(self, rows: Sequence[RowWork]) -> bool:
        """Whether a row that samples is constrained."""
        return bool(self._standing) and any(row.slot in self._standing and row.sample_last for row in rows)

    def launched(self, rows: Sequence[RowWork], outcomes: Outcomes) -> None:
        """A step was launched; if it has constrained rows, they are told about before the next masks are taken."""
        if self.any(rows):
            self._untold.append((rows, outcomes))

    def tell(self) -> None:
        """Wait for the steps under way that have constrained rows, and tell what they sampled."""
        for rows, outcomes in self._untold:
            self._constraints.tell(self._book(rows, outcomes()))
        self._untold.clear()

    def take(self, rows: Sequence[RowWork], *, in_step: int, step_s: float, ahead_s: float) -> Masked:
        """Masks of the constrained ones among `rows`, everything allowed for the others."""
        standing = self._standing
        places = [
            Place(row.slot, standing[row.slot].emitted)
            for row in rows
            if row.slot in standing and row.sample_last and not standing[row.slot].ended
        ]
        found = self._constraints.take(places, rows=in_step, forward_s=step_s, ahead_s=ahead_s)
        shape = (len(rows), max(1, self._constraints.source.words))
        host = torch.full(shape, EVERYTHING, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        masked = Masked(host)
        for number, row in enumerate(rows):
            mask = found.get(row.slot)
            if mask is None:
                continue
            if mask.answer.ready and mask.rows is not None:
                host[number] = torch.from_numpy(mask.rows[0])
            elif mask.answer.fault is not None:
                masked.failed[number] = mask.answer.fault
                standing[row.slot].ended = True
            else:
                masked.parked.append(number)
        masked.masks = host.to(self._device, non_blocking=True)
        return masked

    def _book(self, rows: Sequence[RowWork], outcomes: Sequence[RowOutcome]) -> list[tuple[int, int, RowOutcome, bool]]:
        told = []
        for row, outcome in zip(rows, outcomes, strict=True):
            slot = self._standing.get(row.slot)
            if slot is None or not row.sample_last:
                continue
            position = slot.emitted
            slot.emitted += len(outcome.tokens)
            if outcome.fault is not None or (
                outcome.tokens and (outcome.tokens[-1] in slot.stops or slot.emitted >= slot.max_tokens)
            ):
                slot.ended = True
            told.append((row.slot, position, outcome, slot.ended))
        return told
