"""Logits against transformers in FP32: a random model with every layer type, and the default model on its own text.

Needs the test extra (transformers). Every way of computing the same logits is compared, over pools poisoned with NaN.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks._reference import Reference
from benchmarks._scenarios import SCENARIOS, Rig, exact_replay
from meshkit.types import SamplingParams
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.generate import generate_checkpoint
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.executor import CpuExecutor
from worker_svc.solo import generate

TITLE = "logits, cross-entropy and greedy text against transformers (FP32, exact maths)"
ROOT = Path(__file__).parent.parent
DEFAULT_MODEL = ROOT / "meshkit" / "models" / "v4-nano"
SAMPLE = ROOT / "tests" / "data" / "nano_sample.json"
TOKENS, REPLAY_TOKENS = 420, 1100
TIE_GAP = 1e-3


def run(args: list[str]) -> dict[str, float | int | str]:
    """Compare and print each scenario; see the keys of the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks parity", description=TITLE)
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than the free cores is slow")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    differences = random_model_differences()
    for name, value in differences.items():
        print(f"{name:24}{value:10.2e}")
    metrics: dict[str, float | int | str] = {"max_abs_logit_diff": max(differences.values())}
    metrics |= {f"{name}_diff": value for name, value in differences.items()}
    return metrics | trained_model()


def random_model_differences() -> dict[str, float]:
    """Largest absolute logit difference of each scenario, in both modes of the forward."""
    with tempfile.TemporaryDirectory() as folder:
        generate_checkpoint(preset("tiny"), folder, seed=3, content="lively")
        checkpoint = load_checkpoint(folder)
        reference = Reference(checkpoint)
        draw = torch.Generator().manual_seed(1)
        sizes = (TOKENS, 211, 333, REPLAY_TOKENS)
        sequences = [torch.randint(0, checkpoint.config.vocab_size, (size,), generator=draw) for size in sizes]
        wanted = [reference.logits(ids) for ids in sequences]
        print(f"random model: logit standard deviation {wanted[0].std():.2f}")
        found: dict[str, float] = {}
        for deterministic in (False, True):
            rig = Rig(checkpoint, deterministic=deterministic)
            suffix = "_deterministic" if deterministic else ""
            for name, scenario in SCENARIOS.items():
                rig.forget()
                found[name + suffix] = max(
                    _difference(piece.logits, wanted[piece.of], piece.first) for piece in scenario(rig, sequences)
                )
            rig.forget()
            pieces = exact_replay()(rig, sequences[3:])
            found["exact_replay" + suffix] = max(_difference(p.logits, wanted[3], p.first) for p in pieces)
    return found


def _difference(logits: Tensor, wanted: Tensor, first: int) -> float:
    """inf if a NaN came through: something unwritten was read."""
    difference = (logits - wanted[first : first + len(logits)]).abs().max()
    return float("inf") if bool(difference.isnan()) else float(difference)


def trained_model() -> dict[str, float | int | str]:
    """Cross-entropy on 1,024 tokens of its own kind of text, and greedy answers to three prompts."""
    sample = json.loads(SAMPLE.read_text())
    checkpoint = load_checkpoint(DEFAULT_MODEL)
    reference = Reference(checkpoint)
    executor = CpuExecutor.load(DEFAULT_MODEL, slots=1, pages=8, tails=0)
    # The greedy answer is compared before any rule about ids that must not be sampled.
    executor.rules = replace(executor.rules, masked_ids=())
    ids = torch.tensor(sample["text"][:1024])
    ours = torch.cat([part.logits for part in SCENARIOS["random_chunks_139"](Rig(checkpoint), [ids])])
    losses = [float(cross_entropy(logits[:-1].double(), ids[1:])) for logits in (ours, reference.logits(ids))]
    print(f"default model: cross-entropy {losses[0]:.6f}, transformers {losses[1]:.6f} nats")
    equal = 1
    for prompt in sample["prompts"]:
        wanted, gaps = reference.greedy(prompt, 64)
        drawn = generate(executor, prompt, SamplingParams(temperature=0.0, max_tokens=64), seed=0).drawn
        sure = next((place for place, gap in enumerate(gaps) if gap < TIE_GAP), len(gaps))
        same = drawn[:sure] == wanted[:sure]
        equal &= int(same)
        print(
            f"greedy, prompt of {len(prompt)} tokens: {sure} ids before a near tie, {'equal' if same else 'DIFFERENT'}"
        )
    return {"nano_ce_diff_nats": abs(losses[0] - losses[1]), "nano_ce_nats": losses[0], "nano_greedy_equal": equal}
