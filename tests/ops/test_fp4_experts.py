"""The FP4 experts' torch path against the CPU model's experts with the same rounding."""

import pytest
import torch

from worker_svc.ops import quant_fp4, quant_fp8
from worker_svc.ops.fp4_experts import PackedExperts, load_experts
from worker_svc.ops.swiglu_experts import Hidden, swiglu_experts

EXPERTS, HIDDEN, INNER, K = 6, 256, 128, 2


def _packed(draw):
    def weight(rows, columns):
        return quant_fp4.quantise(torch.randn(EXPERTS, rows, columns, generator=draw) * columns**-0.5)

    return PackedExperts(*weight(2 * INNER, HIDDEN), *weight(HIDDEN, INNER))


def _case(tokens, activation):
    draw = torch.Generator().manual_seed(tokens)
    packed = _packed(draw)
    x = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :K].int().contiguous()
    weights = torch.rand(tokens, K, generator=draw)
    codes, scale = torch.empty(tokens, HIDDEN).to(torch.float8_e4m3fn), torch.empty(tokens, HIDDEN // 128)
    quant_fp8.quantise_rows(x, codes, scale)
    experts = load_experts(packed, limit=10.0, activation=activation)
    inputs = (codes, scale) if activation == "fp8" else (x, None)
    return packed, x, ids, weights, experts, inputs


@pytest.mark.parametrize("activation", ["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_add_up_to_the_models_experts(tokens, activation):
    packed, x, ids, weights, experts, inputs = _case(tokens, activation)
    rows = experts.run(experts.plan(tokens, K), *inputs, ids, weights)
    w13 = quant_fp4.dequantise(packed.w13, packed.w13_scale).transpose(1, 2)
    w2 = quant_fp4.dequantise(packed.w2, packed.w2_scale).transpose(1, 2)
    no_shared = (torch.cat([w, torch.zeros_like(w[:1])]) for w in (w13, w2))
    rounding = (lambda v: quant_fp8.fake_quant(v, 128)) if activation == "fp8" else None
    truth = swiglu_experts(x.float(), *no_shared, ids.long(), weights, limit=10.0, round_input=rounding)
    got = rows.view(tokens, K, HIDDEN).float().sum(1)
    bound = 2e-2 if activation == "fp8" else 6e-3  # hidden and inner are BF16 here, which moves FP8 roundings
    assert (got - truth).norm() / truth.norm() < bound


def test_padding_tokens_are_routed_nowhere():
    _, _, ids, weights, experts, inputs = _case(4, "fp8")
    whole = experts.run(experts.plan(4, K), *inputs, ids, weights)
    ids[2] = -1
    rows = experts.run(experts.plan(4, K), *inputs, ids, weights)
    real = torch.tensor([0, 1, 2, 3, 6, 7])
    assert torch.equal(rows[real], whole[real])


def test_the_shared_experts_middle_rides_along():
    _, _, ids, weights, experts, inputs = _case(3, "fp8")
    hidden = torch.randn(3, 2 * INNER, generator=torch.Generator().manual_seed(5)).bfloat16()
    both = [
        Hidden(hidden, torch.empty(3, INNER).to(torch.float8_e4m3fn), torch.full((3, INNER // 128), float("nan")))
        for _ in range(2)
    ]
    experts.run(experts.plan(3, K), *inputs, ids, weights, both[0])
    from worker_svc.ops.swiglu_experts import middle

    middle(both[1], None, 10.0)
    assert torch.equal(both[0].scale, both[1].scale)
    assert torch.equal(both[0].codes.view(torch.uint8), both[1].codes.view(torch.uint8))


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="experts=marlin"):
        load_experts(_packed(torch.Generator().manual_seed(0)), limit=10.0, backend="marlin")
