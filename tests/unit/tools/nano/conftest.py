"""The shipped tokenizer, and a model small enough to train for a step."""

from dataclasses import replace

import pytest
import torch

from gateway.text.tokenizer import Tokenizer
from tools.nano import model as nano
from worker_svc.checkpoint.census import preset


@pytest.fixture(scope="session")
def folder(pytestconfig):
    return pytestconfig.rootpath / "meshkit" / "models" / "v4-nano"


@pytest.fixture(scope="session")
def tokenizer(folder):
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def small():
    """Three layers, one of each kind, with every width a multiple of 128 as the trainer needs."""
    return replace(
        preset("nano"),
        hidden_size=128,
        num_hidden_layers=3,
        compress_ratios=(0, 4, 128, 0),
        head_dim=128,
        num_attention_heads=2,
        o_groups=1,
        n_routed_experts=4,
        num_hash_layers=1,
        index_n_heads=2,
        index_topk=64,
    )


@pytest.fixture
def exact(monkeypatch):
    """FP32 products on one thread."""
    monkeypatch.setattr(nano, "compute_dtype", torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
