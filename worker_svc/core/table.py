"""What a worker holds, without tensors: slots with their page tables, published pages, published tails.

Plain bookkeeping and its checks. Nothing here knows frames, streams or time: `plan` applies frames to it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from meshkit.frames import PublishedPage, PublishedTail
from meshkit.types import PAGE_TOKENS, ModelInfo, RequestId, SamplingParams
from worker_svc.core.work import RowWork

LAST_IDS = 128
"""How many sampled ids a slot remembers for its dump."""


class FrameError(Exception):
    """A frame that cannot be executed: it ends the attachment. `fault` marks what only a bug of the peer explains."""

    def __init__(self, code: str, message: str, *, fault: bool = True) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Sizes per rank; ids are global: rank * size + local."""

    slots: int
    pages: int
    tails: int
    ranks: int = 1
    max_step_tokens: int
    max_verify: int = 1


@dataclass(slots=True, kw_only=True)
class Slot:
    """One choice being served. (length, next) = committed tokens and the token to feed at position length.

    Both are as booked; `fed` is the length that the steps launched since will lead to at most.
    """

    slot: int
    gen: int
    request_id: RequestId
    attempt: int
    choice: int
    params: SamplingParams
    stops: frozenset[int]
    grammar_id: bytes = b""  # empty: unconstrained
    length: int
    n_emitted: int
    last_ids: deque[int]
    pages: list[int]
    fed: int = 0
    sampling: int = 0  # launched steps that sample for it and are not booked yet
    next: int = -1  # -1: the prompt is not through yet
    finished: bool = False
    failed: bool = False  # finished by a fault
    spare: int = -1
    spare_pos: int = 0  # 0: the spare holds nothing
    fresh_from: int = 0  # window rows below do not exist: start of an exact replay, else 0
    decode: RowWork | None = None  # its decode row, while nothing that stands there changes


