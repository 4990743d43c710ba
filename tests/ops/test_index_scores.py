"""Indexer scores and their selection: visible entries only, the lowest index first among equals."""

import pytest
import torch

from worker_svc.ops.index_scores import index_scores, select_entries


def _case(queries=9, heads=6, width=16, entries=70):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(queries, heads, width, generator=draw)
    return q, torch.randn(entries, width, generator=draw), torch.randn(queries, heads, generator=draw)


@pytest.mark.parametrize("deterministic", [False, True])
def test_weighted_sum_of_rectified_products(deterministic):
    q, keys, weights = _case()
    products = torch.einsum("the,ne->thn", q, keys).clamp_min(0)
    expected = (products * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(index_scores(q, keys, weights, deterministic=deterministic), expected)
    many = (q.repeat(30, 1, 1), keys, weights.repeat(30, 1))  # more than one tile of queries
    torch.testing.assert_close(index_scores(*many, deterministic=deterministic), expected.repeat(30, 1))


def test_a_score_has_the_same_bits_in_any_company():
    q, keys, weights = _case()
    whole = index_scores(q, keys, weights, deterministic=True)
    part = index_scores(q[4:5], keys[:33], weights[4:5], deterministic=True)
    assert torch.equal(part[0], whole[4, :33])


def test_the_best_visible_entries():
    scores = torch.tensor([[5.0, 1.0, 9.0, 7.0, 8.0]])
    assert _chosen(scores, 4, 2) == [[2, 3]]
    assert _chosen(scores, 5, 2) == [[2, 4]]
    assert _chosen(scores, 1, 2) == [[0]]
    assert _chosen(scores, 0, 2) == [[]]
    assert _chosen(scores, 3, 9) == [[0, 1, 2]]


def test_among_equals_the_lowest_index_wins():
    """Entries whose heads all say no score exactly 0, some of them as -0.0."""
    scores = torch.tensor([[0.0, 3.0, -0.0, 0.0, -1.0, 0.0]])
    assert _chosen(scores, 6, 3) == [[0, 1, 2]]
    assert _chosen(scores, 6, 4) == [[0, 1, 2, 3]]
    assert _chosen(torch.zeros(1, 300), 300, 70) == [list(range(70))]


def test_each_query_has_its_own_horizon():
    scores = torch.arange(6.0).repeat(3, 1)
    visible = torch.tensor([2, 4, 6])
    chosen = select_entries(scores, visible, 3)
    assert [row.nonzero().flatten().tolist() for row in chosen] == [[0, 1], [1, 2, 3], [3, 4, 5]]


def _chosen(scores, visible, k):
    found = select_entries(scores, torch.tensor([visible]), k)
    return [row.nonzero().flatten().tolist() for row in found]
