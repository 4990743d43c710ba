"""Decode speed on the CPU, batch 1, FP32, end to end over REST, against transformers with the same weights, same run.

Both sides decode the same number of tokens greedily after the same prompt. Rounds alternate between the mesh,
transformers with all cores and transformers with one thread, so that a noisy machine hits all three; the mesh is
compared with the faster of the two. Rates are over the tokens after the first, so prompt work is left out everywhere.
A busy machine ends a run or a part early: fewer tokens or rounds are measured, never guessed.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch  # before any module of ours: they set OpenMP to passive waiting, which would slow transformers down

from benchmarks._mesh import decode_rate, running_mesh, stream_arrivals

TITLE = "CPU decode over REST, batch 1, against transformers in-process (same weights, same run)"
PROMPT = "Once upon a time there was a kind child called Mia who lived near the hill."
TOKENS = 192
ROUNDS = 5
RUN_S = 8.0  # the longest a single run may take
PART_S = 42.0  # no new round of a part starts after that
ALL_CORES = torch.get_num_threads()


@dataclass(slots=True)
class Rates:
    """Tokens per second of each round of one part."""

    mesh: list[float] = field(default_factory=list)
    all_cores: list[float] = field(default_factory=list)
    one_thread: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float, float]:
        """Of the mesh, of transformers with all cores, and with one thread."""
        return statistics.median(self.mesh), statistics.median(self.all_cores), statistics.median(self.one_thread)


def transformers_rate(model: Any, ids: list[int], threads: int) -> float:
    """Tokens per second of greedy cached decode with that many threads; ends at TOKENS or after RUN_S."""
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            output = model(torch.tensor([ids]), use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            begin, count = time.perf_counter(), 0
            while count < TOKENS - 1 and (count == 0 or time.perf_counter() < begin + RUN_S):
                output = model(token, cache=output.cache, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
                count += 1
            return count / (time.perf_counter() - begin)
    finally:
        torch.set_num_threads(ALL_CORES)


def mesh_rate(url: str) -> float:
    """Tokens per second as a client sees them, from the first token to the last."""
    body = {"model": "v4-nano", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return decode_rate(stream_arrivals(url, body, RUN_S))


def measure(model: Any, ids: list[int], *flags: str) -> Rates:
    """Alternating rounds against a mesh started with these flags, after one round that warms up."""
    rates, end = Rates(), time.monotonic() + PART_S
    with running_mesh(*flags) as url:
        mesh_rate(url)
        transformers_rate(model, ids, ALL_CORES)
        while len(rates.mesh) < ROUNDS and (not rates.mesh or time.monotonic() < end):
            rates.mesh.append(mesh_rate(url))
            rates.all_cores.append(transformers_rate(model, ids, ALL_CORES))
            rates.one_thread.append(transformers_rate(model, ids, 1))
    return rates


def run(args: list[str]) -> dict[str, float | int | str]:
    """Print a table of medians and return the ratios to the faster of the two ways to run transformers."""
    del args
    from benchmarks._reference import Reference
    from gateway.text.tokenizer import Tokenizer
    from meshkit.models import DEFAULT_MODEL
    from worker_svc.checkpoint.loader import load_checkpoint

    model = Reference(load_checkpoint(DEFAULT_MODEL)).model
    ids = Tokenizer.load(DEFAULT_MODEL).encode(PROMPT)
    fast, exact = measure(model, ids), measure(model, ids, "--deterministic")
    heads = ("tokens/s, medians", "mesh over REST", f"{ALL_CORES} threads", "1 thread", "ratio", "rounds")
    print("{:20}{:>16}{:>14}{:>14}{:>8}{:>8}".format(*heads))
    for name, rates in (("fast mode", fast), ("deterministic mode", exact)):
        mesh, many, one = rates.medians()
        print(f"{name:20}{mesh:16.1f}{many:14.1f}{one:14.1f}{mesh / max(many, one):8.2f}{len(rates.mesh):8}")
    print("threads: those of transformers; the ratio is to the faster column")
    mesh, many, one = fast.medians()
    exact_mesh, exact_many, exact_one = exact.medians()
    return {
        "tokens_per_s": round(mesh, 1),
        "transformers_tokens_per_s": round(max(many, one), 1),
        "transformers_threads": ALL_CORES if many >= one else 1,
        "ratio_to_transformers": round(mesh / max(many, one), 3),
        "deterministic_tokens_per_s": round(exact_mesh, 1),
        "deterministic_ratio_to_transformers": round(exact_mesh / max(exact_many, exact_one), 3),
    }
