"""What rounding costs: the twin trained without it, the twin rounded afterwards, and the model trained with it.

    python -m tools.nano.quantisation --twin TWIN --weights WEIGHTS --tokenizer TOK [--each N]

Reads the BF16 weights that `train` left. Cross-entropy and divergence are over generated documents of a seed that
training did not use, answers are exams; all in FP32, so that only the rounding differs. Not part of serving.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import tools.nano.model as nano
from gateway.text.tokenizer import Tokenizer
from tools.nano.batch import Batch, Packer
from tools.nano.corpus import Corpus, Sources
from tools.nano.document import tokenize
from tools.nano.exam import Marks, Sitting, papers, sit
from tools.nano.model import NanoModel, Switches
from tools.nano.weights_io import load_shards, model_of
from worker_svc.checkpoint.census import preset

HELD_SEED, LENGTH, ROWS = 9999, 1024, 2


def switches(rounding: bool) -> Switches:
    """Sparse attention, with or without rounding."""
    return Switches(torch.tensor(rounding), torch.tensor(False))


@torch.no_grad()
def log_probs(model: NanoModel, batch: Batch, rounding: bool) -> Tensor:
    """[n, V] at every place whose next token counts."""
    logits, _ = model.logits(batch, switches(rounding))
    counted = torch.roll(batch.weights, -1, 1) > 0
    counted[:, -1] = False
    return logits.float()[counted].log_softmax(-1)


def row(name: str, found: Tensor, against: Tensor, targets: Tensor, marks: Marks | None) -> str:
    """One line of the table; sure places are those where the first choice has nine tenths."""
    loss = -float(found.gather(1, targets.unsqueeze(1)).mean())
    divergence = float((against.exp() * (against - found)).sum(-1).mean())
    sure = against.max(-1).values > torch.tensor(0.9).log()
    same = (found.argmax(-1) == against.argmax(-1))[sure].float().mean()
    exact = "" if marks is None else f"{marks.rate:10.3f}"
    return f"{name:34}{loss:9.4f}{divergence:10.5f}{float(same):10.4f}{exact}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--twin", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--each", type=int, default=2, help="exam documents of each kind")
    options = parser.parse_args()
    nano.compute_dtype = torch.float32
    tokenizer = Tokenizer.load(options.tokenizer)
    corpus = Corpus(Sources.load(None), HELD_SEED)
    rows = Packer(lambda: tokenize(corpus.draw(0.5), tokenizer), LENGTH).rows(ROWS)
    batch = Batch.of(rows, torch.device("cpu"))
    counted = torch.roll(batch.weights, -1, 1) > 0
    counted[:, -1] = False
    targets = torch.roll(batch.ids, -1, 1)[counted]
    sitting = Sitting.prepare(papers(tokenizer, options.each), ROWS, LENGTH)
    print(
        f"{'':34}{'CE':>9}{'KL':>10}{'top-1':>10}{'exact':>10}   ({len(targets)} tokens, {len(sitting.places)} papers)"
    )
    for name, folder in (("twin", options.twin), ("trained with rounding", options.weights)):
        model = model_of(preset("nano"), load_shards(folder), LENGTH).eval()
        plain = log_probs(model, batch, rounding=False)
        for rounding in (False, True):
            found = log_probs(model, batch, rounding=True) if rounding else plain
            total = Marks()
            for marks in sit(model, sitting, switches(rounding)).values():
                total = total.plus(marks)
            marked = total if total.answers else None
            print(
                row(f"{name}, {'FP4/FP8' if rounding else 'BF16 weights'}", found, plain, targets, marked), flush=True
            )


if __name__ == "__main__":
    main()
