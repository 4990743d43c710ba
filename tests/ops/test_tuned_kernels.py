"""Candidates of kernels' shapes, interpreted, give what the built-in ones give; deterministic mode asks for none."""

import pytest
import torch

from worker_svc import tuning
from worker_svc.ops import invariant, kv_rows
from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer
from worker_svc.tuning.choices import CHOICES

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these tests run kernels on CPU tensors", allow_module_level=True)
from worker_svc.ops.hyper_boundary import triton as boundary
from worker_svc.ops.paged_attention import paged_attention
from worker_svc.ops.paged_attention import triton as paged
from worker_svc.ops.sparse_attention import triton as attention

WIDTH = 512
FEW = sorted({*CHOICES["hyper_boundary.split_16"].candidates, *CHOICES["hyper_boundary.split_64"].candidates})
MANY = sorted({*CHOICES["hyper_boundary.split_1024"].candidates, *CHOICES["hyper_boundary.split_more"].candidates})
TILES = sorted({*CHOICES["sparse_attention.tile_few"].candidates, *CHOICES["sparse_attention.tile_many"].candidates})


def _between(tokens=2):
    draw = torch.Generator().manual_seed(1)
    fn = torch.randn(24, 4 * WIDTH, generator=draw) * (4 * WIDTH) ** -0.5
    mixer = prepare_mixer(fn, torch.rand(3, generator=draw) + 0.5, torch.randn(24, generator=draw))
    space = Workspace(tokens, WIDTH, "cpu")
    space.partials = torch.full((64 * WIDTH // 64 * 42,), torch.nan)
    x = torch.randn(tokens, 4, WIDTH, generator=draw).bfloat16()
    post, comb = torch.rand(tokens, 4, generator=draw), torch.rand(tokens, 16, generator=draw) / 4
    out, new = torch.randn(tokens, WIDTH, generator=draw).bfloat16(), torch.full_like(x, torch.nan)
    boundary.post_mix(x, new, post, comb, mixer, space, out, None, None)
    y, after = torch.full_like(out, torch.nan), torch.full((tokens, 20), torch.nan)
    post, comb = torch.empty_like(post), torch.empty_like(comb)
    rules = BoundaryRules(1, 1e-6, 1e-6)
    boundary.pre_norm(new, mixer, space, torch.ones(WIDTH), rules, y, post, comb, None, None, None)
    after[:, :4], after[:, 4:] = post, comb
    return new, y, after


@pytest.fixture(scope="module")
def truth():
    return _between()


@pytest.mark.parametrize("cut", FEW, ids=str)
def test_cuts_of_few_tokens(cut, truth):
    with tuning.trial({"hyper_boundary.split_16": cut}):
        assert boundary.split(2, WIDTH).channels == cut[1] and boundary.split(2, WIDTH).gram
        _same(_between(), truth)


@pytest.mark.parametrize("cut", [cut for cut in MANY if cut[1] * cut[2] < WIDTH], ids=str)
def test_cuts_of_many_tokens(cut, truth, monkeypatch):
    monkeypatch.setattr(boundary, "GRAM_TOKENS", 0)
    with tuning.trial({"hyper_boundary.split_16": (16, 64, 8), "hyper_boundary.split_1024": cut}):
        made = boundary.split(2, WIDTH)
        assert not made.gram and made.tiles * made.parts * made.channels >= WIDTH and made.stages == cut[4]
        _same(_between(), truth)


def _same(found, truth):
    for got, wanted in zip(found, truth):
        assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 2e-3


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 1024, 1025])
@pytest.mark.parametrize("width", [256, 384, 4096, 7168])
def test_the_first_candidate_is_the_built_in_cut(tokens, width):
    first = CHOICES[boundary.split_name(tokens)].candidates[0]
    assert boundary.split_of(first, tokens, width) == boundary.built_in_split(tokens, width)


@pytest.mark.parametrize("width", [256, 384, 4096, 7168])
def test_every_cut_covers_the_width_within_the_workspace(width):
    for cut, tokens in [*((cut, 64) for cut in FEW), *((cut, 4096) for cut in MANY)]:
        made = boundary.split_of(cut, tokens, width)
        assert made.tiles * made.parts * made.channels >= width and width % made.channels == 0
        assert made.parts <= (-(-width // 64) if tokens <= 64 else 8)


def test_deterministic_mode_cuts_as_it_is_built(monkeypatch):
    builtin = boundary.built_in_split(boundary.GRAM_TOKENS + 1, 4096)
    with tuning.trial(dict.fromkeys(("hyper_boundary.split_16", "hyper_boundary.split_64"), (16, 128, 8))):
        assert boundary.split(3, 4096).warps == 8
        monkeypatch.setattr(invariant, "_on", True)
        assert boundary.split(3, 4096) == builtin


def _attended():
    """One token of four heads over a window and 128 entries."""
    draw = torch.Generator().manual_seed(2)
    pool = kv_rows.allocate(256, "cpu")
    values = torch.randn(256, 512, generator=draw).bfloat16()
    kv_rows.insert_rows(values, pool, torch.arange(256, dtype=torch.int32))
    rows = torch.randperm(256, generator=draw).int()
    near, far = rows[:128].unsqueeze(0).contiguous(), rows[128:].unsqueeze(0).contiguous()
    lengths = torch.tensor([100], dtype=torch.int32), torch.tensor([90], dtype=torch.int32)
    q = torch.randn(1, 4, 512, generator=draw).bfloat16()
    codes = torch.zeros(1, 2, 1024).to(torch.float8_e4m3fn)
    scale = torch.full((1, 2, 8), torch.nan)
    turns, at = torch.randn(4, 32, 2, generator=draw), torch.tensor([3], dtype=torch.int32)
    return (q, pool, near, lengths[0], pool, far, lengths[1], torch.zeros(4), 512**-0.5, turns, at), codes, scale


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_of_attention(tile):
    args, codes, scale = _attended()
    with tuning.trial({"sparse_attention.tile_few": tile}):
        assert attention.tuned_tile(1, 4).keys == tile[0] and attention.tile_for(1, 4).keys == 32
        paged.paged_attention(*args, codes, scale)
    wanted_codes, wanted_scale = torch.zeros_like(codes.float()).to(codes.dtype), torch.empty_like(scale)
    paged_attention(*args, wanted_codes, wanted_scale)
    got, wanted = (c.float() * s.repeat_interleave(128, 2) for c, s in ((codes, scale), (wanted_codes, wanted_scale)))
    assert float((got - wanted).norm() / wanted.norm()) < 2e-2


def test_bf16_rows_chunks_and_deterministic_mode_keep_the_built_in_tile(monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "_launch", lambda *args, **more: asked.append(args[5]) or (None, None))
    (q, pool, near, near_len, *_), _, _ = _attended()
    rows = (near, near_len, None, None, None, 1.0)
    with tuning.trial({"sparse_attention.tile_few": (64, 32, 4, 2), "sparse_attention.few_tokens": 16}):
        attention.attend(q, pool, *rows)
        attention.attend(q, kv_rows.allocate(256, "cpu", bf16=True), *rows)
        monkeypatch.setattr(invariant, "_on", True)
        attention.attend(q, pool, *rows)
        assert attention.tuned_tile(16, 64).keys == 64 and attention.tuned_tile(17, 64) == attention.TILE_MANY
    assert [tile.keys for tile in asked] == [64, 32, 32]
