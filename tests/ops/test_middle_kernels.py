"""Row quantisation and the experts' middle, interpreted, against torch: codes and scales bit for bit."""

import pytest
import torch

from worker_svc.ops import quant_fp8, swiglu_experts
from worker_svc.ops.swiglu_experts import Hidden, ref

pytest.importorskip("triton")
from worker_svc.ops.quant_fp8 import triton as quant_kernels
from worker_svc.ops.swiglu_experts import triton as kernels


def _outputs(rows, width):
    codes = torch.full((rows, width), 448.0).to(torch.float8_e4m3fn)
    return codes, torch.full((width // 128, rows + 2), float("nan")).t()[:rows]


def _same(codes, scale, other_codes, other_scale):
    assert torch.equal(scale, other_scale)
    assert torch.equal(codes.view(torch.uint8), other_codes.view(torch.uint8))


@pytest.mark.parametrize(("rows", "width"), [(3, 256), (2, 4096), (130, 384)])
def test_rows_quantise_bit_for_bit(rows, width):
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width + 64, generator=draw).bfloat16()[:, :width]
    x *= torch.exp(torch.randn(rows, 1, generator=draw) * 3)
    x[0, :128] = 0.0
    x[1, :4] = torch.tensor([448.0, -448.0, 0.0, -0.0])
    got, want = _outputs(rows, width), _outputs(rows, width)
    quant_kernels.quantise_rows(x, *got)
    quant_fp8.quantise_rows(x, *want)
    _same(*got, *want)


def test_parts_of_a_split_product_are_added_before_they_are_quantised():
    draw = torch.Generator().manual_seed(8)
    x = torch.randn(4, 3, 384, generator=draw)
    got, want = _outputs(3, 384), _outputs(3, 384)
    quant_kernels.quantise_rows(x, *got)
    quant_fp8.quantise_rows(x, *want)
    _same(*got, *want)


@pytest.mark.parametrize(("rows", "shared_rows", "inner"), [(6, 3, 128), (2, 0, 384), (70, 1, 256)])
def test_the_middle_of_routed_and_shared_rows(rows, shared_rows, inner):
    draw = torch.Generator().manual_seed(inner)
    hidden = (torch.randn(rows + shared_rows, 2 * inner, generator=draw) * 8).bfloat16()
    weights = torch.rand(rows, generator=draw)
    routed = Hidden(hidden[:rows], *_outputs(rows, inner), weights)
    shared = Hidden(hidden[rows:].contiguous(), *_outputs(shared_rows, inner)) if shared_rows else None
    kernels.middle(routed, shared, 10.0)
    for stack in (routed, shared):
        if stack is not None:
            exact = ref.weighted(stack.hidden, stack.weights, 10.0)
            got = quant_fp8.dequantise(stack.codes, (stack.scale.log2() + 127).to(torch.uint8), 128)
            codes, scale = _outputs(*exact.shape)
            quant_fp8.quantise_rows(exact, codes, scale)
            # exp differs in its last bit, which can move a value over a rounding boundary: rarely.
            assert (stack.codes.view(torch.uint8) == codes.view(torch.uint8)).float().mean() > 0.999
            assert (got - exact.float()).norm() / exact.float().norm() < 0.04


def test_the_middle_without_quantisation():
    hidden = (torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    weights, out, truth = torch.rand(5), torch.full((5, 128), float("nan")).bfloat16(), torch.empty(5, 128).bfloat16()
    kernels.middle_bf16(hidden, weights, out, 10.0)
    swiglu_experts.middle_bf16(hidden, weights, truth, 10.0)
    torch.testing.assert_close(out, truth, atol=0, rtol=2**-7)
