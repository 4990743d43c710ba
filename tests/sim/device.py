"""The executor under simulation: rings, pages and tails hold digests of the ids that should have made them.

Reading a ring, page or tail that is unwritten, stale, torn or of another sequence raises `Violation`; so does a write
into a published page. What is read decides the next token, see `reference`.
"""

from dataclasses import dataclass, field

from meshkit.types import PAGE_TOKENS
from tests.sim.masks import to_bits
from tests.sim.reference import START_DIGEST, Sampler, fold, new_sampler
from worker_svc.core.resident import ResidentSlots
from worker_svc.core.table import SlotTable
from worker_svc.core.work import CopyWork, Fault, RowOutcome, RowWork, SlotInit, StepOutcome, StepWork, TailWork
from worker_svc.masks.constraints import UNMASKED, Constraints, SlotMask
from worker_svc.masks.constraints import Place as MaskPlace
from worker_svc.masks.source import MaskSource

RING = 192
LAYERS = 2
REPLAY = 128 + 127 * (LAYERS - 1)
"""Tokens of an exact replay."""


class Violation(AssertionError):
    """An invariant does not hold; `rule` names it."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


@dataclass(slots=True)
class Page:
    """Digest before the first entry and after each; `run` entries form one unbroken chain from offset 0."""

    before: int = -1
    after: list[int] = field(default_factory=lambda: [-1] * PAGE_TOKENS)
    run: int = 0
    torn: bool = False
    tenant: str = ""  # whose ids it holds

    def clone(self) -> "Page":
        return Page(self.before, list(self.after), self.run, self.torn, self.tenant)

    def write(self, offset: int, before: int, after: int, tenant: str) -> None:
        if offset == 0:
            self.before, self.torn, self.tenant = before, False, tenant
        elif offset > self.run or self.after[offset - 1] != before:
            self.torn = True
        self.after[offset] = after
        self.run = offset + 1


@dataclass(slots=True)
class Place:
    """Device state of one slot. `ring` maps a position to the digest of everything before it."""

    sampler: Sampler
    ring: dict[int, int]
    tenant: str = ""
    exact_from: int = 0  # a replay is not exact before
    grammar_id: bytes = b""


class Device:
    """One worker's pools. Rows are parked as the caller says, and where a grammar's masks are not there."""

    def __init__(self, table: SlotTable, masks: MaskSource | None) -> None:
        self.table = table
        self.constraints = Constraints()
        if masks is not None:
            self.constraints.source = masks
        self.pages = [Page() for _ in range(table.pools.pages * table.pools.ranks)]
        self.tails: list[tuple[int, int]] = [(0, -1)] * (table.pools.tails * table.pools.ranks)
        self.places: dict[int, Place] = {}
        self.resident = ResidentSlots()

    def run(self, work: StepWork, parked: set[int], faulty: set[int], tenants: dict[int, str]) -> StepOutcome:
        """Execute a step; rows whose index is in `parked` sample nothing, those in `faulty` never again.

        `tenants`: of the slots that start.
        """
        for init in work.inits:
            self._init(init, tenants[init.slot])
        for copy in work.copies:
            self._copy(copy)
        for load in work.tail_loads:
            pos, digest = self.tails[load.tail]
            if pos != load.pos:
                raise Violation("tail", f"slot {load.slot} loads tail {load.tail} at {load.pos}; it holds {pos}")
            self.places[load.slot].ring = {pos: digest}
        rows = [self.resident.resolve(row) for row in work.rows]
        for row in rows:
            if row is not None:
                self._forward(row)
        spans = {row.slot: (row.start, row.start + len(row.ids)) for row in rows if row is not None}
        for save in work.saves:
            start, end = spans.get(save.slot, (0, 0))
            self._save(save, start + 1, end)
        places = [
            MaskPlace(row.slot, row.out_pos)
            for i, row in enumerate(rows)
            if row is not None and row.sample_last and i not in parked and i not in faulty
        ]
        masks = self.constraints.take(places, rows=len(rows), forward_s=0.0)
        outcomes = [
            RowOutcome(()) if row is None else self._sample(row, masks, parked=i in parked, faulty=i in faulty)
            for i, row in enumerate(rows)
        ]
        for row, outcome in zip(rows, outcomes, strict=True):
            failed = outcome.fault is not None
            if row is not None and (pos := self.resident.advance(row, outcome.tokens, failed=failed)):
                end = next(reversed(self.places[row.slot].ring))
                self._save(TailWork(row.slot, pos, row.spare), end - RING + 128, end)
        self.constraints.tell(
            (row.slot, row.out_pos, outcome, self.resident.ended(row.slot))
            for row, outcome in zip(rows, outcomes, strict=True)
            if row is not None
        )
        return StepOutcome(rows=tuple(outcomes))

    def published(self, page: int) -> int:
        """Check that a page just published is whole; returns the digest at its end."""
        content = self.pages[page]
        if content.torn or content.run != PAGE_TOKENS:
            raise Violation("I5", f"published page {page} has {content.run} entries, torn {content.torn}")
        return content.after[-1]

    def published_tail(self, tail: int, page: int) -> None:
        """A published tail must be the state at the end of its page."""
        if self.tails[tail][1] != self.pages[page].after[-1]:
            raise Violation("I5", f"published tail {tail} is not the state at the end of page {page}")

    def _init(self, init: SlotInit, tenant: str) -> None:
        sampler = new_sampler(init.seed, init.choice, init.params, init.emitted, init.prompt)
        self.places[init.slot] = Place(sampler, {0: START_DIGEST}, tenant, grammar_id=init.grammar_id)
        self.resident.init(init)

    def _copy(self, copy: CopyWork) -> None:
        src, dst = self.places[copy.src], self.places[copy.dst]
        dst.ring, dst.exact_from = dict(src.ring), src.exact_from
        self.resident.copy(copy.src, copy.dst)
        if copy.src_page >= 0:
            self.pages[copy.dst_page] = self.pages[copy.src_page].clone()

    def _forward(self, row: RowWork) -> None:
        place = self.places[row.slot]
        if row.start and row.start == row.fresh_from:
            self._replay(row, place)
        digest = place.ring.get(row.start, -1)
        if digest < 0:
            raise Violation("ring", f"slot {row.slot} starts at {row.start}, where its ring holds nothing")
        self._check_pages(row, digest, place.tenant)
        ring = place.ring
        for pos in range(row.start + 1, row.start + 1 + len(ring)):
            if ring.pop(pos, -1) < 0:
                break
        if len(ring) > 3 * RING:
            ring = {pos: value for pos, value in ring.items() if pos > row.start - RING}
        published = self.table.published
        page, number = None, -1
        for pos, token in enumerate(row.ids, row.start):
            after = fold(digest, (token,))
            if pos >= row.write_from:
                if page is None or not pos % PAGE_TOKENS:
                    number = row.pages[pos // PAGE_TOKENS]
                    page = self.pages[number]
                    if number in published:
                        raise Violation("I4", f"slot {row.slot} writes position {pos} into published page {number}")
                page.write(pos % PAGE_TOKENS, digest, after, place.tenant)
            else:
                self._check_shared(row, pos, after, place.tenant)
            digest = after
            ring[pos + 1] = after
        place.ring = ring

    def _replay(self, row: RowWork, place: Place) -> None:
        """Start without a ring: everything older comes from pages, and the windows are exact only some tokens later."""
        page = self.pages[row.pages[(row.start - 1) // PAGE_TOKENS]]
        place.ring = {row.start: page.after[(row.start - 1) % PAGE_TOKENS]}
        place.exact_from = row.start + REPLAY
        if row.write_from < place.exact_from:
            raise Violation("replay", f"slot {row.slot} replays {row.write_from - row.start} tokens of {REPLAY}")

    def _check_pages(self, row: RowWork, digest: int, tenant: str) -> None:
        """Everything below `start` must be this sequence's, whole, in pages of its tenant."""
        expected = START_DIGEST
        full, rest = divmod(row.start, PAGE_TOKENS)
        for index in range(full + (rest > 0)):
            page = self.pages[row.pages[index]]
            if page.tenant != tenant:
                raise Violation("I10", f"slot {row.slot} of {tenant} reads page {row.pages[index]} of {page.tenant}")
            need = PAGE_TOKENS if index < full else rest
            if page.torn or page.run < need or page.before != expected:
                raise Violation("I4", f"slot {row.slot} reads page {row.pages[index]}: {page.run} of {need} entries")
            expected = page.after[need - 1]
        if expected != digest:
            raise Violation("I4", f"slot {row.slot} at {row.start}: its pages and its ring are of different sequences")

    def _check_shared(self, row: RowWork, pos: int, after: int, tenant: str) -> None:
        """A position that is computed but not written: its page must hold the same, of the same tenant."""
        number = row.pages[pos // PAGE_TOKENS]
        page = self.pages[number]
        if page.tenant != tenant:
            raise Violation("I10", f"slot {row.slot} of {tenant} shares page {number} of {page.tenant}")
        if page.torn or page.run != PAGE_TOKENS or page.after[pos % PAGE_TOKENS] != after:
            raise Violation("I5", f"slot {row.slot} shares page {number}, which is not its own at {pos}")

    def _save(self, save: TailWork, first: int, last: int) -> None:
        if not first <= save.pos <= last:
            raise Violation("tail", f"slot {save.slot} saves a tail at {save.pos}, not in {first}..{last}")
        digest = self.places[save.slot].ring.get(save.pos, -1)
        if digest < 0:
            raise Violation("tail", f"slot {save.slot} saves a tail at {save.pos}, which its ring does not hold")
        if save.pos < self.places[save.slot].exact_from:
            raise Violation("replay", f"slot {save.slot} saves a tail at {save.pos}, before its replay is exact")
        if save.tail in self.table.tails:
            raise Violation("I4", f"slot {save.slot} writes into published tail {save.tail}")
        self.tails[save.tail] = (save.pos, digest)

    def _sample(self, row: RowWork, masks: dict[int, SlotMask], *, parked: bool, faulty: bool) -> RowOutcome:
        place = self.places[row.slot]
        if not row.sample_last or parked:
            return RowOutcome(())
        if faulty:
            return RowOutcome((), (), Fault("grammar_failed" if place.grammar_id else "sampling_fault", "simulated"))
        mask = masks.get(row.slot, UNMASKED)
        if not mask.answer.ready:
            return RowOutcome((), (), mask.answer.fault)
        if (mask.rows is None) == bool(place.grammar_id):
            raise Violation("G3", f"slot {row.slot} is masked, or not, as it should not be")
        bits = None if mask.rows is None else to_bits(mask.rows[0])
        token, logprobs = place.sampler.sample(place.ring[row.start + len(row.ids)], row.out_pos, bits)
        return RowOutcome((token,), () if logprobs is None else (logprobs,))
