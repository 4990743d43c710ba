"""Products of the GPU forward and its slot bookkeeping: layouts, exact values, and the kernels against plain torch."""

import pytest
import torch

import worker_svc.ops.bf16_gemm as bf16_gemm_door
from worker_svc.ops import registry
from worker_svc.ops.bf16_gemm import bf16_gemm, bf16_gemm_parts
from worker_svc.ops.fp8_gemm import Fp8Matrix, Fp8Rows, cuts, empty_groups, fp8_gemm, fp8_gemm_parts, fp8_grouped
from worker_svc.ops.quant_fp8 import dequantise, quantise, quantise_rows, quantise_weight, scale_value
from worker_svc.ops.slot_step import FIELDS, SAMPLER_FIELDS, Field, StepRows, begin_step, end_step, ref
from worker_svc.ops.slot_step import triton as kernels

CPU = torch.device("cpu")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_quantised_rows_lie_column_major_in_whole_quads_and_multiply_exactly(rows):
    x = Fp8Rows.empty(rows, 256, CPU)
    assert x.scale.stride() == (1, -(-rows // 4) * 4)
    source = drawn(rows, 256).bfloat16()
    quantise_rows(source, x.codes, x.scale)
    weight, exponent = quantise_weight(drawn(384, 256, seed=1))
    out = fp8_gemm(x, Fp8Matrix(weight, scale_value(exponent)))
    codes, by_row = quantise(source, 128)
    tiles = weight.float() * scale_value(exponent).repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = dequantise(codes, by_row, 128) @ tiles.t()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_groups_meet_only_their_own_rows_of_the_weight():
    x = empty_groups(3, 2, 128, CPU)
    assert x.scale.stride() == (1, 4, 4)
    x.codes.copy_(drawn(3, 2, 128).to(torch.float8_e4m3fn))
    x.scale.fill_(0.5)
    codes, exponent = quantise_weight(drawn(2, 128, 128, seed=2))
    weight = Fp8Matrix(codes, scale_value(exponent))
    both = fp8_grouped(x, weight)
    for group in range(2):
        rows = Fp8Rows(x.codes[:, group].contiguous(), x.scale[:, group])
        assert torch.equal(both[:, group], fp8_gemm(rows, Fp8Matrix(codes[group], weight.scale[group])))


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((1536, 4096), 8),
        ((8, 1024, 4096), 4),
        ((4096, 8192), 8),
        ((4096, 2048), 4),
        ((32768, 1024), 1),
        ((640, 256), 1),
    ],
)
def test_weights_are_cut_along_k_while_columns_alone_make_few_programs(shape, parts):
    assert cuts(shape) == parts


def test_products_on_a_cpu_come_whole():
    x = Fp8Rows.empty(2, 4096, CPU)
    quantise_rows(drawn(2, 4096), x.codes, x.scale)
    codes, exponent = quantise_weight(drawn(128, 4096, seed=1))
    weight = Fp8Matrix(codes, scale_value(exponent))
    assert cuts(codes.shape) > 1 and torch.equal(fp8_gemm_parts(x, weight), fp8_gemm(x, weight))


def test_bf16_products_keep_fp32_sums():
    x, weight = drawn(3, 64).bfloat16(), drawn(5, 64, seed=1).bfloat16()
    exact = (x.double() @ weight.double().t()).float()
    for product in (bf16_gemm, bf16_gemm_parts):
        assert torch.allclose(product(x, weight), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "outputs", "chosen"),
    [(1, 4096, "skinny"), (16, 4096, "skinny"), (17, 256, "torch"), (17, 2048, "deep_gemm"), (64, 129280, "deep_gemm")]
    + [(65, 129280, "torch")],
)
def test_rows_decide_where_a_bf16_product_runs(monkeypatch, rows, outputs, chosen):
    monkeypatch.setattr(registry, "backend", lambda op: "deep_gemm")
    assert bf16_gemm_door._backend(rows, outputs) == chosen
    monkeypatch.setattr(registry, "pinned", lambda op: "deep_gemm")
    assert bf16_gemm_door._backend(rows, outputs) == "deep_gemm"


def table(slots):
    drawn_fields = torch.Generator().manual_seed(9)
    fields = torch.randint(0, 40, (FIELDS, slots + 1), generator=drawn_fields, dtype=torch.int32)
    fields[Field.FINISHED] = torch.randint(0, 2, (slots + 1,), generator=drawn_fields, dtype=torch.int32)
    fields[Field.MAX_TOKENS] = torch.randint(1, 80, (slots + 1,), generator=drawn_fields, dtype=torch.int32)
    return fields


def test_the_kernels_move_slots_as_the_reference_does():
    fields, rows = table(90), torch.randperm(90, generator=torch.Generator().manual_seed(1))[:70].to(torch.int32)
    rows[::9] = -1
    tokens = torch.randint(0, 200, (70,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    faults = (torch.arange(70) % 13 == 4).to(torch.int32)
    found = []
    for side in (ref, kernels):
        mine, at, out = fields.clone(), StepRows.empty(70, CPU), torch.empty_like(tokens)
        side.begin_step(rows, mine, at.slots, at.positions, at.ids)
        side.end_step(at.slots, at.positions, at.ids, tokens, faults, mine, out)
        found.append((mine, at.slots, at.positions, at.ids, out))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    assert SAMPLER_FIELDS == Field.EMITTED + 1


def test_a_row_ends_at_a_stop_id_at_its_length_and_at_a_fault():
    fields = torch.zeros(FIELDS, 5, dtype=torch.int32)
    fields[Field.STOPS :] = -1
    fields[Field.LENGTH], fields[Field.NEXT], fields[Field.MAX_TOKENS] = 7, 3, 5
    fields[Field.STOPS + 2, 0], fields[Field.MAX_TOKENS, 1] = 50, 1
    rows, at, out = torch.arange(4, dtype=torch.int32), StepRows.empty(4, CPU), torch.empty(4, dtype=torch.int32)
    begin_step(rows, fields, at)
    faults = torch.tensor([0, 0, 0, 2], dtype=torch.int32)
    end_step(at, torch.tensor([50, 51, 52, 53], dtype=torch.int32), faults, fields, out)
    assert out.tolist() == [50, 51, 52, -3]
    assert fields[Field.FINISHED, :4].tolist() == [1, 1, 0, 1]
    assert fields[Field.LENGTH, :4].tolist() == [7, 7, 8, 7]
    assert fields[Field.NEXT, :4].tolist() == [3, 3, 52, 3]
    assert fields[Field.EMITTED, :4].tolist() == [1, 1, 1, 0]
