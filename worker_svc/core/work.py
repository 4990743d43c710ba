"""What the slot machine asks of the model executor, as torch-free frozen values.

One `StepWork` per frame. The slot machine (`worker_svc.core.slots`) resolves names, generations and lengths; the
executor (`worker_svc.executor`) only moves tensors: it knows slot, page and tail numbers, never requests.

Order inside a step: inits, copies, tail_loads, forward (saves gather layer by layer inside it), sample, refreshes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshkit.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInit:
    """A slot starts serving a choice: reset ring, compressor state and sampler state."""

    slot: int
    params: SamplingParams
    seed: int  # 64 bit
    choice: int
    n_emitted: int  # output position of the next sampled token
    emitted: tuple[int, ...] = ()  # only if a penalty reads output
    prompt: tuple[int, ...] = ()  # only if a penalty reads the prompt


@dataclass(frozen=True, slots=True)
class CopyWork:
    """dst takes src's ring, compressor states and, if src_page >= 0, the contents of its partial page."""

    src: int
    dst: int
    src_page: int
    dst_page: int


@dataclass(frozen=True, slots=True)
class TailWork:
    """Load slot's ring and states from `tail` at position pos, or save/refresh them into it."""

    slot: int
    pos: int  # multiple of PAGE_TOKENS
    tail: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """One row of the batch: feed `ids` at positions start.. of `slot`, whose KV pages are `pages` in table order.

    A decode row has one id, a verify row 1 + drafts, a prefill chunk any number: the forward treats them alike.
    Positions below `write_from` are replayed: nothing is written to pages for them, entries are read from the
    retained pages, and window keys before `start` are masked (the ring holds nothing valid below `start`).
    """

    slot: int
    start: int
    ids: tuple[int, ...]
    pages: Sequence[int]  # enough for start + len(ids) tokens
    write_from: int = 0
    fresh_from: int = 0  # window keys and states below this position do not exist (0, or start of an exact replay)
    sample_last: int = 1  # sample at the last `sample_last` positions: 0 none, 1 usual, k for verify rows
    out_pos: int = 0  # output position of the first sampled token (random counter, min_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Everything one frame does on the device."""

    inits: tuple[SlotInit, ...] = ()
    copies: tuple[CopyWork, ...] = ()
    tail_loads: tuple[TailWork, ...] = ()
    rows: tuple[RowWork, ...] = ()
    saves: tuple[TailWork, ...] = ()  # start < pos <= start + len of that slot's row: gathered inside the forward


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Sampled tokens of one row, in position order; logprobs one per token, or empty if the row did not ask."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What came out, rows in the order of StepWork.rows."""

    rows: tuple[RowOutcome, ...] = field(default=())
    t_start_ns: int = 0
    t_end_ns: int = 0


class Executor(Protocol):
    """The device side of a worker. Calls come one at a time, from the compute thread."""

    def run(self, work: StepWork) -> StepOutcome:
        """Run one step. An exception means that the step did not happen and the attachment must end."""
        ...

    def refresh(self, saves: Sequence[TailWork]) -> None:
        """Save tails from the rings after sampling: pos is at most 64 below the slot's committed length."""
        ...
