"""Routing and experts: scores, ties, weights, clamps, and the order of additions."""

import pytest
import torch
from torch.nn.functional import silu, softplus

from worker_svc.ops.swiglu_experts import clamped_swiglu, swiglu_experts
from worker_svc.ops.topk_gate import expert_weights, gate_scores, pick_experts


def test_scores_are_the_root_of_softplus():
    logits = torch.linspace(-100, 100, 401).view(1, -1)
    torch.testing.assert_close(gate_scores(logits), softplus(logits.double(), threshold=1e9).sqrt().float())


def test_the_bias_chooses_but_does_not_weigh():
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    experts = pick_experts(scores, torch.tensor([9.0, 0.0, 0.0, 0.0]), 2)
    assert experts.tolist() == [[0, 3]]
    torch.testing.assert_close(expert_weights(scores, experts, 1.5), torch.tensor([[0.3, 1.2]]))


def test_among_equal_scores_the_lowest_expert_wins():
    scores = torch.ones(2, 300)
    scores[1, 200] = 2.0
    assert pick_experts(scores, torch.zeros(300), 3).tolist() == [[0, 1, 2], [200, 0, 1]]


def test_the_gate_is_clamped_from_above_only_and_up_on_both_sides():
    hidden = torch.tensor([[-20.0, 20.0, 0.5, 1.0, 30.0, -30.0]])
    gate, up = torch.tensor([-20.0, 10.0, 0.5]), torch.tensor([1.0, 10.0, -10.0])
    torch.testing.assert_close(clamped_swiglu(hidden, 10.0)[0], silu(gate) * up)


def _case(tokens):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 16, generator=draw)[:tokens]
    w13, w2 = torch.randn(6, 16, 24, generator=draw), torch.randn(6, 12, 16, generator=draw)
    experts = torch.rand(20, 5, generator=draw).argsort(1)[:tokens, :3]
    return x, w13, w2, experts, torch.rand(20, 3, generator=draw)[:tokens]


@pytest.mark.parametrize("tokens", [1, 2, 20])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_token_gets_its_experts_and_the_shared_one(tokens, deterministic):
    x, w13, w2, experts, weights = _case(tokens)
    expected = torch.stack(
        [
            clamped_swiglu(x[t] @ w13[5], 1.0) @ w2[5]
            + sum(weights[t, i] * (clamped_swiglu(x[t] @ w13[e], 1.0) @ w2[e]) for i, e in enumerate(experts[t]))
            for t in range(tokens)
        ]
    )
    got = swiglu_experts(x, w13, w2, experts, weights, limit=1.0, deterministic=deterministic)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_token_has_the_same_bits_in_any_company():
    whole = swiglu_experts(*_case(20), limit=1.0, deterministic=True)
    for tokens in (1, 2, 7):
        assert torch.equal(swiglu_experts(*_case(tokens), limit=1.0, deterministic=True), whole[:tokens])


def test_quantised_inputs_are_rounded_after_the_routing_weight():
    x, w13, w2, experts, weights = _case(2)
    seen = []

    def keep(values):
        seen.append(values.shape[-1])
        return values.round()

    got = swiglu_experts(x, w13, w2, experts, weights, limit=1.0, round_input=keep)
    rounded = x.round()
    picked = enumerate(experts[0])
    inner = [(weights[0, i] * clamped_swiglu(rounded[0] @ w13[e], 1.0)).round() @ w2[e] for i, e in picked]
    shared = clamped_swiglu(rounded[0] @ w13[5], 1.0).round() @ w2[5]
    torch.testing.assert_close(got[0], sum(inner) + shared, atol=1e-4, rtol=1e-4)
    assert seen[0] == 16 and set(seen[1:]) == {12}
