"""Before a worker says Hello: run real steps, so that the first request pays for nothing, and measure them.

The largest step a scheduler may send follows from that: on a CPU a chunk must not hold up decode rows for longer than
half a second. Runs on the pools while they are empty; what it writes is never published.
"""

import logging
import time
from dataclasses import dataclass
from typing import Final

from meshkit.types import PAGE_TOKENS, SamplingParams
from worker_svc.core.work import Executor, RowWork, SlotInit, StepWork

STEP_S: Final = 0.5
MARGIN: Final = 0.8  # decode rows share the step, and attention over a long context costs more than the sample did
FIRST: Final = 32
MOST: Final = 2048

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """`max_step_tokens` fits into STEP_S; `decode_s` is one step of one row, for the log."""

    max_step_tokens: int
    decode_s: float
    seconds: float


def warm_up(executor: Executor, *, pages: int, max_context: int, vocab_size: int, step_s: float = STEP_S) -> WarmUp:
    """Chunks of doubling size until one takes a third of the budget, then decode steps. Uses slot 0."""
    start = time.perf_counter()
    most = min(MOST, pages * PAGE_TOKENS, max_context) - 4
    _chunk(executor, min(FIRST, most), vocab_size)  # first touch of weights and memory
    tokens = min(FIRST, most)
    while True:
        seconds = _chunk(executor, tokens, vocab_size)
        if seconds > step_s / 3 or tokens * 2 > most:
            break
        tokens *= 2
    decode_s = min(_decode(executor, tokens + at) for at in range(3))
    budget = int(tokens * step_s * MARGIN / seconds)
    budget = max(FIRST, min(budget, MOST) // FIRST * FIRST)
    return WarmUp(budget, decode_s, time.perf_counter() - start)


def _chunk(executor: Executor, tokens: int, vocab_size: int) -> float:
    """Seconds of a prefill chunk of `tokens` ids at position 0 of slot 0."""
    init = SlotInit(slot=0, params=SamplingParams(temperature=0.0, max_tokens=8), seed=0, choice=0, n_emitted=0)
    ids = tuple(7 + (at * 31) % max(1, vocab_size - 7) for at in range(tokens))
    row = RowWork(slot=0, start=0, ids=ids, pages=range(-(-tokens // PAGE_TOKENS)))
    return _timed(executor, StepWork(inits=(init,), rows=(row,)))


def _decode(executor: Executor, start: int) -> float:
    row = RowWork(slot=0, start=start, ids=(11,), pages=range(-(-(start + 1) // PAGE_TOKENS)), out_pos=1)
    return _timed(executor, StepWork(rows=(row,)))


def _timed(executor: Executor, work: StepWork) -> float:
    start = time.perf_counter()
    executor.collect(executor.launch(work))
    return time.perf_counter() - start
