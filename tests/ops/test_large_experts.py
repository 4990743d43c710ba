"""Experts' products of many rows: the packed layout they read, rows with one scale, code for every block size."""

import re

import pytest
import torch

from worker_svc.ops import expert_sort, quant_fp4, quant_fp8
from worker_svc.ops.fp4_experts import row_scales, triton, wgmma
from worker_svc.ops.swiglu_experts import Hidden, middle


def _pack(packed, scale):
    """[E, N, K / 2] codes and [E, N, K / 32] exponents -> weight, offsets and residual as the kernel reads them.

    A lane's word holds 8 columns of one row, 4t.. and 16 + 4t.. of 32: magnitudes one after the other, signs where the
    unpacking wants them, that is the two halves' in turns.
    """
    codes = quant_fp4.unpack(packed).long()
    experts, rows, width = codes.shape
    c = codes.view(experts, rows // 16, 2, 8, width // 64, 2, 2, 4, 4)  # tile, half, g, 64, 32, 16 columns, t, column
    c = c.permute(0, 4, 1, 3, 7, 5, 2, 6, 8).reshape(experts, width // 64, rows // 16, 8, 4, 2, 2, 8)
    i = torch.arange(8)
    words = ((c & 7) << (4 * i)).sum(-1) + ((c >> 3) << (8 * (i % 4) + 3 + 4 * (i // 4))).sum(-1)
    weight = (words - ((words >> 31) << 32)).to(torch.int32).reshape(experts, width // 64, rows * 8)
    smallest = scale.long().amin((1, 2))
    offset = (scale.long() - smallest[:, None, None] + 1).to(torch.uint8)
    offset = offset.view(experts, rows // 64, 4, 2, 8, width // 32).permute(0, 5, 1, 4, 2, 3)
    residual = torch.exp2(smallest.float() - 128)
    return weight, offset.reshape(experts, width // 32, rows).contiguous(), residual


def _weights(experts, rows, width, seed):
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (experts, rows, width // 2), dtype=torch.uint8, generator=draw)
    scale = torch.randint(115, 126, (experts, rows, width // 32), dtype=torch.uint8, generator=draw)
    return packed, scale


def _rows(tokens, width, seed, spread=2.0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=draw) * torch.exp(torch.randn(tokens, 1, generator=draw))
    x = x.view(tokens, -1, 128) * torch.exp2(torch.rand(tokens, width // 128, 1, generator=draw) * spread)
    codes, scale = torch.empty(tokens, width).to(torch.float8_e4m3fn), torch.empty(tokens, width // 128)
    quant_fp8.quantise_rows(x.view(tokens, width).bfloat16(), codes, scale)
    return codes, scale


def test_packed_weights_read_back():
    packed, scale = _weights(2, 128, 192, 0)
    weight, offset, residual = _pack(packed, scale)
    for e in range(2):
        got = wgmma.unpacked(weight[e], offset[e], residual[e])
        assert torch.equal(got, quant_fp4.dequantise(packed[e], scale[e]))


def test_rows_keep_their_values_when_they_get_one_scale():
    codes, scale = _rows(5, 512, 1)
    out, out_scale = torch.empty_like(codes), torch.full((5,), float("nan"))
    row_scales.fold(codes, scale, out, out_scale)
    exact = codes.float() * scale.repeat_interleave(128, 1)
    assert torch.equal(out_scale, scale.amax(1))
    assert ((out.float() * out_scale[:, None] - exact).abs() <= out_scale[:, None] * 2.0**-10).all()
    assert (out.float() * out_scale[:, None] - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize(("rows", "width", "spread"), [(3, 512, 2.0), (2, 384, 12.0)])
def test_folding_kernel_against_torch(rows, width, spread):
    codes, scale = _rows(rows, width, 2, spread)
    got, want = ((torch.empty_like(codes), torch.empty(rows)) for _ in range(2))
    triton.fold(codes, scale, *got)
    row_scales.fold_ref(codes, scale, *want)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize(("rows", "inner"), [(3, 512), (2, 384)])
def test_folded_middle_is_the_middle_folded(rows, inner):
    draw = torch.Generator().manual_seed(rows)
    hidden = (torch.randn(rows, 2 * inner, generator=draw) * 4).bfloat16()
    weights = torch.rand(rows, generator=draw) + 0.1
    fine = torch.empty(rows, inner).to(torch.float8_e4m3fn), torch.empty(rows, inner // 128)
    middle(Hidden(hidden, *fine, weights), None, 10.0)
    want, got = ((torch.empty_like(fine[0]), torch.empty(rows)) for _ in range(2))
    row_scales.fold_ref(*fine, *want)
    triton.folded_middle(hidden, weights, 10.0, *got)
    assert torch.equal(got[1], want[1])
    assert (got[0].view(torch.uint8) != want[0].view(torch.uint8)).float().mean() < 0.01  # exp differs in its last bit
    ours = torch.empty_like(fine[0]), torch.empty(rows)
    row_scales.folded_middle(hidden, weights, 10.0, *ours)
    assert torch.equal(ours[0].view(torch.uint8), want[0].view(torch.uint8))


def test_every_block_size_has_code():
    covered = [int(eights) for eights in re.findall(r"case (\d+):", wgmma.cases())]
    assert covered == list(range(1, wgmma.ROWS // 8 + 1))
    for line in wgmma.cases().splitlines():
        size = int(re.search(r"consume<(\d+)>", line).group(1))
        assert max(int(e) for e in re.findall(r"case (\d+):", line)) * 8 == size
    text = wgmma.source(4096, 4096)
    assert all(f"m64n{size}k32" in text for size in wgmma.SIZES) and "//CASES//" not in text
    assert wgmma.shared_bytes() <= 227 * 1024


@pytest.mark.parametrize(
    ("width", "out", "experts", "can"),
    [(4096, 4096, 256, True), (192, 256, 4, False), (256, 128, 4, False), (256, 256, 513, False)],
)
def test_shapes_that_fit(width, out, experts, can):
    assert wgmma.fits(width, out, experts) is can


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 200, 2500])
def test_product_on_the_device(tokens):
    pytest.importorskip("humming")
    experts, rows, width, k = 8, 512, 512, 2
    packed, scale = _weights(experts, rows, width, tokens)
    weight, offset, residual = (t.cuda() for t in _pack(packed, scale))
    codes, block_scale = (t.cuda() for t in _rows(tokens, width, tokens))
    x, x_scale = torch.empty_like(codes), torch.empty(tokens, device="cuda")
    row_scales.fold(codes, block_scale, x, x_scale)
    ids = torch.rand(tokens, experts).argsort(1)[:, :k].int().cuda()
    order = expert_sort.allocate(tokens, k, experts, wgmma.SORT_BLOCK, "cuda")
    expert_sort.sort_slots(ids, order)
    out = torch.full((tokens * k, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
    wgmma.product(x, x_scale, weight, offset, residual, order, k, out)
    exact = codes.float() * block_scale.repeat_interleave(128, 1)
    dense = quant_fp4.dequantise(packed, scale).cuda()
    truth = torch.einsum("snk,sk->sn", dense[ids.flatten().long()], exact.repeat_interleave(k, 0))
    assert (out.float() - truth).norm() <= 2e-3 * truth.norm()
