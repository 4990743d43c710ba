"""Decoding choices of one worker as arrays, by slot number: planning and booking a decode step touches no object.

A choice enters once it decodes and leaves when its placement ends, or before anything about it happens that arrays do
not know. While it is in, its counters live here; `Seq` reads and writes them through properties, so whoever handles
single choices need not know. Sampled ids are kept in a block per slot and handed to the choice when it is asked for
them. Not here: pages, tails, gateways.
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from meshkit.types import PAGE_TOKENS

if TYPE_CHECKING:
    from scheduler_svc.core.request import Seq

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BLOCK: Final = 256
"""Ids kept per slot before they go to the choice."""
STOPS: Final = 8
"""A choice with more ids that end it stays out."""


class Lanes:
    """One lane per slot of a worker, over all its ranks."""

    def __init__(self, slots: int) -> None:
        self.count = 0
        self.on: Bools = np.zeros(slots, np.bool_)
        self.seqs: npt.NDArray[Any] = np.full(slots, None, object)
        self.gen, self.fed, self.length, self.planned, self.flying, self.sampling = (_zeros(slots) for _ in range(6))
        self.emitted, self.most, self.least, self.room = (_zeros(slots) for _ in range(4))
        self.row, self.row_gen, self.cached = (_zeros(slots) for _ in range(3))
        self.attach: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.stops: I64 = np.full((slots, STOPS), -1, np.int64)
        self._ids: npt.NDArray[np.int32] = np.zeros((slots, BLOCK), np.int32)
        self._kept: I64 = _zeros(slots)

    def enter(self, seq: "Seq", stops: tuple[int, ...]) -> None:
        """Take over a placed, decoding choice; `stops` are the ids that end it."""
        params = seq.req.params
        if len(stops) > STOPS or params.top_logprobs >= 0:
            return
        s = seq.slot
        self.gen[s], self.fed[s], self.length[s], self.planned[s] = seq.gen, seq.fed, seq.length, seq.planned_step
        self.flying[s], self.sampling[s], self.emitted[s] = seq.flying, seq.sampling, len(seq.emitted)
        self.most[s], self.least[s] = params.max_tokens, params.min_tokens
        self.room[s] = len(seq.pages) * PAGE_TOKENS
        self.row[s], self.row_gen[s], self.cached[s] = seq.row, seq.row_gen, seq.cached
        self.attach[s] = seq.req.attach_id
        self.stops[s] = -1
        self.stops[s, : len(stops)] = stops
        self._kept[s] = 0
        self.seqs[s], self.on[s] = seq, True
        self.count += 1
        seq.lanes = self

    def leave(self, seq: "Seq") -> None:
        """Give everything back to the choice."""
        s = seq.slot
        assert self.seqs[s] is seq, "a choice leaves the lane that it entered"
        self.flush(seq)
        seq.lanes = None
        seq.fed, seq.length, seq.planned_step = int(self.fed[s]), int(self.length[s]), int(self.planned[s])
        seq.flying, seq.sampling = int(self.flying[s]), int(self.sampling[s])
        self.seqs[s], self.on[s] = None, False
        self.count -= 1

    def flush(self, seq: "Seq") -> None:
        """Hand over the ids kept here."""
        s = seq.slot
        if kept := int(self._kept[s]):
            seq.ids.extend(self._ids[s, :kept].tolist())
            self._kept[s] = 0

    # ---- a step ----

    def ready(self) -> I64:
        """Slots that may sample once more, rising."""
        return np.flatnonzero(self.on & (self.emitted + self.sampling < self.most))

    def plan(self, slots: I64, step: int) -> None:
        """One more token of each is fed by this step."""
        self.fed[slots] += 1
        self.flying[slots] += 1
        self.sampling[slots] += 1
        self.planned[slots] = step

    def goes_on(self, slots: I64, gens: I64, tokens: I64) -> Bools:
        """Of rows planned under `gens`, those whose choice is still here and does not end with its token."""
        emitted = self.emitted[slots] + 1
        ends = (self.stops[slots] == tokens[:, None]).any(axis=1) & (emitted >= self.least[slots])
        result: Bools = self.on[slots] & (self.gen[slots] == gens) & ~ends & (emitted < self.most[slots])
        return result

    def book(self, slots: I64, tokens: I64) -> I64:
        """Each sampled its token. Returns the output position of each."""
        self.flying[slots] -= 1
        self.sampling[slots] -= 1
        self.length[slots] += 1
        bases: I64 = self.emitted[slots]
        kept = self._kept[slots]
        self._ids[slots, kept] = tokens
        self.emitted[slots] = bases + 1
        self._kept[slots] = kept + 1
        if kept.size and int(kept.max()) == BLOCK - 1:
            for seq in self.seqs[slots[kept == BLOCK - 1]]:
                self.flush(seq)
        return bases


def _zeros(slots: int) -> I64:
    return np.zeros(slots, np.int64)
