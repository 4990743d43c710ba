"""Which instance a request goes to: where most of its prompt lies already, unless that place is busy.

Pure: what it knows are the statuses it is told, what this gateway has sent, and how much of it came out of prefix
caches. Every candidate is priced in pages of prefill: what of the prompt it would have to compute, what it has to
compute before, and how full it is. Where nothing is known of prompts, the least loaded wins; where nothing is known of
loads either, what this gateway has sent there counts.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from gateway.instances.known_pages import MOST_KEYS, Known, KnownPages
from meshkit.frames import SchedulerStatus
from meshkit.types import PAGE_TOKENS

MS: Final = 1_000_000
STALE_NS: Final = 3_000 * MS  # statuses come once a second
CROWD_PAGES: Final = 32.0
"""What a full instance costs more than an empty one: its steps are longer for all tokens of the answer."""
HOME_PAGES: Final = 1.0
"""What a prompt's home is cheaper."""

SERVING, BUSY, NO_WORKER, LOST, LEAVING, NEVER_SERVED, OUT = range(7)
"""Standings of an instance; BUSY has refused something lately."""

Reason = Literal["prefix", "load", "only"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed."""

    keys: Sequence[bytes]  # of the prompt's full pages
    tokens: int
    choices: int


@dataclass(slots=True, eq=False)
class Pick:
    """Where a request went; the chooser's own record of it until it is over."""

    index: int
    keys: Sequence[bytes]
    known: Known
    reason: Reason
    pages: float  # of prefill that are still expected there
    open: int  # choices
    answered: bool = False


@dataclass(slots=True)
class _Instance:
    """One scheduler as this gateway sees it."""

    name: bytes
    pages: KnownPages = field(default_factory=KnownPages)
    status: SchedulerStatus | None = None
    status_ns: int = 0
    attached: bool = False
    others: int = 0  # choices there that this gateway has not sent
    open: int = 0  # ... and that it has
    prefill: float = 0.0  # pages sent there whose first token has not come
    avoid_ns: int = 0  # it refused a request and asked not to be asked until then

    def standing(self, now_ns: int) -> int:
        """How much can be expected of it, the best first."""
        status = self.status
        if status is None or status.model is None:
            return NEVER_SERVED
        if status.draining:
            return LEAVING
        if not self.attached:
            return LOST
        if not status.ready:
            return NO_WORKER
        return BUSY if now_ns < self.avoid_ns else SERVING


class Chooser:
    """`names` tell instances apart, the same way in every gateway: their addresses."""

    def __init__(self, names: Sequence[str], rng: Random, *, candidates: int = 0, prefixes: bool = True) -> None:
        """`candidates`: so many instances drawn at random are priced beside the one with most of the prompt; 0 = all.

        Without `prefixes` load alone decides.
        """
        self.instances = [_Instance(name.encode()) for name in names]
        self._rng = rng
        self._candidates = candidates
        self._prefixes = prefixes
        self._typical = 4.0  # pages that a request makes an instance compute, recent mean

    # ---- what it is told --------------------------------------------------------------------------------------------

    def told(self, index: int, status: SchedulerStatus | None, attached: bool, now_ns: int) -> None:
        """What an instance said last; the same object again says nothing new."""
        it = self.instances[index]
        it.attached = attached
        if status is None or status is it.status:
            return
        it.status, it.status_ns = status, now_ns
        it.others = max(0, status.running + status.waiting - it.open)
        if status.pages_total:
            it.pages.most = min(MOST_KEYS, status.pages_total)

    def answered(self, pick: Pick, cached_tokens: int) -> None:
        """The first token of a request has come: its prefill is done, and so much of it was in the cache."""
        it = self.instances[pick.index]
        pick.answered = True
        it.prefill = max(0.0, it.prefill - pick.pages)
        found = cached_tokens / PAGE_TOKENS - pick.known.pages  # more than was known, or less
        self._typical += (max(0.0, pick.pages - found) - self._typical) / 32
        pick.pages = 0.0
        if cached_tokens // PAGE_TOKENS < pick.known.sure / 2:
            it.pages.forget_until(pick.known.stamp)
        if pick.keys:
            it.pages.ends(pick.keys[-1])

    def ended(self, pick: Pick, choices: int) -> None:
        """So many choices of it are over; with the last one nothing of it is left."""
        it = self.instances[pick.index]
        it.open -= choices
        pick.open -= choices
        if not pick.open:
            it.prefill = max(0.0, it.prefill - pick.pages)
            pick.pages = 0.0

    def moved(self, pick: Pick) -> None:
        """The request goes elsewhere; nothing of it was computed there, as far as anybody knows."""
        if not pick.answered:
            self.instances[pick.index].pages.withdraw(pick.keys[pick.known.pages :])
        self.ended(pick, pick.open)

    def avoid(self, index: int, retry_after_ms: int, now_ns: int) -> None:
        """An instance took a request not now: others come first for a while."""
        self.instances[index].avoid_ns = now_ns + min(1_000, max(100, retry_after_ms)) * MS

    def flushed(self, index: int) -> None:
        """Its prefix cache is empty."""
        self.instances[index].pages.clear()

    def heard(self, index: int, keys: Sequence[bytes]) -> None:
        """Another gateway has sent a prompt there."""
        self.instances[index].pages.note(keys)

    # ---- what it decides --------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, now_ns: int, without: Collection[int] = (), worst: int = NEVER_SERVED) -> Pick | None:
        """The place for a request, booked there; None if none but those `without` has a standing of `worst` or better.

        Who has nothing better may be asked although it can serve nothing now: it knows what to answer.
        """
        ranks = [it.standing(now_ns) if i not in without else OUT for i, it in enumerate(self.instances)]
        best = min(ranks)
        if best > worst:
            return None
        open_to = [i for i, rank in enumerate(ranks) if rank == best]
        known = {i: self.instances[i].pages.find(ask.keys) if self._prefixes else Known(0, 0, 0) for i in open_to}
        home = self._home(ask, open_to, known)
        index = self._cheapest(ask, open_to, known, home, now_ns)
        reason: Reason = "only" if len(open_to) == 1 else "prefix" if known[index].pages else "load"
        return self._book(index, ask, known[index], reason)

    def _home(self, ask: Ask, open_to: list[int], known: dict[int, Known]) -> int:
        """Where a prompt belongs by its first page that is new here; -1 if none is.

        Gateways that know nothing of each other's requests agree on it, so that one finds there what another has sent.
        """
        longest = max(known[i].pages for i in open_to)
        if not self._prefixes or longest >= len(ask.keys):
            return -1
        key = ask.keys[longest]
        return max(open_to, key=lambda i: hashlib.blake2b(key + self.instances[i].name, digest_size=8).digest())

    def _cheapest(self, ask: Ask, open_to: list[int], known: dict[int, Known], home: int, now_ns: int) -> int:
        if len(open_to) == 1:
            return open_to[0]
        priced = open_to
        if 0 < self._candidates < len(open_to):
            priced = self._rng.sample(open_to, self._candidates)
            longest = max(open_to, key=lambda i: known[i].pages)
            priced = list({*priced, longest, home} - {-1})
        return min(priced, key=lambda i: (self._price(i, ask, known[i], home, now_ns), self._rng.random()))

    def _price(self, index: int, ask: Ask, known: Known, home: int, now_ns: int) -> float:
        it = self.instances[index]
        slots = max(1, it.status.slots_total) if it.status is not None else 1
        stale = now_ns - it.status_ns > STALE_NS
        load = it.open + (0 if stale else it.others)
        queue = max(0, load + ask.choices - slots)
        crowd = CROWD_PAGES * min(1.0, load / slots)
        new = ask.tokens / PAGE_TOKENS - known.pages
        if index == home:
            new -= HOME_PAGES
        return new + it.prefill + queue * self._typical + crowd

    def _book(self, index: int, ask: Ask, known: Known, reason: Reason) -> Pick:
        it = self.instances[index]
        pages = max(0.0, ask.tokens / PAGE_TOKENS - known.pages)
        it.open += ask.choices
        it.prefill += pages
        if self._prefixes:
            it.pages.note(ask.keys)
        return Pick(index, ask.keys, known, reason, pages, ask.choices)
