"""Greedy answers of v4-nano on a GPU three ways: alone, eight at once, and resumed half way from the tokens so far.

Tiles and splits follow the batch, so the last bits of a result differ, and near-ties fall either way: there is no
deterministic mode on a GPU, and these are the figures of that.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks._gpu_checks import unseen
from benchmarks._gpu_model import Bench, assemble
from meshkit.types import SamplingParams
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.gpu.weights import WeightLoader

ROWS, ROUNDS, PROMPT, ANSWER = 8, 4, 90, 64


def measure(device: torch.device, report: Any, *, rounds: int = ROUNDS, answer: int = ANSWER) -> None:
    """Shares of answers that stay equal, and of tokens up to the first that differs."""
    from gateway.text.tokenizer import Tokenizer
    from meshkit.models import DEFAULT_MODEL
    from worker_svc.checkpoint.loader import load_checkpoint

    checkpoint = load_checkpoint(DEFAULT_MODEL)
    weights = WeightLoader(checkpoint, device).model()
    bench = assemble(checkpoint.config, weights, device, slots=ROWS, context=512, max_tokens=ROWS * (PROMPT + answer))
    ids = unseen(Tokenizer.load(DEFAULT_MODEL), rounds * ROWS * PROMPT)
    prompts = [ids[first : first + PROMPT] for first in range(0, len(ids), PROMPT)]
    alone = [_answers(bench, [prompt], answer)[0] for prompt in prompts]
    again = [_answers(bench, [prompt], answer)[0] for prompt in prompts]
    together = [
        found
        for first in range(0, len(prompts), ROWS)
        for found in _answers(bench, prompts[first : first + ROWS], answer)
    ]
    half = answer // 2
    resumed = [
        told[:half] + _answers(bench, [prompt + told[:half]], answer - half)[0] for prompt, told in zip(prompts, alone)
    ]
    for name, others in (("repeated", again), ("batched", together), ("resumed", resumed)):
        same = [_common(a, b) for a, b in zip(alone, others)]
        equal, share = sum(n == answer for n in same) / len(same), sum(same) / (answer * len(same))
        report.row("diverge", what=name, answers=len(same), tokens=answer, equal=equal, tokens_before_first=share)
        report.metrics[f"answers_equal_{name}"] = round(equal, 4)


def _answers(bench: Bench, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Greedy, all prompts in one first step, then decode steps."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    inits = tuple(SlotInit(slot=slot, params=params, seed=slot, choice=0, n_emitted=0) for slot in range(len(prompts)))
    rows = tuple(
        RowWork(slot=slot, ids=tuple(prompt), pages=bench.pages_of(slot)) for slot, prompt in enumerate(prompts)
    )
    outcome = bench.executor.run(StepWork(inits=inits, rows=rows))
    found = [list(row.tokens) for row in outcome.rows]
    decode = StepWork(rows=tuple(RowWork(slot=slot, pages=bench.pages_of(slot)) for slot in range(len(prompts))))
    for _ in range(tokens - 1):
        for told, row in zip(found, bench.executor.run(decode).rows):
            told += row.tokens
    return found


def _common(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
