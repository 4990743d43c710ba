"""Slot state of the simulated device as arrays, and the hash that stands in for a model.

A token follows from seed, choice, output position, length and the last 32 ids in front of it, so any lost, doubled or
misplaced token changes all later ones. Like a V4 slot the state is resumable from a tail, or by feeding ids again.
Given ids, allowed ids and bad words of one token are heeded as a sampler would; longer bad words are not looked for.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshkit.types import PAGE_TOKENS, SamplingParams
from worker_svc.core.work import RowWork, SlotInit

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Numbers = NDArray[np.intp]
Words = NDArray[np.int32]

WINDOW: Final = 32
_BASE: Final = np.uint64(0x9E3779B97F4A7C15)
_POWERS: Final[U64] = np.array([pow(int(_BASE), WINDOW - 1 - i, 1 << 64) for i in range(WINDOW)], np.uint64)
_OUT: Final = np.uint64(pow(int(_BASE), WINDOW, 1 << 64))
_M64: Final = (1 << 64) - 1


class SlotArrays:
    """All slots and tails. `alphabet` are the ids that may be drawn; `end_chance` is that of EOS at each position."""

    def __init__(self, slots: int, tails: int, alphabet: Sequence[int], eos: int, end_chance: float = 0.0) -> None:
        self.alphabet: I64 = np.array(alphabet, np.int64)
        self.eos = eos
        self._plain = _pack(self.alphabet)
        self._end_below = np.uint64(int(end_chance * (1 << 32)))
        self.length: I64 = np.zeros(slots, np.int64)
        self.next: I64 = np.full(slots, -1, np.int64)
        self.emitted: I64 = np.zeros(slots, np.int64)
        self.finished: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._most: I64 = np.zeros(slots, np.int64)
        self._least: I64 = np.zeros(slots, np.int64)
        self._ends: NDArray[np.bool_] = np.zeros(slots, np.bool_)  # EOS ends it
        self._stops: dict[int, frozenset[int]] = {}  # slots with further stop ids
        self._given: dict[int, tuple[int, ...]] = {}  # slots whose output begins with ids that stand
        self._allowed: dict[int, Words] = {}  # slots that may not draw everything
        self._seed: U64 = np.zeros(slots, np.uint64)
        self._digest: U64 = np.zeros(slots, np.uint64)
        self._ring: U64 = np.zeros((slots, WINDOW), np.uint64)  # id + 1 at position mod WINDOW, 0: nothing
        self._tails: U64 = np.zeros((tails, WINDOW), np.uint64)

    def init(self, init: SlotInit) -> None:
        """The slot starts over, with nothing in its window."""
        s = init.slot
        self.length[s], self.next[s], self.emitted[s], self.finished[s] = init.start, -1, init.n_emitted, False
        self._most[s], self._least[s] = init.params.max_tokens, init.params.min_tokens
        self._ends[s] = self.eos in init.stops
        self._seed[s] = np.uint64((init.seed * 0xD1342543DE82EF95 + init.choice * 0xAF251AF3B0F025B5 + 1) & _M64)
        self._ring[s], self._digest[s] = 0, 0
        if more := init.stops - {self.eos}:
            self._stops[s] = more
        else:
            self._stops.pop(s, None)
        self._given.pop(s, None)
        self._allowed.pop(s, None)
        if init.params.given_ids:
            self._given[s] = init.params.given_ids
        if (mask := self._mask_of(init.params)) is not None:
            self._allowed[s] = mask

    def _mask_of(self, params: SamplingParams) -> Words | None:
        """What a request's own fields leave, or None: everything."""
        bad = {word[0] for word in params.bad_words if len(word) == 1}
        if not (params.allowed_ids or bad):
            return None
        left = set(params.allowed_ids or (*self.alphabet.tolist(), self.eos)) - bad
        mask = _pack(np.array(sorted(left) or [self.eos], np.int64))
        return np.pad(mask, (0, max(0, len(self._plain) - len(mask), (self.eos >> 5) + 1 - len(mask))))

    def copy(self, src: int, dst: int) -> None:
        """dst stands where src stands."""
        self.length[dst], self._ring[dst], self._digest[dst] = self.length[src], self._ring[src], self._digest[src]

    def load(self, slot: int, pos: int, tail: int) -> None:
        """The slot resumes at `pos`."""
        self._ring[slot] = self._tails[tail]
        self._digest[slot] = self._fold(slot, pos)

    def feed_chunk(self, row: RowWork, saves: Sequence[tuple[int, int]], *, parked: bool = False) -> None:
        """A row with ids: window and length move to its end; `saves` are (position, tail) inside it.

        Parked, it moves to its last id, which becomes the next one to feed.
        """
        s, end, ids = row.slot, row.start + len(row.ids), row.ids
        before = self._ring[s, np.arange(row.start - WINDOW, row.start) % WINDOW]
        for pos, tail in saves:
            self._tails[tail] = self._window(row, before, pos)
        if parked:
            self.next[s], ids, end = ids[-1], ids[:-1], end - 1
        history = np.concatenate([before, np.array(ids[-PAGE_TOKENS:], np.uint64) + np.uint64(1)])
        self._ring[s, np.arange(end - WINDOW, end) % WINDOW] = history[-WINDOW:]
        self.length[s] = end
        self._digest[s] = self._fold(s, end)

    def feed_next(self, slots: Numbers) -> None:
        """Decode rows: each feeds its next token at its length."""
        length = self.length[slots]
        place = length % WINDOW
        new = (self.next[slots] + 1).astype(np.uint64)
        self._digest[slots] = self._digest[slots] * _BASE + new - self._ring[slots, place] * _OUT
        self._ring[slots, place] = new
        self.length[slots] = length + 1

    def sample(self, slots: Numbers, masks: Mapping[int, Words]) -> I64:
        """Draw a token for each, move its state on and test for its end. `masks`: of slots that are constrained."""
        emitted = self.emitted[slots]
        bits = _mix(self._seed[slots] + _mix(self._digest[slots]) + _mix(emitted << 32 | self.length[slots]))
        tokens: I64 = self.alphabet[(bits >> np.uint64(32)) % np.uint64(len(self.alphabet))]
        ends = self._ends[slots]
        if self._end_below:
            drawn = ((bits & np.uint64(0xFFFFFFFF)) < self._end_below) & ends & (emitted + 1 > self._least[slots])
            tokens = np.where(drawn, self.eos, tokens)
        if self._allowed:
            masks = self._narrowed(slots, masks)
        if masks:
            tokens = tokens.copy()
            for index, slot in enumerate(slots.tolist()):
                if (mask := masks.get(slot)) is not None:
                    may_end = int(emitted[index]) + 1 > int(self._least[slot])
                    tokens[index] = self._legal(int(bits[index]), mask, may_end)
        if self._given:
            tokens = tokens.copy()
            for index, slot in enumerate(slots.tolist()):
                if (at := int(emitted[index])) < len(given := self._given.get(slot, ())):
                    tokens[index] = given[at]
        emitted += 1
        over = (emitted >= self._most[slots]) | (ends & (tokens == self.eos))
        if self._stops:
            more = [int(t) in self._stops.get(int(s), ()) for s, t in zip(slots, tokens, strict=True)]
            over |= np.array(more, np.bool_)
        self.emitted[slots] = emitted
        self.next[slots] = tokens
        self.finished[slots] = over
        self.length[slots] -= over  # who ends does not move on
        return tokens

    def _narrowed(self, slots: Numbers, masks: Mapping[int, Words]) -> dict[int, Words]:
        """The masks of these slots, each cut to what its request allows where that leaves anything."""
        narrowed = dict(masks)
        for slot in slots.tolist():
            if (own := self._allowed.get(slot)) is None:
                continue
            both = own
            if (mask := masks.get(slot)) is not None:
                size = max(len(mask), len(own))
                both = np.pad(mask, (0, size - len(mask))) & np.pad(own, (0, size - len(own)))
                both = both if both.any() else mask
            narrowed[slot] = both
        return narrowed

    def _legal(self, bits: int, mask: Words, may_end: bool) -> int:
        """One of the tokens that the mask allows, by the hash: in one of four cases the end, where it is among them."""
        end = self.eos if mask[self.eos >> 5] >> (self.eos & 31) & 1 else -1
        if len(self._plain) < len(mask):
            self._plain = np.pad(self._plain, (0, len(mask) - len(self._plain)))
        plain = mask & self._plain
        if not plain.any():
            plain = mask
        words = np.flatnonzero(plain)
        if end >= 0 and ((may_end and bits & 3 == 0) or plain is mask):
            return end
        word = int(words[(bits >> 32) % len(words)])
        value = int(plain[word]) & 0xFFFFFFFF
        places = [place for place in range(32) if value >> place & 1]
        return 32 * word + places[(bits >> 8) % len(places)]

    def refresh(self, slot: int, tail: int) -> None:
        """The slot's state as it is now goes into `tail`."""
        self._tails[tail] = self._ring[slot]

    def _fold(self, slot: int, pos: int) -> np.uint64:
        window = self._ring[slot, np.arange(pos - WINDOW, pos) % WINDOW]
        return np.uint64((window * _POWERS).sum(dtype=np.uint64))

    def _window(self, row: RowWork, before: U64, pos: int) -> U64:
        """The ring as it was at `pos` inside a chunk."""
        ids = np.array(row.ids[max(0, pos - row.start - WINDOW) : pos - row.start], np.uint64) + np.uint64(1)
        ring = np.zeros(WINDOW, np.uint64)
        ring[np.arange(pos - WINDOW, pos) % WINDOW] = np.concatenate([before, ids])[-WINDOW:]
        return ring


def _pack(ids: I64) -> Words:
    """One bit per id, as in masks; as long as the largest id needs."""
    words = np.zeros(int(ids.max()) // 32 + 1, np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words.view(np.int32)


def _mix(values: NDArray[np.uint64] | I64) -> U64:
    """64 well-mixed bits of each."""
    x = values.astype(np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
