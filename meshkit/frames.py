"""The mesh's frames as plain frozen values: what crosses a stream, without protobuf.

Pure cores take and return these; `meshkit.wire` packs them into the messages of protos/meshpb/v1 and back, checking
column lengths. Per-row columns are numpy arrays (int32 unless said otherwise), so that a step with 256 rows costs no
Python object per row; rare operations are tuples. Meanings: the comments in the .proto files and protos/README.md.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshkit.types import GrammarSource, ModelInfo, RequestId, SamplingParams

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


# One empty column of each type for all frames: there is nothing in it that anybody could change.
_NO_I32: I32 = np.empty(0, np.int32)
_NO_U8: U8 = np.empty(0, np.uint8)
_NO_F32: F32 = np.empty(0, np.float32)


def _i32() -> I32:
    return _NO_I32


def _u8() -> U8:
    return _NO_U8


def _f32() -> F32:
    return _NO_F32


class Verdict(IntEnum):
    """Answer to a Submit. Everything but ACCEPTED is a refusal before any work was done."""

    UNSPECIFIED = 0
    ACCEPTED = 1
    STALE_ATTACH = 2
    SUPERSEDED = 3
    CANCELLED = 4
    QUEUE_FULL = 5
    NEVER_FITS = 6
    NO_WORKER = 7
    DRAINING = 8
    INVALID = 9
    POISONED = 10
    BAD_GRAMMAR = 11
    GRAMMAR_LATER = 12


class RowState(IntEnum):
    """What happened to a row in a step."""

    CHUNK = 0  # a chunk without sample
    SAMPLED = 1
    PARKED = 2
    FINISHED = 3  # finished in this frame
    FINISHED_BEFORE = 4  # a frame in flight still named it; it computed into scratch
    FAILED = 5  # nothing was sampled and nothing will be: a RowFault says why


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """See message Logprobs."""

    rows: I32 = field(default_factory=_i32)
    widths: U8 = field(default_factory=_u8)
    ids: I32 = field(default_factory=_i32)
    values: F32 = field(default_factory=_f32)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From the working loop; `step_age_ms` is how long the step reported has been running, 0 when idle."""

    step: int = 0
    step_age_ms: int = 0


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender closes this stream on purpose."""

    reason: str = ""


# ---- gateway <-> scheduler ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitChoice:
    choice: int
    row: int
    row_gen: int
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """One attempt at a request. Idempotency key: (request_id, attempt)."""

    attach_id: int
    request_id: RequestId
    attempt: int
    choices: tuple[SubmitChoice, ...]
    params: SamplingParams
    seed: int
    remaining_ms: int
    prompt: I32
    page_keys: tuple[bytes, ...] = ()
    tenant: str = ""
    priority: int = 0
    kill_count: int = 0
    traceparent: str = ""
    namespace: bytes = b""  # keyed page_keys, and keys the pages to come; empty: the scheduler computes its own
    grammar: GrammarSource | None = None


@dataclass(frozen=True, slots=True)
class SubmitReply:
    verdict: Verdict
    message: str = ""
    retry_after_ms: int = 0
    place: str = ""  # with BAD_GRAMMAR
    grammar_rev: str = ""  # with ACCEPTED of a constrained request


@dataclass(frozen=True, slots=True)
class GatewayHello:
    name: str
    boot: int
    build: str
    proto_rev: int


@dataclass(frozen=True, slots=True)
class GatewayHelloAck:
    boot: int
    build: str


@dataclass(frozen=True, slots=True)
class CancelRows:
    rows: I32
    row_gens: I32


@dataclass(frozen=True, slots=True)
class StopRows:
    rows: I32
    row_gens: I32
    keeps: I32


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatus:
    ready: bool = False
    draining: bool = False
    model: ModelInfo | None = None
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    slots_total: int = 0
    slots_free: int = 0
    workers: int = 0
    preemptions: int = 0
    retry_after_ms: int = 0
    grammar_queue: int = 0


class RowError(NamedTuple):
    row_index: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFrame:
    """Tokens of one step for one gateway. ids are flat, `counts` per row; finishes are FinishReason values."""

    step: int
    rows: I32
    row_gens: I32
    bases: I32
    counts: I32
    ids: I32
    finishes: U8
    cached: I32 = field(default_factory=_i32)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    errors: tuple[RowError, ...] = ()
    waited_rows: I32 = field(default_factory=_i32)  # indices of rows ...
    waited_ms: I32 = field(default_factory=_i32)  # ... that queued so long before their first chunk


@dataclass(frozen=True, slots=True)
class MovedRows:
    rows: I32
    row_gens: I32
    kills: I32


GatewayUp = GatewayHello | Heartbeat | CancelRows | StopRows | Bye
GatewayDown = GatewayHelloAck | TokenFrame | SchedulerStatus | Heartbeat | MovedRows | Bye

# ---- scheduler <-> worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    group: str
    boot: int
    build: str
    proto_rev: int
    model: ModelInfo
    ranks: int
    slots: int
    pages: int
    tails: int
    max_gen: int
    max_step_tokens: int
    max_verify: int


@dataclass(frozen=True, slots=True)
class WorkerHelloAck:
    boot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpSlot:
    slot: int
    slot_gen: int
    request_id: RequestId
    attempt: int
    choice: int
    length: int
    n_emitted: int
    next: int
    finished: bool
    last_ids: tuple[int, ...]
    pages: tuple[int, ...]
    spare: int  # -1 none
    spare_pos: int  # 0: holds nothing
    grammar_id: bytes = b""  # it is bound to; empty: unconstrained


class PublishedPage(NamedTuple):
    page: int
    page_gen: int
    parent: int  # -1 = root
    key: bytes


class PublishedTail(NamedTuple):
    tail: int
    page: int  # the tail resumes at this page's end


@dataclass(frozen=True, slots=True)
class Dump:
    slots: tuple[DumpSlot, ...] = ()
    pages: tuple[PublishedPage, ...] = ()
    tails: tuple[PublishedTail, ...] = ()
    last: bool = False


class SlotFree(NamedTuple):
    slot: int
    slot_gen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInit:
    slot: int
    slot_gen: int
    request_id: RequestId
    attempt: int
    choice: int
    params: SamplingParams
    seed: int
    start: int
    n_emitted: int
    emitted: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    grammar_id: bytes = b""  # 16 bytes, or empty: unconstrained
    thinking: bool = False  # the constraint arms after </think>
    traceparent: str = ""  # of sampled requests only


class Spare(NamedTuple):
    slot: int
    tail: int


class SlotCopy(NamedTuple):
    src: int
    dst: int
    src_page: int
    dst_page: int


class PageAppend(NamedTuple):
    slot: int
    page: int


class TailLoad(NamedTuple):
    slot: int
    tail: int


class TailSave(NamedTuple):
    slot: int
    pos: int
    tail: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFrame:
    """One step of one worker group. Rows not named in chunk_rows are decode rows."""

    step: int
    slots: I32 = field(default_factory=_i32)
    rank_off: I32 = field(default_factory=_i32)
    decode_only: bool = False
    chunk_rows: I32 = field(default_factory=_i32)
    chunk_starts: I32 = field(default_factory=_i32)
    chunk_lens: I32 = field(default_factory=_i32)
    chunk_write_froms: I32 = field(default_factory=_i32)
    chunk_samples: U8 = field(default_factory=_u8)
    chunk_ids: I32 = field(default_factory=_i32)
    retire_pages: tuple[int, ...] = ()
    retire_tails: tuple[int, ...] = ()
    frees: tuple[SlotFree, ...] = ()
    inits: tuple[SlotInit, ...] = ()
    spares: tuple[Spare, ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    appends: tuple[PageAppend, ...] = ()
    tail_loads: tuple[TailLoad, ...] = ()
    tail_saves: tuple[TailSave, ...] = ()
    publishes: tuple[PublishedPage, ...] = ()
    publish_tails: tuple[PublishedTail, ...] = ()


class RowFault(NamedTuple):
    """Why a row in state FAILED ends. Codes: sampling_fault, grammar_failed."""

    row_index: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFrame:
    step: int
    t_start_ns: int = 0
    t_end_ns: int = 0
    states: U8 = field(default_factory=_u8)
    counts: U8 = field(default_factory=_u8)
    tokens: I32 = field(default_factory=_i32)
    spare_rows: I32 = field(default_factory=_i32)
    spare_positions: I32 = field(default_factory=_i32)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    jit_compiles: int = 0
    error: str = ""
    faults: tuple[RowFault, ...] = ()


WorkerUp = WorkerHello | Dump | ResultFrame | Heartbeat | Bye
WorkerDown = WorkerHelloAck | StepFrame | Heartbeat | Bye

Frame = GatewayUp | GatewayDown | WorkerUp | WorkerDown


@dataclass(frozen=True, slots=True)
class Envelope:
    """A frame with the attachment it belongs to; attach_id is 0 in a Hello only."""

    attach_id: int
    frame: Frame
