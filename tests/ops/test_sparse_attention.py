"""Attention over gathered keys with a sink: against a spelled-out softmax, and the repeatable form against itself."""

import pytest
import torch

from worker_svc.ops.sparse_attention import KEY_BLOCK, sparse_attention

HEADS, WIDTH, SCALE = 4, 32, 32**-0.5


def _case(queries=5, keys=128, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, HEADS, WIDTH, generator=draw)
    k = torch.randn(keys, WIDTH, generator=draw)
    allowed = torch.rand(queries, keys, generator=draw) < 0.4
    return q, k, allowed, torch.randn(HEADS, generator=draw)


def _spelled_out(q, k, allowed, sink):
    out = torch.zeros_like(q, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(HEADS):
            weights = [(k[j].double() @ q[t, h].double() * SCALE).exp() for j in range(k.shape[0])]
            seen = [j for j in range(k.shape[0]) if allowed[t, j]]
            total = sum((weights[j] for j in seen), sink[h].double().exp())
            for j in seen:
                out[t, h] += weights[j] / total * k[j].double()
    return out.float()


@pytest.mark.parametrize("deterministic", [False, True])
def test_softmax_over_the_allowed_keys_and_the_sink(deterministic):
    q, k, allowed, sink = _case()
    got = sparse_attention(q, k, allowed, sink, SCALE, deterministic=deterministic)
    torch.testing.assert_close(got, _spelled_out(q, k, allowed, sink), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_query_that_sees_nothing_gets_zero(deterministic):
    q, k, allowed, sink = _case()
    allowed[2] = False
    got = sparse_attention(q, k, allowed, sink, SCALE, deterministic=deterministic)
    assert torch.equal(got[2], torch.zeros(HEADS, WIDTH))


def test_no_mask_means_all_keys():
    q, k, _, sink = _case(queries=1)
    everything = torch.ones(1, k.shape[0], dtype=torch.bool)
    torch.testing.assert_close(
        sparse_attention(q, k, None, sink, SCALE), sparse_attention(q, k, everything, sink, SCALE)
    )


def test_blocks_of_masked_keys_change_no_bit():
    q, k, allowed, sink = _case()
    whole = sparse_attention(q, k, allowed, sink, SCALE, deterministic=True)
    blank, hidden = torch.zeros(KEY_BLOCK, WIDTH), torch.zeros(5, KEY_BLOCK, dtype=torch.bool)
    keys = torch.cat([blank, k[:KEY_BLOCK], blank, k[KEY_BLOCK:], blank])
    mask = torch.cat([hidden, allowed[:, :KEY_BLOCK], hidden, allowed[:, KEY_BLOCK:], hidden], dim=1)
    assert torch.equal(sparse_attention(q, keys, mask, sink, SCALE, deterministic=True), whole)


def test_a_query_has_the_same_bits_in_any_company():
    q, k, allowed, sink = _case(queries=21)
    whole = sparse_attention(q, k, allowed, sink, SCALE, deterministic=True)
    for first, last in ((0, 1), (3, 4), (5, 16), (20, 21)):
        part = sparse_attention(q[first:last], k, allowed[first:last], sink, SCALE, deterministic=True)
        assert torch.equal(part, whole[first:last])
