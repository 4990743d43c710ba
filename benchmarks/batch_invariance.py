"""Same seed, same prompt, everything else different: ids and log-probability bits must not change.

Each prompt runs alone first. Then again: in batches with two strangers and random chunk sizes, in another slot and on
other pages; resumed from a tail (prompts past 256 tokens); after an exact replay (past 768); with verify rows whose
drafts are partly wrong. Deterministic mode, temperature 1, so that any changed bit has a chance to change a token.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from meshkit.types import PAGE_TOKENS, SamplingParams
from worker_svc.core.work import StepWork, TailWork
from worker_svc.executor import CpuExecutor
from worker_svc.solo import Sequence, pages_for

TITLE = "ids and logprob bits of a request against its batch, chunks and resumes (deterministic mode)"
DEFAULT_MODEL = Path(__file__).parent.parent / "meshkit" / "models" / "v4-nano"
PARAMS = SamplingParams(temperature=1.0, max_tokens=4, top_logprobs=1)
SLOTS, PAGES, TAILS = 4, 24, 2
HOME, AWAY = 0, 8  # first pages of the first run and of the others
TAIL = 1
Answer = tuple[list[int], list[tuple[float, ...]]]


def run(args: list[str]) -> dict[str, float | int | str]:
    """`batch_invariance_mismatches` counts (prompt, variant) pairs whose answer differs from the first run's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batch_invariance", description=TITLE)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--model", default=str(DEFAULT_MODEL))
    parser.add_argument("--fast", action="store_true", help="without deterministic mode: shows what it is for")
    options = parser.parse_args(args)
    executor = CpuExecutor.load(options.model, deterministic=not options.fast, slots=SLOTS, pages=PAGES, tails=TAILS)
    started = time.perf_counter()
    checks: dict[str, int] = {}
    wrong: dict[str, int] = {}
    for number in range(options.prompts):
        prompt = random_prompt(executor, number)
        for variant, same in compare(executor, prompt, number):
            checks[variant] = checks.get(variant, 0) + 1
            wrong[variant] = wrong.get(variant, 0) + int(not same)
    for variant, count in checks.items():
        print(f"{variant:12}{count:5} answers{wrong[variant]:5} differ")
    return {
        "batch_invariance_mismatches": sum(wrong.values()),
        "prompts": options.prompts,
        "comparisons": sum(checks.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def random_prompt(executor: CpuExecutor, number: int) -> list[int]:
    """Most prompts are short; one in five passes a page, one in ten is long enough for a replay."""
    rng = Random(number)
    if number % 10 == 9:
        length = rng.randint(770, 800)
    elif number % 5 == 3:
        length = rng.randint(258, 300)
    else:
        length = rng.randint(5, 70)
    return [rng.randrange(5, executor.info.vocab_size) for _ in range(length)]


def compare(executor: CpuExecutor, prompt: list[int], number: int) -> Iterator[tuple[str, bool]]:
    """(variant, same answer) for every variant that the prompt is long enough for."""
    wanted = alone(executor, prompt, number)
    yield "companions", in_company(executor, prompt, number) == wanted
    if len(prompt) <= replay_length(executor):
        yield "drafts", with_drafts(executor, prompt, number, wanted[0]) == wanted
    if len(prompt) > PAGE_TOKENS:
        yield "tail", from_tail(executor, prompt, number) == wanted
    if len(prompt) > replay_length(executor):
        yield "replay", after_replay(executor, prompt, number) == wanted


def alone(executor: CpuExecutor, prompt: list[int], seed: int) -> Answer:
    """One chunk, then one token at a time; saves a tail where the prompt crosses the first page boundary."""
    sequence = _sequence(prompt, seed, slot=0, first_page=HOME)
    saves = (TailWork(0, PAGE_TOKENS, TAIL),) if len(prompt) > PAGE_TOKENS else ()
    _step(executor, sequence, most=len(prompt), saves=saves, start=True)
    return _finish(executor, sequence)


def in_company(executor: CpuExecutor, prompt: list[int], seed: int) -> Answer:
    """Random chunks, beside two strangers that prefill and decode as they like."""
    rng = Random(seed + 1000)
    sequence = _sequence(prompt, seed, slot=2, first_page=AWAY)
    strangers = [
        _sequence(_random_ids(executor, rng, rng.randint(3, 60)), seed + 7, slot=slot, first_page=AWAY + 8 + slot)
        for slot in (1, 3)
    ]
    group = [sequence, *strangers]
    inits = tuple(member.init() for member in group)
    while not sequence.finished:
        running = [member for member in rng.sample(group, len(group)) if not member.finished]
        rows = [(member, member.row(rng.choice((1, 2, 7, 30, 200)))) for member in running]
        outcome = executor.run(StepWork(inits=inits, rows=tuple(row for _, row in rows)))
        inits = ()
        for (member, row), result in zip(rows, outcome.rows):
            member.book(row, result)
    return _answer(sequence)


def with_drafts(executor: CpuExecutor, prompt: list[int], seed: int, right: list[int]) -> Answer:
    """Verify rows: the drafts are the true answer, wrong from a random place on."""
    rng = Random(seed + 2000)
    sequence = _sequence(prompt, seed, slot=1, first_page=AWAY)
    _step(executor, sequence, most=len(prompt), start=True)
    while not sequence.finished:
        drafts = right[len(sequence.drawn) :][:3]
        cut = rng.randint(0, len(drafts))
        drafts = drafts[:cut] + [(token + 1) % executor.info.vocab_size for token in drafts[cut:]]
        drafts = drafts[: PARAMS.max_tokens - len(sequence.drawn) - 1]
        row = sequence.verify_row(tuple(drafts))
        sequence.book(row, executor.run(StepWork(rows=(row,))).rows[0])
    return _answer(sequence)


def from_tail(executor: CpuExecutor, prompt: list[int], seed: int) -> Answer:
    """Another slot resumes at the first page boundary from the tail that the first run saved."""
    sequence = _sequence(prompt, seed, slot=3, first_page=AWAY)
    sequence.pages[0] = HOME
    sequence.computed = PAGE_TOKENS
    work = StepWork(inits=(sequence.init(),), tail_loads=(TailWork(3, PAGE_TOKENS, TAIL),))
    executor.run(work)
    return _finish(executor, sequence, most=97)


def after_replay(executor: CpuExecutor, prompt: list[int], seed: int) -> Answer:
    """Keep the first run's full pages, compute the window again from far enough before their end."""
    sequence = _sequence(prompt, seed, slot=2, first_page=AWAY)
    kept = len(prompt) // PAGE_TOKENS
    sequence.pages[:kept] = pages_for(kept * PAGE_TOKENS, HOME)
    sequence.write_from = kept * PAGE_TOKENS
    sequence.fresh_from = sequence.computed = sequence.write_from - replay_length(executor)
    _step(executor, sequence, most=211, start=True)
    return _finish(executor, sequence, most=211)


def replay_length(executor: CpuExecutor) -> int:
    """Tokens before a boundary that make every layer's window exact again: W + (W - 1) (L - 1)."""
    layout = executor.pools.layout
    return layout.window + (layout.window - 1) * (len(layout.ratios) - 1)


def _sequence(prompt: list[int], seed: int, *, slot: int, first_page: int) -> Sequence:
    pages = pages_for(len(prompt) + PARAMS.max_tokens + 4, first_page)
    return Sequence(slot=slot, pages=pages, ids=list(prompt), params=PARAMS, seed=seed)


def _random_ids(executor: CpuExecutor, rng: Random, count: int) -> list[int]:
    return [rng.randrange(5, executor.info.vocab_size) for _ in range(count)]


def _step(
    executor: CpuExecutor,
    sequence: Sequence,
    *,
    most: int,
    saves: tuple[TailWork, ...] = (),
    start: bool = False,
) -> None:
    row = sequence.row(most)
    inits = (sequence.init(),) if start else ()
    sequence.book(row, executor.run(StepWork(inits=inits, rows=(row,), saves=saves)).rows[0])


def _finish(executor: CpuExecutor, sequence: Sequence, most: int = 512) -> Answer:
    while not sequence.finished:
        _step(executor, sequence, most=most)
    return _answer(sequence)


def _answer(sequence: Sequence) -> Answer:
    """Ids and, bit for bit (they are FP32), log-probabilities; nothing beyond max_tokens."""
    count = PARAMS.max_tokens
    return sequence.drawn[:count], [entry.values for entry in sequence.logprobs[:count]]
