"""Skinny products, interpreted, against torch in FP32."""

import pytest
import torch

from worker_svc.ops import quant_fp8, skinny_gemm
from worker_svc.ops.quant_fp8 import quantise_weight, scale_value

pytest.importorskip("triton")
from worker_svc.ops.skinny_gemm import triton as kernels


def _fp8_case(rows, groups, columns, inner):
    draw = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows * groups, inner, generator=draw) * 3
    codes, scale = torch.empty(rows * groups, inner).to(torch.float8_e4m3fn), torch.empty(rows * groups, inner // 128)
    quant_fp8.quantise_rows(x, codes, scale)
    weight, exponent = quantise_weight(torch.randn(groups, columns, inner, generator=draw))
    spread = torch.empty(groups, inner // 128, rows + 1).permute(2, 0, 1)[:rows]  # scales stored by group
    spread.copy_(scale.view(rows, groups, -1))
    return codes.view(rows, groups, inner), spread, weight, scale_value(exponent)


@pytest.mark.parametrize(
    ("rows", "groups", "columns", "inner", "dtype"),
    [(1, 1, 160, 256, torch.bfloat16), (17, 2, 128, 128, torch.float32), (5, 1, 48, 384, torch.bfloat16)],
)
def test_fp8_products_equal_torch(rows, groups, columns, inner, dtype):
    case = _fp8_case(rows, groups, columns, inner)
    got, want = (torch.full((rows, groups, columns), float("nan"), dtype=dtype) for _ in range(2))
    kernels.fp8_grouped(*case, got)
    skinny_gemm.fp8_grouped(*case, want)
    assert (got.float() - want.float()).norm() / want.float().norm() < (2e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(("rows", "inner", "parts"), [(1, 1024, 8), (70, 512, 2), (17, 768, 2)])
def test_fp8_products_come_in_parts_that_add_up(rows, inner, parts):
    codes, scale, weight, weight_scale = _fp8_case(rows, 1, 160, inner)
    case = codes[:, 0], scale[:, 0], weight[0], weight_scale[0]
    got, want = (torch.full((parts, rows, 160), float("nan")) for _ in range(2))
    kernels.fp8_grouped(
        *(x.unsqueeze(1) for x in case[:2]), *(x.unsqueeze(0) for x in case[2:]), got.unsqueeze(2), tiled=True
    )
    assert skinny_gemm.fp8(*case, want, tiled=True).data_ptr() == want.data_ptr()
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-5)
    whole = torch.empty(rows, 160)
    torch.testing.assert_close(want.sum(0), skinny_gemm.fp8(*case, whole, tiled=True), atol=1e-3, rtol=1e-5)


def test_one_group_is_a_plain_product():
    codes, scale, weight, weight_scale = _fp8_case(3, 1, 128, 256)
    out = torch.empty(3, 128, dtype=torch.bfloat16)
    assert skinny_gemm.fp8(codes[:, 0], scale[:, 0], weight[0], weight_scale[0], out).data_ptr() == out.data_ptr()
    exact = (codes[:, 0].float() * scale[:, 0].repeat_interleave(128, 1)) @ (
        quant_fp8.dequantise_weight(weight[0], (weight_scale[0].log2() + 127).to(torch.uint8)).t()
    )
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=1e-2)


@pytest.mark.parametrize(("rows", "columns", "inner", "parts"), [(1, 40, 256, 0), (20, 16, 320, 0), (3, 24, 512, 3)])
def test_bf16_products_equal_torch(rows, columns, inner, parts):
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inner + 8, generator=draw).bfloat16()[:, :inner]
    weight = torch.randn(columns, inner, generator=draw).bfloat16()
    shape = (parts, rows, columns) if parts else (rows, columns)
    got = torch.full(shape, float("nan"))
    kernels.bf16(x, weight, got)
    truth = x.float() @ weight.float().t()
    torch.testing.assert_close(got.sum(0) if parts else got, truth, atol=1e-4, rtol=1e-4)
    want = torch.full(shape, float("nan"))
    skinny_gemm.bf16(x.contiguous(), weight, want)
    torch.testing.assert_close(want.sum(0) if parts else want, truth, atol=1e-4, rtol=1e-4)
