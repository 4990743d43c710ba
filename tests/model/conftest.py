"""A small random model in which every tensor matters, transformers' logits for it, and the default model."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks._reference import Reference
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.generate import generate_checkpoint
from worker_svc.checkpoint.loader import Checkpoint, load_checkpoint

NANO = Path(__file__).parent.parent.parent / "meshkit" / "models" / "v4-nano"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Other test processes use the cores too; waiting for a busy one at every barrier is slow."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Known:
    """A checkpoint, token sequences, and transformers' logits of each."""

    checkpoint: Checkpoint
    sequences: list[Tensor]
    logits: list[Tensor]


def known(checkpoint: Checkpoint, *sizes: int) -> Known:
    draw = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, checkpoint.config.vocab_size, (size,), generator=draw) for size in sizes]
    reference = Reference(checkpoint)
    return Known(checkpoint, sequences, [reference.logits(ids) for ids in sequences])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Seven layers of every type, 32 index heads, top-k of 12 entries."""
    return generate_checkpoint(preset("tiny"), tmp_path_factory.mktemp("tiny"), seed=3, content="lively")


@pytest.fixture(scope="session")
def tiny(tiny_folder) -> Known:
    return known(load_checkpoint(tiny_folder), 300, 140, 270)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory) -> Known:
    """Three layers (window, C128, C4): an exact replay is short enough to leave something out."""
    folder = generate_checkpoint(preset("tiny"), tmp_path_factory.mktemp("shallow"), seed=4, layers=3, content="lively")
    return known(load_checkpoint(folder), 700)
