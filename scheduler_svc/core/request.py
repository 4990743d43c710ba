"""One request and its choices, as the scheduler knows them: ids and places, never text.

A `Seq` is one choice: what is queued, placed in a slot, preempted, moved and finished. Its tokens are the prompt and
the ids booked so far; `length` counts those whose KV is committed at the worker, `fed` those that frames sent so far
will have committed at most. Plain data: who changes it is plan, book, adopt and submit. While a choice decodes, its
counters live in its worker's `lanes`, read and written here by the same names.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from meshkit.frames import I32
from meshkit.types import PAGE_TOKENS, FinishReason, RequestId, SamplingParams
from scheduler_svc.core.grammar import Grammar
from scheduler_svc.core.keymap import I64
from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.prefix import Hold


class Phase(IntEnum):
    """Where a choice stands. Every state but DONE is left by progress, cancel or deadline."""

    QUEUED = 0  # waits for admission; pages of an earlier run are in the prefix cache like anybody's
    FORKING = 1  # has a slot reserved and waits for its sibling's prefill
    PREFILL = 2
    DECODE = 3  # every frame from now on may sample
    PREEMPTING = 4  # its slot is freed; rows of frames in flight still count
    CLOSING = 5  # ended for its gateway; its slot goes with the next frame
    DONE = 6
    PENDING = 7  # its grammar is not there yet: it is counted as waiting, but cannot be admitted


@dataclass(slots=True, eq=False)
class Saved:
    """A tail that a chunk in flight or booked has saved; it belongs to the choice until its page is published."""

    pos: int
    tail: int
    reasons: int


@dataclass(slots=True, eq=False)
class Donor:
    """Whose prefill a waiting choice waits for: until it has published a tail at `pos`."""

    seq: "Seq"
    gen: int
    pos: int


@dataclass(slots=True, eq=False)
class Request:
    """What all choices of a request share. `attach_id` and `gateway` say who reads its rows."""

    request_id: RequestId
    attempt: int
    gateway: str
    gateway_boot: int
    attach_id: int
    tenant: str
    priority: int
    params: SamplingParams
    seed: int
    prompt: I32
    page_keys: tuple[bytes, ...]
    namespace: bytes  # of its page keys: tenant, salt, model revision, KV layout
    arrival: int  # ordinal of the first Submit, less where that was another scheduler's: order of service
    deadline_ns: int
    kills: int = 0
    suspects: list[tuple[str, int]] = field(default_factory=list)  # (group, boot) of losses not known to be crashes
    hold_until_ns: int = 0
    expire_ns: int = 0  # its gateway vanished: cancelled then unless resubmitted; 0 while it listens
    traceparent: str = ""  # of a sampled request
    grammar: Grammar | None = None
    thinking: bool = False  # the constraint arms after </think>
    pending_ns: int = 0  # since when it waits for its grammar
    calls: list[int] = field(default_factory=list)  # Submits that wait with it
    submitted_ns: int = 0
    choices: list["Seq"] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Its grammar is not there yet."""
        return self.grammar is not None and not self.grammar.grammar_id

    @property
    def all_kills(self) -> int:
        return self.kills + len(self.suspects)


