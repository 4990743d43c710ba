"""Small prefill in buckets: a padded step of fixed tensors computes what the step of the right size computes."""

import pytest
import torch

from tests.model import test_gpu_forward as forward
from worker_svc.core.work import RowWork, StepWork
from worker_svc.gpu import attention
from worker_svc.gpu.step import ChunkRow
from worker_svc.ops.slot_step import Field

cpu, loaded, gpu, text = forward.cpu, forward.loaded, forward.gpu, forward.text
twin = forward.gpu
chunk, init = forward.chunk, forward.init


def run(executor, works):
    """Logits of every forward, tokens of every row."""
    kept = forward.seen(executor)
    tokens = [[row.tokens for row in executor.run(work).rows] for work in works]
    return kept, tokens


def test_padded_steps_agree_with_plain_ones(gpu, twin, text):
    works = [
        StepWork(inits=(init(0),), rows=(chunk(0, text[:37], 0, [4, 5]),)),
        StepWork(rows=(chunk(0, text[37:170], 37, [4, 5]),)),  # reads a window, closes entries of both kinds
        StepWork(inits=(init(1), init(2)), rows=(chunk(1, text[5:25], 0, [7]), chunk(2, text[:3], 0, [9]))),
        StepWork(rows=(chunk(0, text[170:200], 170, [4, 5]), chunk(1, text[25:40], 20, [7], sample_last=0))),
        *[StepWork(rows=(RowWork(slot=0, pages=[4, 5]), RowWork(slot=2, pages=[9])))] * 2,
    ]
    assert twin is not gpu
    gpu.chunk_graphs.on = True
    used, plain = [], gpu.chunk_graphs.forward
    gpu.chunk_graphs.forward = lambda *args: used.append(len(args[0])) or plain(*args)
    ours, our_tokens = run(gpu, works)
    theirs, tokens = run(twin, works)
    assert used == [37, 133, 23, 45], "every chunk step went through a bucket"
    for number, (padded, exact) in enumerate(zip(ours, theirs)):
        similar = torch.cosine_similarity(padded[: len(exact)], exact).min().item()
        assert similar > 0.999, (number, similar)
    assert our_tokens == tokens
    for field in (Field.LENGTH, Field.NEXT):
        assert torch.equal(gpu.slots.tables.fields[field, :3], twin.slots.tables.fields[field, :3])


def test_only_few_short_rows_without_saves_fit(gpu):
    def row(length, start=0, **more):
        return ChunkRow(slot=0, start=start, length=length, pages=[0] * 20, **more)

    fits, limit = gpu.chunk_graphs.fits, 4 * gpu.model.config.index_topk
    assert fits([row(256)]) and fits([row(32)] * 8) and fits([row(10, limit - 10)])
    assert not fits([row(257)]) and not fits([row(1)] * 9) and not fits([row(10, limit - 9)])
    assert not fits([row(10, 250, saves=((256, 0),))])


def test_off_without_a_gpu(gpu, text):
    assert not gpu.chunk_graphs.on
    gpu.chunk_graphs.forward = lambda *args: pytest.fail("padding wins nothing here")
    gpu.run(StepWork(inits=(init(1),), rows=(chunk(1, text[:9], 0, [5]),)))


def test_queries_are_scored_in_groups_that_see_different_numbers_of_entries(gpu, twin, text, monkeypatch):
    assert len(text) // 4 > gpu.model.config.index_topk, "the indexer has to choose"
    work = StepWork(inits=(init(1),), rows=(chunk(1, text, 0, [5, 2]),))
    theirs, tokens = run(twin, [work])
    monkeypatch.setattr(attention, "SCORE_QUERIES", 100)
    widths, plain = [], attention.ragged_scores
    monkeypatch.setattr(attention, "ragged_scores", lambda *args: widths.append(args[-1]) or plain(*args))
    ours, our_tokens = run(gpu, [work])
    assert set(widths) == {len(text) // 4}, "earlier groups read all that they see: nothing to score"
    assert torch.allclose(ours[0], theirs[0], atol=1e-4) and our_tokens == tokens
