"""Greedy answers of v4-nano in both modes: alone, once more, after a restart, in batches, and resumed half way.

By default tiles and splits follow the batch, so the last bits of a result differ, and near-ties fall either way. In
deterministic mode nothing may differ, not even a log-probability's last bit. Every variant is held against the answer
alone in the same mode. `requests` does the same with the sampled requests of `batch_invariance` (strangers and random
chunks, a saved tail, an exact replay); `cost` says what a step of Flash pays for it.
"""
# mypy: disallow-untyped-calls=False

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import batch_invariance
from benchmarks._gpu_checks import unseen
from benchmarks._gpu_model import Bench, assemble
from meshkit.types import PAGE_TOKENS, SamplingParams
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.gpu.invariance_cases import Cases
from worker_svc.gpu.self_check import choose_backends
from worker_svc.gpu.weights import WeightLoader
from worker_svc.ops import invariant

MODES = ("default", "deterministic")
PROMPTS, PROMPT, ANSWER = 32, 90, 64
BATCHES = (2, 8, 32)
REQUESTS = 40
COST_BATCHES = (1, 8, 64, 256)
COST_PROMPT = 4096
Answer = tuple[list[int], list[float]]
"""Ids and the log-probability of each."""


@contextmanager
def mode(name: str, weights: Any, config: Any, device: torch.device, rows: int = 256) -> Iterator[None]:
    """One of MODES inside the block; deterministic with backends that pass here, as a worker chooses them."""
    with invariant.switched(False):
        if name == "deterministic":
            choose_backends(Cases(weights, config, device, rows=rows), device)
        yield


def measure(
    device: torch.device,
    report: Any,
    *,
    prompts: int = PROMPTS,
    answer: int = ANSWER,
    batches: Sequence[int] = BATCHES,
    sampled: int = REQUESTS,
    checked: int = 256,
) -> None:
    """Shares of answers (and of their bits) that stay equal, the first token that differs, and what a step takes."""
    from gateway.text.tokenizer import Tokenizer
    from meshkit.models import DEFAULT_MODEL
    from worker_svc.checkpoint.loader import load_checkpoint

    checkpoint = load_checkpoint(DEFAULT_MODEL)
    weights = WeightLoader(checkpoint, device).model()
    ids = unseen(Tokenizer.load(DEFAULT_MODEL), prompts * PROMPT)
    texts = [ids[first : first + PROMPT] for first in range(0, len(ids), PROMPT)]
    alone: dict[str, list[Answer]] = {}
    for name in MODES:
        with mode(name, weights, checkpoint.config, device, checked):
            sizes = {"slots": max(batches), "context": 512, "max_tokens": max(batches) * (PROMPT + answer)}
            made = [assemble(checkpoint.config, weights, device, **sizes) for _ in range(2)]  # type: ignore[arg-type]
            alone[name] = _variants(name, made, texts, answer, batches, report)
            if sampled:
                # As many pages as the requests name.
                room = assemble(checkpoint.config, weights, device, slots=4, context=1536, max_tokens=1200)
                requests(name, room, sampled, report)
    _compare("deterministic", "default mode", alone["default"], alone["deterministic"], report)
    for size in (1, max(batches)):
        default, ours = (report.metrics[f"{name}_nano_step_b{size}_ms"] for name in MODES)
        report.metrics[f"deterministic_nano_cost_b{size}"] = round(ours / default, 3)


def requests(name: str, bench: Bench, count: int, report: Any) -> None:
    """Prompts of 5 to 800 tokens at temperature 1: how many answers differ, in ids or a log-probability's bits."""
    executor: Any = bench.executor
    checks: dict[str, list[bool]] = {}
    for number in range(count):
        prompt = batch_invariance.random_prompt(executor, number)
        wanted = batch_invariance.alone(executor, prompt, number)
        ways = {"companions": batch_invariance.in_company}
        if len(prompt) > PAGE_TOKENS:
            ways["tail"] = batch_invariance.from_tail
        if len(prompt) > batch_invariance.replay_length(executor):
            ways["replay"] = batch_invariance.after_replay
        for what, way in ways.items():
            checks.setdefault(what, []).append(way(executor, prompt, number) == wanted)
    for what, same in checks.items():
        report.row("requests", mode=name, what=what, answers=len(same), differ=same.count(False))
    every = [equal for same in checks.values() for equal in same]
    report.metrics[f"{name}_requests_compared"] = len(every)
    report.metrics[f"{name}_requests_differ"] = every.count(False)


