"""MXFP4 codec against brute force over all codes, packing order, and the Hadamard transform beside it."""

import math

import pytest
import torch

from worker_svc.ops import quant_fp4, quant_fp8
from worker_svc.ops.hadamard import hadamard
from worker_svc.ops.quant_fp4 import ref


def nearest_even_code(value: float) -> int:
    """Code 0..7 of the magnitude nearest to |value|, ties to the even code."""
    distances = [abs(abs(value) - magnitude) for magnitude in quant_fp4.MAGNITUDES]
    best = min(distances)
    codes = [code for code, distance in enumerate(distances) if distance == best]
    return codes[0] if len(codes) == 1 else next(code for code in codes if code % 2 == 0)


def test_rounding_is_nearest_even():
    grid = [i / 64 for i in range(-8 * 64, 8 * 64 + 1)]  # holds every boundary exactly
    x = torch.tensor(grid + [math.nextafter(b, s) for b in (0.25, 0.75, 1.25, 5.0) for s in (0, 9)])
    codes = ref.round_codes(x)
    for value, code in zip(x.tolist(), codes.tolist(), strict=True):
        assert code & 7 == nearest_even_code(value), value
        assert (code >> 3 == 1) == (math.copysign(1, value) < 0), value


def test_pack_puts_even_elements_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert quant_fp4.pack(codes).tolist() == [[0x21, 0x8F]]
    every = torch.randint(0, 16, (7, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quant_fp4.unpack(quant_fp4.pack(every)), every)


def test_every_byte_decodes_to_its_two_values():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    values = quant_fp4.dequantise(packed, scale).reshape(256, 2)
    for byte, (low, high) in enumerate(values.tolist()):
        for nibble, value in ((byte & 15, low), (byte >> 4, high)):
            assert value == (-1) ** (nibble >> 3) * quant_fp4.MAGNITUDES[nibble & 7]


@pytest.mark.parametrize("exponent", [0, 1, 100, 127, 200, 250])
def test_scale_is_applied_exactly(exponent):
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)
    scale = torch.full((1, 1), exponent, dtype=torch.uint8)
    assert quant_fp4.dequantise(packed, scale).unique().tolist() == [6.0 * 2.0 ** (exponent - 127)]


def test_rows_match_a_loop_over_blocks():
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)) * 5
    packed, exponent = quant_fp4.quantise(x)
    assert packed.shape == (6, 64) and exponent.shape == (6, 4)
    codes = quant_fp4.unpack(packed)
    for row in range(6):
        for block in range(4):
            part = x[row, block * 32 : block * 32 + 32]
            scale = 2.0 ** math.ceil(math.log2(float(part.abs().max()) / 6))
            assert 2.0 ** (int(exponent[row, block]) - 127) == scale
            got = codes[row, block * 32 : block * 32 + 32].tolist()
            assert [code & 7 for code in got] == [nearest_even_code(v / scale) for v in part.tolist()]
    assert torch.equal(quant_fp4.fake_quant(x), quant_fp4.dequantise(packed, exponent))


def test_zero_block_uses_the_floor():
    packed, exponent = quant_fp4.quantise(torch.zeros(1, 32))
    assert int(exponent) == 1 and not packed.any()  # 6 * 2^-126 / 6


def test_fp4_values_are_exact_in_fp8():
    values = torch.tensor([*quant_fp4.MAGNITUDES, *(-m for m in quant_fp4.MAGNITUDES)])
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)


def test_the_door_refuses_wrong_shapes():
    with pytest.raises(AssertionError):
        quant_fp4.quantise(torch.zeros(2, 40))
    with pytest.raises(AssertionError):
        quant_fp4.dequantise(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_hadamard_is_the_sylvester_matrix(n):
    matrix = torch.tensor([[(-1.0) ** bin(a & b).count("1") for b in range(n)] for a in range(n)]) * n**-0.5
    x = torch.randn(5, 3, n, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hadamard(x), x @ matrix, rtol=0, atol=2e-6)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=2e-6)


def test_hadamard_row_does_not_depend_on_its_companions():
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(3))
    whole = hadamard(x)
    assert all(torch.equal(hadamard(x[i : i + 1])[0], whole[i]) for i in range(9))
    assert hadamard(x.bfloat16()).dtype == torch.bfloat16


def test_scale_rule_is_shared_with_fp8():
    amax = torch.tensor([6.0, 6.5, 3.0, 1e-3])
    assert quant_fp8.pow2_scale(amax, quant_fp4.E2M1_MAX).tolist() == [127, 128, 126, 115]


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_the_short_way_equals_packing_and_unpacking(size):
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(4)) * size
    assert torch.equal(quant_fp4.fake_quant(x), quant_fp4.dequantise(*quant_fp4.quantise(x)))
    assert torch.equal(quant_fp8.fake_quant(x, 64), quant_fp8.dequantise(*quant_fp8.quantise(x, 64), 64))
    assert quant_fp4.fake_quant(torch.full((1, 32), math.nan)).isnan().all()


def test_no_rows_are_fine():
    for rows in ((0, 64), (3, 0, 64)):
        x = torch.zeros(rows)
        assert quant_fp4.dequantise(*quant_fp4.quantise(x)).shape == rows == quant_fp4.fake_quant(x).shape
        assert quant_fp8.dequantise(*quant_fp8.quantise(x, 64), 64).shape == rows == quant_fp8.fake_quant(x, 64).shape
        assert hadamard(x).shape == rows