@dataclass(slots=True, eq=False)
class Seq:
    """One choice of a request."""

    req: Request
    choice: int
    row: int
    row_gen: int
    ids: list[int]  # booked ids, but for those its lane still keeps; see `emitted`
    phase: Phase = Phase.QUEUED
    finish: FinishReason = FinishReason.NONE
    error: tuple[str, str] = ("", "")
    cached: int = 0  # prompt tokens that its last placement did not compute
    waited_ms: int = -1  # from its Submit to its first placement; -1: it had none, or took over another's prefill
    bypassed: int = 0
    donor: Donor | None = None  # QUEUED: the running prefill it waits for
    wait_until_ns: int = 0  # ... at most until then; 0 = has not waited yet
    columns: I64 | None = None  # keys of its full pages, as far as they were needed, for the index
    # placement: valid from FORKING to CLOSING
    worker: str = ""
    rank: int = 0
    slot: int = -1
    gen: int = 0
    pages: list[int] = field(default_factory=list)
    lanes: Lanes | None = None  # where the counters are while it decodes
    _length: int = 0
    _fed: int = 0
    _flying: int = 0
    _sampling: int = 0
    _planned_step: int = 0
    spare: int = -1
    spare_pos: int = 0
    hold: Hold | None = None  # its published pages, twins included: the first of its chain
    write_from: int = 0  # pages before this position are others', published: read, never written
    points: list[tuple[int, int]] = field(default_factory=list)  # where its prefill saves tails: (position, reasons)
    saved: list[Saved] = field(default_factory=list)
    gen_keys: list[bytes] = field(default_factory=list)  # keys of pages beyond the prompt's full ones
    forked: bool = False  # took over its leader's prefill
    leader: "Seq | None" = None  # FORKING: whose prefill it waits for
    followers: list["Seq"] = field(default_factory=list)  # choices that wait for this one's prefill

    @property
    def emitted(self) -> list[int]:
        """Ids booked so far; `extend` adds to them."""
        if self.lanes is not None:
            self.lanes.flush(self)
        return self.ids

    def extend(self, ids: list[int]) -> None:
        """Book more ids."""
        self.emitted.extend(ids)
        if self.lanes is not None:
            self.lanes.emitted[self.slot] += len(ids)

    @property
    def n_emitted(self) -> int:
        return len(self.ids) if self.lanes is None else int(self.lanes.emitted[self.slot])

    @property
    def length(self) -> int:
        """Tokens committed at the worker, as booked."""
        return self._length if self.lanes is None else int(self.lanes.length[self.slot])

    @length.setter
    def length(self, value: int) -> None:
        if self.lanes is None:
            self._length = value
        else:
            self.lanes.length[self.slot] = value

    @property
    def fed(self) -> int:
        """Tokens committed once all frames in flight have run."""
        return self._fed if self.lanes is None else int(self.lanes.fed[self.slot])

    @fed.setter
    def fed(self, value: int) -> None:
        if self.lanes is None:
            self._fed = value
        else:
            self.lanes.fed[self.slot] = value

    @property
    def flying(self) -> int:
        """Frames in flight that name it."""
        return self._flying if self.lanes is None else int(self.lanes.flying[self.slot])

    @flying.setter
    def flying(self, value: int) -> None:
        if self.lanes is None:
            self._flying = value
        else:
            self.lanes.flying[self.slot] = value

    @property
    def sampling(self) -> int:
        """Frames in flight that sample in it."""
        return self._sampling if self.lanes is None else int(self.lanes.sampling[self.slot])

    @sampling.setter
    def sampling(self, value: int) -> None:
        if self.lanes is None:
            self._sampling = value
        else:
            self.lanes.sampling[self.slot] = value

    @property
    def planned_step(self) -> int:
        """The last frame that names it."""
        return self._planned_step if self.lanes is None else int(self.lanes.planned[self.slot])

    @planned_step.setter
    def planned_step(self, value: int) -> None:
        if self.lanes is None:
            self._planned_step = value
        else:
            self.lanes.planned[self.slot] = value

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of service: smaller first."""
        return (self.req.priority, self.req.arrival, self.choice)

    @property
    def total(self) -> int:
        """Prompt and booked ids: what must be committed, but for the last one, before the next id is sampled."""
        return len(self.req.prompt) + self.n_emitted

    @property
    def nbytes(self) -> int:
        return 4 * self.total + 1024

    @property
    def most_pages(self) -> int:
        """Pages it can ever need: the last sampled id is never fed."""
        return pages_for(len(self.req.prompt) + self.req.params.max_tokens - 1)

    @property
    def placed(self) -> bool:
        return Phase.FORKING <= self.phase <= Phase.DECODE

    @property
    def sealed(self) -> int:
        """Leading pages that are published, under their own number or a twin's."""
        return len(self.hold.rows) if self.hold is not None else 0


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def tokens_of(seq: Seq, start: int, end: int) -> list[int]:
    """Tokens start..end-1 of prompt + booked ids."""
    n = len(seq.req.prompt)
    ids: list[int] = seq.req.prompt[start : min(end, n)].tolist() if start < n else []
    if end > n:
        ids += seq.emitted[max(start - n, 0) : end - n]
    return ids
