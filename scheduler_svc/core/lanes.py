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
_NEARLY: Final = 192  # from here on a few blocks are handed over per step: those that began together fill together
_AT_ONCE: Final = 4
STOPS: Final = 8
"""A choice with more ids that end it stays out."""


_PLANNED: Final = np.array([1, 0, 1, 1, 0, 0], np.int64)  # by column of `_counts`
_BOOKED: Final = np.array([0, 1, -1, -1, 1, 1], np.int64)


class Lanes:
    """One lane per slot of a worker, over all its ranks. The columns are views: a step moves whole rows at once."""

    def __init__(self, slots: int) -> None:
        self.count = 0
        self.seqs: npt.NDArray[Any] = np.full(slots, None, object)
        self._counts: I64 = np.zeros((slots, 6), np.int64)
        self.fed, self.length, self.flying, self.sampling, self.emitted, self._kept = self._counts.T
        self._facts: I64 = np.zeros((slots, 6), np.int64)
        self.gen, self.most, self.least, self.row, self.row_gen, self.cached = self._facts.T
        self.gen[:] = -1  # nobody is in
        self.room: I64 = np.zeros(slots, np.int64)
        self.planned: I64 = np.zeros(slots, np.int64)
        self.attach: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.stops: I64 = np.full((slots, STOPS), -1, np.int64)
        self._ids: npt.NDArray[np.int32] = np.zeros((slots, BLOCK), np.int32)

    @property
    def on(self) -> Bools:
        """Lanes that are taken."""
        taken: Bools = self.gen >= 0
        return taken

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
        self.seqs[s] = seq
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
        self.seqs[s], self.gen[s] = None, -1
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
        return np.flatnonzero((self.gen >= 0) & (self.emitted + self.sampling < self.most))

    def plan(self, slots: I64, step: int) -> None:
        """One more token of each is fed by this step."""
        self._counts[slots] += _PLANNED
        self.planned[slots] = step

    def goes_on(self, slots: I64, gens: I64, tokens: I64) -> Bools:
        """Of rows planned under `gens`, those whose choice is still here and does not end with its token."""
        gen, most, least = self._facts[slots, :3].T
        emitted = self.emitted[slots] + 1
        goes_on: Bools = (gen == gens) & (emitted < most)
        stops = self.stops[slots] == tokens[:, None]
        if stops.any():
            goes_on &= ~(stops.any(axis=1) & (emitted >= least))
        return goes_on

    def book(self, slots: I64, tokens: I64) -> tuple[I64, I64]:
        """Each sampled its token. Returns output position and new length of each."""
        counts = self._counts[slots] + _BOOKED
        self._counts[slots] = counts
        _, length, _, _, emitted, kept = counts.T
        self._ids[slots, kept - 1] = tokens
        if kept.size and (most := int(kept.max())) >= _NEARLY:
            some = np.flatnonzero(kept >= _NEARLY)[: max(_AT_ONCE, len(kept) // (BLOCK - _NEARLY))]
            if most == BLOCK:
                some = np.union1d(some, np.flatnonzero(kept == BLOCK))
            for seq in self.seqs[slots[some]]:
                self.flush(seq)
        return emitted - 1, length

    def names(self, slots: I64) -> I64:
        """Row, generation of the row and cached tokens of each: three columns."""
        found: I64 = self._facts[slots, 3:].T
        return found
