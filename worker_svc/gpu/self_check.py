"""Before a deterministic worker serves: each operation on this very GPU, then the whole forward, must repeat its bits.

`choose_backends` tries what `ops.invariant` lists, in its order, until one passes; `check_forward` runs a sequence
alone, cut differently among others, from a saved prefix, and again from its own tokens. What fails is named, and the
worker does not start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from meshkit.errors import GpuError
from meshkit.types import PAGE_TOKENS, SamplingParams, TokenLogprobs
from worker_svc.checkpoint.config import V4Config
from worker_svc.core.work import RowWork, SlotInit, StepWork, TailWork
from worker_svc.gpu.executor import GpuExecutor
from worker_svc.gpu.invariance import Case, examine
from worker_svc.gpu.invariance_cases import Cases
from worker_svc.gpu.weights import ModelWeights
from worker_svc.ops import invariant, registry

SIZES: Final = (1, 2, 8, 9, 32, 64, 128, 256)
"""Rows at which products, splits and tiles change when they follow the batch."""
CHECKED_ROWS: Final = 256
"""Rows among which an operation's are compared."""
NOT_RUN: Final = ("paged_attention", "skinny_gemm")
"""Operations that deterministic mode leaves out."""
ANSWER: Final = 24
"""Tokens decoded: a last bit that decode and chunks leave otherwise shows in few of them."""
COMPANIONS: Final = ((0, 1, 7, 8, 16, 40, 63) * 4)[:ANSWER]
"""Others in each decode step of the sequence that is watched."""
SHORT: Final = 20
"""Tokens of a companion's prompt."""
Answer = list[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]

log = logging.getLogger(__name__)


def check_kernels(weights: ModelWeights, config: V4Config, device: torch.device) -> None:
    """`choose_backends` over a model's own weights and shapes."""
    choose_backends(Cases(weights, config, device, rows=CHECKED_ROWS), device)


def choose_backends(cases: Iterable[Case], device: torch.device, sizes: Sequence[int] = SIZES) -> dict[str, str]:
    """Turn deterministic mode on with backends whose every case passes; by operation. GpuError names one without."""
    started, by_op = time.perf_counter(), dict[str, list[Case]]()
    for case in cases:
        if case.op not in NOT_RUN:
            by_op.setdefault(case.op, []).append(case)
    chosen: dict[str, str] = {}
    for op, theirs in by_op.items():
        faults: dict[str, str] = {}
        for backend in invariant.candidates(op) if device.type == "cuda" else ["torch"]:
            invariant.switch(True, chosen | {op: backend})
            faults[backend] = _fault(theirs, device, sizes)
            if not faults[backend]:
                chosen[op] = backend
                break
            log.warning("deterministic: %s=%s: %s", op, backend, faults[backend])
        if op not in chosen:
            invariant.switch(False)
            raise _refused(op, "; ".join(f"{backend}: {fault}" for backend, fault in faults.items()), device)
    many = {op: backend for op, backend in chosen.items() if len(registry.OPS.get(op, ())) > 1}
    shown = ", ".join(f"{op}={backend}" for op, backend in many.items())
    log.info("deterministic: %d operations pass in %.1f s: %s", len(chosen), time.perf_counter() - started, shown)
    return chosen


@torch.inference_mode()
def _fault(cases: Sequence[Case], device: torch.device, sizes: Sequence[int]) -> str:
    """What the first case that fails came to; empty if none does."""
    for case in cases:
        try:
            found = examine(case, device, sizes)
        except (ImportError, RuntimeError, AssertionError, ValueError, TypeError, AttributeError) as error:
            return f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not found.same:
            return f"{case.name}: other bits {found.wrong} (by {found.difference:.2g} of the largest value)"
    return ""


def _refused(what: str, why: str, device: torch.device) -> GpuError:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
    return GpuError(
        f"--deterministic: {what} does not repeat its bits on {where}: {why}; "
        "see `python -m benchmarks gpu_ops --parts invariance`, or use --no-deterministic or --device cpu"
    )


