"""What the slot machine asks of the model executor, as torch-free frozen values.

One `StepWork` per frame. The slot machine (`worker_svc.core.slots`) resolves names and generations; the executor only
moves tensors: it knows slot, page and tail numbers, never requests. Next token, length and end of a slot live with the
executor (`worker_svc.core.resident`), so that a step can be launched before the one in front of it has come back.

Order inside a step: inits, copies, tail_loads, forward (saves gather layer by layer inside it), sample, spare refresh.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from meshkit.types import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from worker_svc.masks.source import MaskSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInit:
    """A slot starts serving a choice: reset ring, compressor state and sampler state."""

    slot: int
    slot_gen: int = 0
    params: SamplingParams
    seed: int  # 64 bit
    choice: int
    n_emitted: int  # output position of the next sampled token
    start: int = 0  # tokens committed already
    stops: frozenset[int] = frozenset()  # ids that end the slot; so does params.max_tokens
    emitted: tuple[int, ...] = ()  # all output ids, if the slot is constrained or a penalty reads output
    prompt: tuple[int, ...] = ()  # only if a penalty reads the prompt
    grammar_id: bytes = b""  # 16 bytes: every token needs a mask; empty: unconstrained
    thinking: bool = False  # the constraint arms after </think>


@dataclass(frozen=True, slots=True)
class CopyWork:
    """dst takes src's ring, compressor states and, if src_page >= 0, the contents of its partial page."""

    src: int
    dst: int
    src_page: int
    dst_page: int


@dataclass(frozen=True, slots=True)
class TailWork:
    """Load slot's ring and states from `tail` at position pos, or save them into it."""

    slot: int
    pos: int  # multiple of PAGE_TOKENS
    tail: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """One row of the batch: feed `ids` at positions start.. of `slot`, whose KV pages are `pages` in table order.

    A row without ids is a decode row: it feeds the slot's next token at its length, both as the device has them, and
    does nothing if the slot has ended there. `start` and `out_pos` are not set then.
    A verify row has 1 + drafts ids, a prefill chunk any number: the forward treats all alike.
    Positions below `write_from` are replayed: nothing is written to pages for them, entries are read from the
    retained pages, and window keys before `start` are masked (the ring holds nothing valid below `start`).
    """

    slot: int
    start: int = 0
    ids: tuple[int, ...] = ()
    pages: Sequence[int]  # enough for all tokens after this row
    write_from: int = 0
    fresh_from: int = 0  # window keys and states below this position do not exist (0, or start of an exact replay)
    sample_last: int = 1  # sample at the last `sample_last` positions: 0 none, 1 usual, k for verify rows
    out_pos: int = 0  # output position of the first sampled token (random counter, min_tokens)
    spare: int = -1  # tail to refresh if sampling leaves the slot's length at a multiple of PAGE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Everything one frame does on the device."""

    inits: tuple[SlotInit, ...] = ()
    copies: tuple[CopyWork, ...] = ()
    tail_loads: tuple[TailWork, ...] = ()
    rows: tuple[RowWork, ...] = ()
    saves: tuple[TailWork, ...] = ()  # start < pos <= start + len of that slot's row: gathered inside the forward


SAMPLING_FAULT = "sampling_fault"
GRAMMAR_FAILED = "grammar_failed"


class Fault(NamedTuple):
    """Why a choice cannot go on. Codes: those of `meshkit.frames.RowFault`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Sampled tokens of one row, in position order; logprobs one per token, or empty if the row did not ask.

    No tokens: a chunk without sample, a parked row, or a decode row of a slot that had ended. With a fault there are
    none either and the slot has ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What came out, rows in the order of StepWork.rows."""

    rows: tuple[RowOutcome, ...] = field(default=())
    t_start_ns: int = 0
    t_end_ns: int = 0
    jit_compiles: int = 0  # kernels that were compiled since the last step that said so: after start, a fault


class Executor(Protocol):
    """The device side of a worker. `launch` is called by the compute thread, `collect` by one other, both in order.

    A device that computes in the background returns from `launch` before the step ran; one that does not may do all
    the work there.
    """

    def use_masks(self, masks: "MaskSource") -> None:
        """Where the masks of slots with a grammar_id come from; called before the first step, or never: then rows of
        such slots fail. When to call what of it: `worker_svc.masks.source`."""
        ...

    def launch(self, work: StepWork) -> Any:  # Any: what `collect` needs, the executor's own affair
        """Start one step behind those launched before. An exception means that the step did not happen."""
        ...

    def collect(self, handle: Any) -> StepOutcome:
        """Wait for a launched step. An exception means that neither it nor any step launched behind it happened."""
        ...