def _variants(
    name: str, made: Sequence[Bench], texts: Sequence[list[int]], answer: int, batches: Sequence[int], report: Any
) -> list[Answer]:
    """Compare all of them with the answers alone, which are returned."""
    first, restarted = made
    alone, took = _in_batches(first, texts, answer, 1)
    report.metrics[f"{name}_nano_step_b1_ms"] = round(took, 4)
    _compare(name, "repeated", alone, _in_batches(first, texts, answer, 1)[0], report)
    _compare(name, "restarted", alone, _in_batches(restarted, texts, answer, 1)[0], report)
    for batch in batches:
        together, took = _in_batches(first, texts, answer, batch)
        report.metrics[f"{name}_nano_step_b{batch}_ms"] = round(took, 4)
        _compare(name, f"batch_{batch}", alone, together, report)
    half = answer // 2
    resumed = []
    for text, (told, bits) in zip(texts, alone):
        ((ids, more),) = _in_batches(restarted, [text + told[:half]], answer - half, 1)[0]
        resumed.append((told[:half] + ids, bits[:half] + more))
    _compare(name, "resumed", alone, resumed, report)
    return alone


def _in_batches(bench: Bench, texts: Sequence[list[int]], tokens: int, batch: int) -> tuple[list[Answer], float]:
    """Answers to all, so many at once, and the median milliseconds of a decode step."""
    found, times = list[Answer](), list[float]()
    for first in range(0, len(texts), batch):
        found += _answers(bench, texts[first : first + batch], tokens, times)
    return found, statistics.median(times) if times else 0.0


def _answers(bench: Bench, prompts: Sequence[list[int]], tokens: int, times: list[float]) -> list[Answer]:
    """Greedy, all prompts in one first step, then decode steps."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, top_logprobs=0)
    inits = tuple(SlotInit(slot=slot, params=params, seed=slot, choice=0, n_emitted=0) for slot in range(len(prompts)))
    rows = tuple(
        RowWork(slot=slot, ids=tuple(prompt), pages=bench.pages_of(slot)) for slot, prompt in enumerate(prompts)
    )
    decode = StepWork(rows=tuple(RowWork(slot=slot, pages=bench.pages_of(slot)) for slot in range(len(prompts))))
    found: list[Answer] = [([], []) for _ in prompts]
    for work in (StepWork(inits=inits, rows=rows), *[decode] * (tokens - 1)):
        begin = time.perf_counter()
        outcome = bench.executor.run(work)
        if work is decode:
            times.append((time.perf_counter() - begin) * 1e3)
        for (ids, bits), row in zip(found, outcome.rows):
            ids += row.tokens
            bits += [entry.values[0] for entry in row.logprobs]
    return found


def _compare(name: str, what: str, alone: Sequence[Answer], others: Sequence[Answer], report: Any) -> None:
    """One line: answers that are equal, in ids and in bits, and where the others part."""
    tokens = len(alone[0][0])
    same = [_common(a[0], b[0]) for a, b in zip(alone, others)]
    bits = [_common(a[1], b[1]) for a, b in zip(alone, others)]
    parted = sorted(n for n in same if n < tokens)
    values = {
        "equal": sum(n == tokens for n in same) / len(same),
        "bits_equal": sum(n == tokens for n in bits) / len(bits),
        "first_token": parted[0] if parted else -1,
        "median_token": statistics.median(parted) if parted else -1,
        "first_bit": min(bits) if min(bits) < tokens else -1,
    }
    report.row("diverge", mode=name, what=what, answers=len(same), tokens=tokens, **values)
    key = f"{name}_{what.replace(' ', '_')}"
    report.metrics |= {f"{key}_{part}": round(float(value), 4) for part, value in values.items()}


def _common(a: Sequence[float], b: Sequence[float]) -> int:
    """Places before the first that differs."""
    return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def cost(lab: Any, report: Any, context: int) -> None:
    """A decode step and a prompt of Flash in both modes, and their ratios."""
    from benchmarks._gpu_times import decode_loop_ms, prefill_ms

    taken: dict[str, dict[str, float]] = {}
    for name in MODES:
        with mode(name, lab.weights, lab.config, lab.device):
            times = taken.setdefault(name, {})
            bench = lab.bench(slots=max(COST_BATCHES), context=context + 512, max_tokens=max(COST_BATCHES))
            for batch in COST_BATCHES:
                times[f"decode_b{batch}"] = decode_loop_ms(bench, batch, context, 30)
            del bench
            bench = lab.bench(slots=1, context=COST_PROMPT + 256, max_tokens=COST_PROMPT)
            times[f"prefill_{COST_PROMPT // 1024}k"] = prefill_ms(bench, COST_PROMPT)[0]
            del bench
    for what, default in taken["default"].items():
        ours = taken["deterministic"][what]
        report.row("deterministic_cost", what=what, default_ms=default, deterministic_ms=ours, ratio=ours / default)
        report.metrics[f"deterministic_{what}_ms"] = round(ours, 4)
        report.metrics[f"deterministic_{what}_cost"] = round(ours / default, 3)