# The whole forward


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to come to the same answer. emitted: tokens of it that are part of the prompt; cuts: where the prompt is
    cut; companies: others in each decode step; resumed: begin behind the first page, from its saved tail."""

    emitted: Sequence[int] = ()
    cuts: Sequence[int] = ()
    companies: Sequence[int] = (0,) * ANSWER
    resumed: bool = False


def check_forward(executor: GpuExecutor, step_tokens: int) -> None:
    """GpuError if a sequence's ids or log-probabilities depend on its company, its cuts, or where it was resumed."""
    started = time.perf_counter()
    prompt = _ids(executor, _prompt_tokens(executor, step_tokens), 1)
    wanted = _answer(executor, prompt, _Way(), step_tokens)
    told = [ids[0] for ids, _ in wanted if ids]
    if len(told) < ANSWER:
        raise GpuError("--deterministic: the sequence to check with drew no token: are the model's logits NaN?")
    cuts = (len(prompt) // 9, len(prompt) // 2 + 1, len(prompt) - 1)
    ways = {
        "run again": _Way(),
        "among others, its prompt in pieces": _Way(cuts=cuts, companies=COMPANIONS),
        "resumed from its tokens": _Way(emitted=told[: ANSWER * 3 // 4], companies=(3,) * ANSWER),
        "resumed from a saved prefix": _Way(resumed=True, companies=(1,) * ANSWER),
    }
    for name, way in ways.items():
        if way.resumed and not _saves(executor, prompt):
            continue
        found, rest = _answer(executor, prompt, way, step_tokens), wanted[len(way.emitted) :]
        if found != rest:
            first = next((n for n, (a, b) in enumerate(zip(found, rest)) if a != b), 0) + len(way.emitted)
            why = f"{name}, token {first} has another log-probability, though each operation alone passes"
            raise _refused("the whole forward", why, executor.device)
    seconds = time.perf_counter() - started
    log.info("deterministic: the whole forward passes in %.1f s, prompt of %d tokens", seconds, len(prompt))


def _saves(executor: GpuExecutor, prompt: Sequence[int]) -> bool:
    """Whether there is a whole page to save, and somewhere to keep its tail."""
    return len(prompt) > PAGE_TOKENS and executor.pools.tails > 0


def _prompt_tokens(executor: GpuExecutor, step_tokens: int) -> int:
    """Enough for the indexer to choose, if there is room for it; never a multiple of anything."""
    choosing = 4 * executor.model.config.index_topk + 77
    room = min(executor.info.max_context, (executor.pools.pages - 1) * PAGE_TOKENS) - ANSWER - 1
    return max(2, min(choosing, room, step_tokens))


def _ids(executor: GpuExecutor, count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, executor.info.vocab_size, (count,), generator=draw).tolist()


def _answer(executor: GpuExecutor, prompt: Sequence[int], way: _Way, step_tokens: int) -> Answer:
    """Ids and log-probabilities drawn after the prompt, in the last slot.

    Others join with the first decode step that wants them and stay as long as enough are wanted.
    """
    slot, ids = executor.pools.slots - 1, [*prompt, *way.emitted]
    pages = range(-(-(len(prompt) + ANSWER) // PAGE_TOKENS))
    others = min(slot, executor.pools.pages - len(pages), step_tokens // SHORT)
    found, begin = Answer(), PAGE_TOKENS if way.resumed else 0
    inits: tuple[SlotInit, ...] = (_init(slot, len(way.emitted), start=begin),)
    tail = (TailWork(slot, PAGE_TOKENS, 0),) if _saves(executor, prompt) else ()
    for start, end in _pieces(begin, len(ids), way.cuts):
        last = int(end == len(ids))
        row = RowWork(slot=slot, start=start, ids=tuple(ids[start:end]), pages=pages, sample_last=last)
        work = StepWork(
            inits=inits,
            rows=(row,),
            tail_loads=tail if way.resumed and start == begin else (),
            saves=tail if not way.resumed and start < PAGE_TOKENS <= end else (),
        )
        outcome, inits = executor.run(work).rows[0], ()
        if last:
            found.append((outcome.tokens, outcome.logprobs))
    joined = 0
    for wanted in way.companies[len(way.emitted) + 1 : ANSWER]:
        company = min(wanted, others)
        if company > joined:
            executor.run(_joining(executor, range(joined, company), len(pages)))
            joined = company
        rows = [
            RowWork(slot=other, pages=range(len(pages) + other, len(pages) + other + 1)) for other in range(company)
        ]
        rows.insert(company // 2, RowWork(slot=slot, pages=pages))
        outcome = executor.run(StepWork(rows=tuple(rows))).rows[company // 2]
        found.append((outcome.tokens, outcome.logprobs))
    return found


def _pieces(begin: int, count: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = sorted({begin, count, *(cut for cut in cuts if begin < cut < count)})
    return iter(pairwise(ends))


def _joining(executor: GpuExecutor, slots: range, first_page: int) -> StepWork:
    """Short prompts of strangers."""
    rows = tuple(
        RowWork(
            slot=slot,
            ids=tuple(_ids(executor, SHORT, 100 + slot)),
            pages=range(first_page + slot, first_page + slot + 1),
            sample_last=1,
        )
        for slot in slots
    )
    return StepWork(inits=tuple(_init(slot, 0) for slot in slots), rows=rows)


def _init(slot: int, n_emitted: int, start: int = 0) -> SlotInit:
    params = SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True, top_logprobs=4)
    return SlotInit(slot=slot, params=params, seed=slot, choice=0, n_emitted=n_emitted, start=start)
