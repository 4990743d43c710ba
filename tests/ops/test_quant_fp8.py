"""FP8 codecs against brute force over all codes, and the exact power-of-two scale rule."""

import math

import pytest
import torch

from worker_svc.ops import quant_fp8
from worker_svc.ops.quant_fp8 import ref

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of the format, ascending, without the second zero, and its code beside it."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return torch.unique(values[torch.isfinite(values)])


def nearest_even(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest value of the format, ties to the even mantissa, found by comparing with every value."""
    values = all_values(dtype)
    even = (values.to(dtype).view(torch.uint8) & 1) == 0
    distance = (x.double()[:, None] - values.double()[None, :]).abs()
    nearest = distance.min(-1, keepdim=True).values
    candidates = distance == nearest
    # At a tie two neighbours qualify and exactly one of them is even.
    score = candidates.int() * 2 + (candidates & even).int()
    return values[score.argmax(-1)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_nearest_even_and_saturates(dtype):
    values = all_values(dtype)
    middles = (values[1:] + values[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    limit = float(values[-1])
    noise = torch.rand(2000, generator=generator) * 2 * limit - limit
    small = torch.randn(2000, generator=generator) * float(values[values > 0][0]) * 4
    x = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), noise, small])
    # One block whose maximum is the format's own gives scale 1, so codes round the values themselves.
    x = torch.cat([x.clamp(-limit, limit), torch.tensor([limit])])
    codes, exponent = quant_fp8.quantise(x[None], x.numel(), dtype)
    assert int(exponent) == 127
    torch.testing.assert_close(codes.float()[0], nearest_even(x, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("limit", [448.0, 57344.0, 6.0])
def test_scale_is_the_exact_ceiling_of_log2(limit):
    generator = torch.Generator().manual_seed(1)
    amax = torch.exp(torch.randn(4000, generator=generator) * 20).clamp(1e-30, 1e30)
    exact = torch.tensor([2.0**k * limit for k in range(-40, 40)])
    amax = torch.cat([amax, exact, torch.nextafter(exact, torch.tensor(math.inf))])
    exponent = quant_fp8.pow2_scale(amax, limit)
    product = amax * torch.tensor(1.0 / limit)
    for byte, value in zip(exponent.tolist(), product.tolist(), strict=True):
        mantissa, power = math.frexp(value)  # value = mantissa * 2^power, mantissa in [.5, 1)
        assert byte - 127 == (power - 1 if mantissa == 0.5 else power)


def test_scale_values_cover_all_bytes():
    values = quant_fp8.scale_value(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(values[255])


@pytest.mark.parametrize(("block", "n"), [(64, 448), (128, 4096), (64, 48), (128, 200)])
def test_rows_round_trip_within_half_a_step(block, n):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(2)) * 3
    codes, exponent = quant_fp8.quantise(x, block)
    assert codes.shape == x.shape and exponent.shape == (5, -(-n // block))
    back = quant_fp8.dequantise(codes, exponent, block)
    scale = quant_fp8.scale_value(exponent).repeat_interleave(block, -1)[:, :n]
    # E4M3 has 3 mantissa bits: error at most 2^-4 of the value, or half the smallest step of the block.
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2**-4, scale * 2**-10)).all()
    assert torch.equal(quant_fp8.fake_quant(x, block), back)
    assert torch.equal(quant_fp8.fake_quant(back, block), back), "a second pass changes nothing"


def test_a_row_does_not_depend_on_its_companions():
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))
    whole = quant_fp8.fake_quant(x, 128)
    assert all(torch.equal(quant_fp8.fake_quant(x[i : i + 1], 128)[0], whole[i]) for i in range(9))


def test_zero_blocks_and_extremes():
    codes, exponent = quant_fp8.quantise(torch.zeros(2, 128), 128)
    assert exponent.unique().tolist() == [127 - 22]  # 1e-4 / 448 lies in (2^-23, 2^-22]
    assert not codes.float().any()
    _, exponent = quant_fp8.quantise(torch.full((1, 128), math.inf), 128)
    assert int(exponent) == 254
    assert quant_fp8.fake_quant(torch.full((1, 128), math.nan), 128).isnan().all()


def test_bf16_input_keeps_its_dtype():
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert quant_fp8.fake_quant(x, 64).dtype == torch.bfloat16
    # An E4M3 value times a power of two is exact in BF16, so nothing is lost on the way back.
    assert torch.equal(quant_fp8.fake_quant(x, 64).float(), quant_fp8.fake_quant(x.float(), 64))


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (3, 64, 300)])
def test_weight_tiles_match_a_loop_over_tiles(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    codes, exponent = quant_fp8.quantise_weight(weight)
    back = quant_fp8.dequantise_weight(codes, exponent)
    flat, flat_back = weight.reshape(-1, *shape[-2:]), back.reshape(-1, *shape[-2:])
    for matrix, result, bytes_ in zip(flat, flat_back, exponent.reshape(-1, *exponent.shape[-2:]), strict=True):
        for i in range(0, shape[-2], 128):
            for j in range(0, shape[-1], 128):
                tile = matrix[i : i + 128, j : j + 128]
                scale = 2.0 ** math.ceil(math.log2(float(tile.abs().max()) / 448))
                assert float(quant_fp8.scale_value(bytes_[i // 128, j // 128])) == scale
                expected = (tile / scale).to(torch.float8_e4m3fn).float() * scale
                assert torch.equal(result[i : i + 128, j : j + 128], expected)


def test_the_door_refuses_wrong_shapes():
    with pytest.raises(AssertionError):
        quant_fp8.dequantise(torch.zeros(2, 128).to(torch.float8_e4m3fn), torch.zeros(2, 2, dtype=torch.uint8), 128)
    with pytest.raises(AssertionError):
        quant_fp8.quantise(torch.zeros(2, 128, dtype=torch.int32), 128)


def test_padding_of_a_short_block_changes_no_scale():
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(6))
    _, short = ref.quantise(x, 64)
    _, exact = ref.quantise(x, 48)
    assert torch.equal(short, exact)
