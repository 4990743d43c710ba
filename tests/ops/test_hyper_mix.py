"""Hyper-connection mixing: the numpy weights against torch's, and what they promise."""

import pytest
import torch

from worker_svc.ops.hyper_mix import collapse, expand, host, mix_weights, ref


def _mixes(tokens=7, spread=2.0):
    return torch.randn(tokens, 24, generator=torch.Generator().manual_seed(0)) * spread


@pytest.mark.parametrize("spread", [0.1, 2.0, 30.0, 300.0])
def test_numpy_equals_torch(spread):
    arguments = (_mixes(spread=spread), 4, 20, 1e-6)
    for ours, truth in zip(host.mix_weights(*arguments), ref.mix_weights(*arguments)):
        torch.testing.assert_close(ours, truth, atol=2e-6, rtol=2e-5)


def test_comb_is_doubly_stochastic_and_gates_keep_their_ranges():
    pre, post, comb = mix_weights(_mixes(), 4, 20, 1e-6)
    assert torch.allclose(comb.sum(1), torch.ones(7, 4), atol=1e-5), "the loop ends on columns"
    assert torch.allclose(comb.sum(2), torch.ones(7, 4), atol=1e-2)
    assert float(pre.min()) > 1e-6 and float(pre.max()) <= 1.0 + 2e-6
    assert float(post.max()) > 1.0 and float(post.max()) <= 2.0


def test_a_token_has_the_same_bits_in_any_company():
    whole = mix_weights(_mixes(33), 4, 20, 1e-6)
    for tokens in (1, 2, 3, 8, 31):
        for part, all_of in zip(mix_weights(_mixes(33)[:tokens], 4, 20, 1e-6), whole):
            assert torch.equal(part, all_of[:tokens])


@pytest.mark.parametrize("deterministic", [False, True])
def test_streams_are_mixed_by_the_transpose(deterministic):
    draw = torch.Generator().manual_seed(1)
    x, out = torch.randn(3, 4, 8, generator=draw), torch.randn(3, 8, generator=draw)
    pre, post, comb = mix_weights(_mixes(3), 4, 20, 1e-6)
    expected = torch.einsum("sjk,sjd->skd", comb, x) + torch.einsum("sk,sd->skd", post, out)
    torch.testing.assert_close(expand(out, x, post, comb, deterministic=deterministic), expected)
    torch.testing.assert_close(collapse(x, pre), torch.einsum("sj,sjd->sd", pre, x))