class SlotTable:
    """All slots, page references and publications of one worker group."""

    def __init__(self, pools: PoolConfig, model: ModelInfo) -> None:
        self.pools = pools
        self.model = model
        self.slots: dict[int, Slot] = {}
        self.published: dict[int, PublishedPage] = {}
        self.tails: dict[int, int] = {}  # published tail -> page at whose end it resumes
        self._coming: dict[int, PublishedPage] = {}  # published by frames under way
        self._coming_tails: dict[int, int] = {}
        self.max_gen = 0
        self._last_gen: dict[int, int] = {}
        self._released: list[tuple[int, int]] = []
        self._refs = [0] * (pools.pages * pools.ranks)

    def slot(self, number: int, field: str) -> Slot:
        """The live slot, or FrameError."""
        self.check_range(number, self.pools.slots, field)
        found = self.slots.get(number)
        if found is None:
            raise FrameError("slot_unknown", f"{field} names slot {number}, which is free; send slot_init first")
        return found

    def settle(self) -> None:
        """Nothing is under way any more: what was launched and not booked did not happen."""
        for slot in self.slots.values():
            slot.fed, slot.sampling = slot.length, 0
        self._coming.clear()
        self._coming_tails.clear()

    def check_range(self, number: int, size: int, field: str) -> None:
        """Raise unless 0 <= number < ranks * size."""
        if not 0 <= number < size * self.pools.ranks:
            raise FrameError("out_of_range", f"{field} is {number}; valid are 0..{size * self.pools.ranks - 1}")

    def add(self, slot: Slot) -> None:
        """Take a new slot; its generation must be above every earlier one of the same number."""
        self.check_range(slot.slot, self.pools.slots, "slot_init.slot")
        if slot.slot in self.slots:
            raise FrameError("slot_busy", f"slot_init of slot {slot.slot}, which is in use; free it first")
        last = self._last_gen.get(slot.slot, 0)
        if slot.gen <= last:
            raise FrameError("slot_gen", f"slot_init of slot {slot.slot} has generation {slot.gen}; mint above {last}")
        self._last_gen[slot.slot] = slot.gen
        self.slots[slot.slot] = slot

    def free(self, number: int, gen: int) -> None:
        """End a slot; the generation must be the one that lives there."""
        slot = self.slot(number, "slot_free.slot")
        if slot.gen != gen:
            raise FrameError("slot_gen", f"slot_free of slot {number} names generation {gen}, it holds {slot.gen}")
        self.drop(slot)

    def drop(self, slot: Slot) -> None:
        """Forget a slot; its private pages and its spare are nobody's from now on."""
        del self.slots[slot.slot]
        for page in slot.pages:
            self._refs[page] -= 1
        if slot.grammar_id:
            self._released.append((slot.slot, slot.gen))

    def take_released(self) -> list[tuple[int, int]]:
        """(slot, gen) of the constrained slots dropped since the last call."""
        released, self._released = self._released, []
        return released

    def append(self, slot: Slot, page: int) -> None:
        """Next page of a slot's table."""
        self.check_range(page, self.pools.pages, "page_append.page")
        slot.pages.append(page)
        self._refs[page] += 1

    def check_unused(self, pages: Iterable[int]) -> None:
        """Raise if a retired page is still in some slot's table."""
        for page in pages:
            if self._refs[page]:
                raise FrameError("page_in_use", f"retire_page of page {page}, which a slot still reads")

    def check_writable(self, slot: Slot, start: int, end: int) -> None:
        """Positions start..end-1 must fall into pages of this slot alone, none of them published."""
        for index in range(start // PAGE_TOKENS, (end - 1) // PAGE_TOKENS + 1):
            page = slot.pages[index]
            if self.is_published(page):
                raise FrameError("page_published", f"slot {slot.slot} would write position {start} into page {page}")
            if self._refs[page] > 1:
                raise FrameError("page_shared", f"slot {slot.slot} would write position {start} into page {page}")

    def check_writable_tail(self, tail: int, field: str) -> None:
        """A tail about to be written must exist and not be published."""
        self.check_range(tail, self.pools.tails, field)
        if tail in self.tails or tail in self._coming_tails:
            raise FrameError("tail_published", f"{field} would write into published tail {tail}; retire it first")

    def is_published(self, page: int) -> bool:
        """Published, or to be by a frame under way."""
        return page in self.published or page in self._coming

    def publish(self, entry: PublishedPage) -> None:
        """Make a page immutable; dumps name it once its frame is booked."""
        self.check_range(entry.page, self.pools.pages, "publish.page")
        if self.is_published(entry.page):
            raise FrameError("page_published", f"publish of page {entry.page}, which is published; retire it first")
        if len(entry.key) != 16:
            raise FrameError("bad_key", f"publish.key of page {entry.page} has {len(entry.key)} bytes; send 16")
        self._coming[entry.page] = entry

    def publish_tail(self, tail: int, page: int) -> None:
        """Make a tail immutable; if it is some slot's spare, the slot has none from now on."""
        if not self.is_published(page):
            raise FrameError("page_unpublished", f"publish_tail of tail {tail} names page {page}; publish that first")
        self.check_writable_tail(tail, "publish_tail.tail")
        self._coming_tails[tail] = page
        for slot in self.slots.values():
            if slot.spare == tail:
                slot.spare, slot.spare_pos, slot.decode = -1, 0, None

    def retire(self, page: int) -> None:
        """The page loses its name."""
        if self.published.pop(page, None) is None and self._coming.pop(page, None) is None:
            raise FrameError("retire_unknown", f"retire_page of page {page}, which is not published")

    def retire_tail(self, tail: int) -> None:
        """The tail is nobody's from now on."""
        if self.tails.pop(tail, None) is None and self._coming_tails.pop(tail, None) is None:
            raise FrameError("retire_unknown", f"retire_tail of tail {tail}, which is not published")

    def booked(self, pages: Iterable[PublishedPage], tails: Iterable[PublishedTail]) -> None:
        """The frame that published these has run; what a later one retired meanwhile stays away."""
        for entry in pages:
            if self._coming.get(entry.page) is entry:
                self.published[entry.page] = self._coming.pop(entry.page)
        for tail, page in tails:
            if self._coming_tails.get(tail) == page:
                self.tails[tail] = self._coming_tails.pop(tail)
