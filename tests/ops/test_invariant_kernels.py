"""Kernels in deterministic mode, interpreted: right against torch, and a row's bits the same alone and among others."""

import pytest
import torch

from worker_svc.ops import invariant, kv_rows, sparse_attention
from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer, ref
from worker_svc.ops.quant_fp8 import quantise_rows, quantise_weight, scale_value
from worker_svc.ops.sparse_attention import DecodePlan

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these tests run kernels on CPU tensors", allow_module_level=True)

from worker_svc.ops.hyper_boundary import triton as boundary
from worker_svc.ops.skinny_gemm import triton as skinny
from worker_svc.ops.sparse_attention import triton as attention

SCALE = 512**-0.5


@pytest.fixture(autouse=True)
def mode():
    with invariant.switched(True):
        yield


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Lists:
    """Three tokens over two pools: full lists, a short window with few entries, a full window alone."""

    def __init__(self, *, far):
        draw = torch.Generator().manual_seed(5)
        self.q = drawn(3, 4, 512, seed=6).bfloat16()
        self.window, self.entries = kv_rows.allocate(256, "cpu"), kv_rows.allocate(320, "cpu")
        for seed, pool in ((1, self.window), (2, self.entries)):
            rows = torch.arange(pool.shape[0] * 64, dtype=torch.int32)
            kv_rows.insert_rows(drawn(len(rows), 512, seed=seed), pool, rows)
        self.near_len = torch.tensor([128, 40, 128], dtype=torch.int32)
        self.far_len = torch.tensor([far, 9, 0], dtype=torch.int32)
        self.near = torch.stack([torch.randperm(256, generator=draw)[:128] for _ in range(3)]).int()
        self.far = torch.stack([torch.randperm(320, generator=draw)[:far] for _ in range(3)]).int()
        for rows, lengths in ((self.near, self.near_len), (self.far, self.far_len)):
            rows[torch.arange(rows.shape[1]) >= lengths.unsqueeze(1)] = -1
        self.sink = drawn(4, seed=7)

    def decode(self, *tokens):
        some, out = list(tokens), torch.full((len(tokens), 4, 512), torch.nan, dtype=torch.bfloat16)
        lists = (self.near[some], self.near_len[some], self.entries, self.far[some], self.far_len[some])
        attention.sparse_decode(self.q[some], self.window, *lists, self.sink, SCALE, out)
        return out

    def chunk(self, *tokens, reach=True):
        """The same keys in one workspace, window first."""
        some, out = list(tokens), torch.full((len(tokens), 4, 512), torch.nan, dtype=torch.bfloat16)
        keys = torch.empty(576, 512, dtype=torch.bfloat16)
        kv_rows.gather_rows(self.window, torch.arange(256, dtype=torch.int32), keys[:256])
        kv_rows.gather_rows(self.entries, torch.arange(320, dtype=torch.int32), keys[256:])
        index = torch.cat([self.near, self.far + 256 * (self.far >= 0)], 1)[some].contiguous()
        args = (self.q[some], keys, index, self.sink, SCALE, out)
        attention.sparse_prefill(*args, 128 + self.far_len[some] if reach else None)
        return out


def test_attention_reads_a_token_alike_in_decode_in_a_chunk_and_in_any_company():
    lists = Lists(far=256)  # 6 tiles: two splits
    together = lists.decode(0, 1, 2)
    wanted = sparse_attention.decode_attention(
        *(lists.q, lists.window, lists.near, lists.near_len, lists.entries, lists.far, lists.far_len),
        *(lists.sink, SCALE, DecodePlan()),
    )
    assert (together.float() - wanted.float()).norm() < 3e-3 * wanted.float().norm()  # weights are BF16
    assert same(lists.decode(1), together[1:2])
    assert same(lists.chunk(2, 0), together[[2, 0]])
    assert same(lists.chunk(1, reach=False), together[1:2])


def test_a_longer_list_that_holds_nothing_more_changes_nothing(monkeypatch):
    """Graphs of a longer context launch more splits; and groups of a chunk are cut anywhere."""
    lists = Lists(far=64)
    wanted = lists.decode(0)
    lists.far = torch.cat([lists.far, torch.full((3, 320), -1, dtype=torch.int32)], 1)
    monkeypatch.setattr(attention, "PART_BYTES", 1)
    assert same(lists.decode(0), wanted)


def fp8_product(rows):
    codes, scale = torch.empty(70, 256).to(torch.float8_e4m3fn), torch.empty(70, 2)
    quantise_rows(drawn(70, 256).bfloat16(), codes, scale)
    weight, exponent = quantise_weight(drawn(128, 256, seed=1))
    out = torch.full((len(rows), 1, 128), torch.nan, dtype=torch.bfloat16)
    args = (codes[rows].unsqueeze(1), scale[rows].unsqueeze(1), weight.unsqueeze(0), scale_value(exponent).unsqueeze(0))
    skinny.fp8_grouped(*args, out, tiled=True)
    exact = (codes[rows].float() * scale[rows].repeat_interleave(128, 1)) @ (
        weight.float() * scale_value(exponent).repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).t()
    return out[:, 0], exact


def bf16_product(rows):
    x, weight = drawn(70, 256).bfloat16()[rows], drawn(48, 256, seed=1).bfloat16()
    out = torch.full((len(rows), 48), torch.nan)
    skinny.bf16(x, weight, out, tiled=True)
    return out, x.float() @ weight.float().t()


@pytest.mark.parametrize("product", [fp8_product, bf16_product])
def test_products_in_tiles_of_64_rows(product):
    rows = torch.arange(70).flip(0)
    got, exact = product(rows)
    assert (got.float() - exact).norm() < 2e-3 * exact.norm()
    for row in (0, 69):
        assert same(product(torch.tensor([row]))[0], got[69 - row : 70 - row])


def test_a_boundary_is_cut_alike_at_one_token_and_at_many():
    width, rules = 640, BoundaryRules(2, 1e-6, 1e-6)
    assert {boundary.split(tokens, width) for tokens in (1, 17, 65, 5000)} == {boundary.split(1, width)}
    mixer = prepare_mixer(drawn(24, 4 * width, seed=1) * 0.01, torch.ones(3), drawn(24, seed=2))
    space = Workspace(64, width, "cpu")
    space.partials = torch.full((64 * 16 * 42 + 256,), torch.nan)
    streams, out = drawn(5, 4, width, seed=3).bfloat16(), drawn(5, width, seed=4).bfloat16()
    post, comb = torch.rand(5, 4), torch.rand(5, 16) / 4

    def run(rows, side):
        new, y = torch.full((len(rows), 4, width), torch.nan).bfloat16(), torch.empty(len(rows), width).bfloat16()
        args = (streams[rows], new, post[rows].contiguous(), comb[rows].contiguous())
        post_, comb_ = torch.empty(len(rows), 4), torch.empty(len(rows), 16)
        if side is ref:
            ref.post_mix(*args, out[rows], None, None)
            ref.pre_norm(new, mixer, torch.ones(width), rules, y, post_, comb_, None, None, None)
        else:
            boundary.post_mix(*args, mixer, space, out[rows], None, None)
            boundary.pre_norm(new, mixer, space, torch.ones(width), rules, y, post_, comb_, None, None, None)
        return new, y, post_, comb_

    every = torch.arange(5)
    got, wanted = run(every, boundary), run(every, ref)
    for a, b in zip(got, wanted):
        assert (a.float() - b.float()).norm() < 2e-3 * b.float().norm()
    for a, b in zip(run(torch.tensor([4]), boundary), got):
        assert same(a, b[4:])
