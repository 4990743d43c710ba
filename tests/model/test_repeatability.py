"""Deterministic mode: a position's logits have the same bits however they were computed."""

import pytest
import torch

from benchmarks import batch_invariance
from benchmarks._scenarios import SCENARIOS, Rig, exact_replay, prefill
from worker_svc.ops.matmul import matmul


@pytest.fixture(scope="module")
def rig(tiny):
    return Rig(tiny.checkpoint, deterministic=True)


@pytest.fixture(scope="module")
def bits(rig, tiny):
    """Logits of each sequence as one chunk, alone."""
    found = []
    for ids in tiny.sequences:
        rig.forget()
        (piece,) = prefill(rig, [ids])
        found.append(piece.logits)
    return found


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"prefill", "token_by_token"}))
def test_the_same_bits_however_computed(rig, tiny, bits, name):
    rig.forget()
    for piece in SCENARIOS[name](rig, tiny.sequences):
        expected = bits[piece.of][piece.first : piece.first + len(piece.logits)]
        assert torch.equal(piece.logits, expected), f"sequence {piece.of} from {piece.first}"


def test_the_same_bits_token_by_token(rig, tiny, bits):
    rig.forget()
    ids, start = tiny.sequences[0], 200
    rig.feed(ids, 1, 0, start, [0, 1])
    for position in range(start, len(ids)):
        got = rig.feed(ids, 1, position, position + 1, [0, 1])
        assert torch.equal(got[0], bits[0][position]), position


def test_the_same_bits_after_an_exact_replay(shallow):
    rig = Rig(shallow.checkpoint, deterministic=True)
    (whole,) = prefill(rig, shallow.sequences)
    rig.forget()
    for piece in exact_replay()(rig, shallow.sequences):
        assert torch.equal(piece.logits, whole.logits[piece.first : piece.first + len(piece.logits)])


def test_the_deterministic_forward_equals_transformers(bits, tiny):
    for ours, wanted in zip(bits, tiny.logits):
        assert float((ours - wanted).abs().max()) < 1e-4


def test_answers_of_the_default_model_do_not_depend_on_their_batch():
    metrics = batch_invariance.run(["--prompts", "10"])
    assert metrics["batch_invariance_mismatches"] == 0
    assert metrics["comparisons"] == 23  # ten with companions, nine with drafts, three tails, one replay


def test_a_plain_product_does_depend_on_the_batch():
    """What fixed_rows is for: if this ever fails on a machine, the mode costs for nothing there."""
    draw = torch.Generator().manual_seed(0)
    x, weight_t = torch.randn(64, 1024, generator=draw), torch.randn(1024, 640, generator=draw)
    assert not torch.equal(matmul(x, weight_t)[:1], matmul(x[:1], weight_t))
    for rows in (1, 2, 7, 8, 9, 33):
        fixed = matmul(x[:rows], weight_t, deterministic=True)
        assert torch.equal(fixed, matmul(x, weight_t, deterministic=True)[:rows]), rows
