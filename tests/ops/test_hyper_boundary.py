"""The boundary kernels, interpreted, against the torch reference: fresh inputs, poisoned outputs, every path."""

import pytest
import torch

from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, mixer, prepare_mixer, ref
from worker_svc.ops.quant_fp8 import quantise, scale_value

triton = pytest.importorskip("triton")
from worker_svc.ops.hyper_boundary import triton as kernels  # noqa: E402

RULES = BoundaryRules(2, 1e-6, 1e-6)  # fewer Sinkhorn steps: the interpreter takes 20 ms for one
K = 2


def _draw(seed):
    return torch.Generator().manual_seed(seed)


def _poison(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype)


def _mixer(width, outputs, draw):
    scale = torch.rand(3 if outputs == 24 else 1, generator=draw) + 0.5
    fn = torch.randn(outputs, 4 * width, generator=draw) * (4 * width) ** -0.5 * 3
    return prepare_mixer(fn, scale, torch.randn(outputs, generator=draw))


def _workspace(tokens, width):
    space = Workspace(tokens, width, "cpu")
    space.partials = torch.full((max(64 * -(-width // 64), tokens * 8) * 42,), float("nan"))
    return space


def _close(got, truth, bound=2e-3):
    error = (got.float() - truth.float()).norm() / truth.float().norm()
    assert error <= bound, float(error)


def _after(x, mix, tokens, width):
    """pre_norm of kernels and reference on the same streams; the workspace must be filled already."""
    return [
        {
            "y": _poison(tokens, width),
            "post": _poison(tokens, 4, dtype=torch.float32),
            "comb": _poison(tokens, 16, dtype=torch.float32),
            "q": torch.full((tokens, width), 448.0).to(torch.float8_e4m3fn),
            "sf": _poison(width // 128, tokens + 3, dtype=torch.float32).t()[:tokens],
            "sf2": _poison(tokens, width // 128, dtype=torch.float32),
        }
        for _ in range(2)
    ]


@pytest.fixture(params=[64, 0], ids=["spread", "whole"])
def form(request, monkeypatch):
    """Both forms of pass 2: a token over several programs, and one program for a token."""
    monkeypatch.setattr(kernels, "GRAM_TOKENS", request.param)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("source", "tokens", "width"), [("embed", 2, 256), ("output", 1, 384), ("experts", 18, 256)])
@pytest.mark.parametrize("parts", [0, 4])
def test_a_boundary_equals_its_reference(source, tokens, width, parts):
    draw = _draw(tokens + len(source))
    mix, norm = _mixer(width, 24, draw), torch.rand(width, generator=draw) + 0.5
    space = _workspace(tokens, width)
    x = torch.randn(tokens, 4, width, generator=draw).bfloat16()
    ours, truth = _poison(tokens, 4, width), _poison(tokens, 4, width)
    if source == "embed":
        ids = torch.randint(0, 30, (tokens,), generator=draw, dtype=torch.int32)
        embed = torch.randn(30, width, generator=draw).bfloat16()
        kernels.embed_mix(ids, embed, ours, mix, space)
        ref.embed_mix(ids, embed, truth)
        assert torch.equal(ours, truth)
    else:
        post, comb = torch.rand(tokens, 4, generator=draw) * 2, torch.rand(tokens, 16, generator=draw)
        whole = torch.randn(tokens, width, generator=draw).bfloat16()
        product = torch.randn(parts, tokens, width, generator=draw) if parts else whole
        one = (product, None, None)
        many = (None, torch.randn(tokens * K, width, generator=draw).bfloat16(), whole)
        kernels.post_mix(x, ours, post, comb, mix, space, *(one if source == "output" else many))
        ref.post_mix(x, truth, post, comb, *(one if source == "output" else many))
        _close(ours, truth)
    got, want = _after(ours, mix, tokens, width)
    kernels.pre_norm(ours, mix, space, norm, RULES, **got)
    ref.pre_norm(ours, mix, norm, RULES, **want)
    for name in ("post", "comb"):
        torch.testing.assert_close(got[name], want[name], atol=1e-4, rtol=1e-4)
    _close(got["y"], want["y"])
    assert torch.equal(got["sf"], got["sf2"])
    codes, exponent = quantise(got["y"].float(), 128)
    assert torch.equal(got["sf"], scale_value(exponent))
    assert torch.equal(got["q"].view(torch.uint8), codes.view(torch.uint8))


def test_twenty_sinkhorn_steps_equal_the_reference():
    draw, rules = _draw(3), BoundaryRules(20, 1e-6, 1e-6)
    mix, space, x = _mixer(128, 24, draw), _workspace(1, 128), _poison(1, 4, 128)
    kernels.embed_mix(torch.tensor([3]), torch.randn(4, 128, generator=draw).bfloat16(), x, mix, space)
    got, want = _after(x, mix, 1, 128)
    kernels.pre_norm(x, mix, space, torch.ones(128), rules, **got)
    ref.pre_norm(x, mix, torch.ones(128), rules, **want)
    torch.testing.assert_close(got["comb"], want["comb"], atol=1e-5, rtol=1e-4)


def test_streams_can_be_mixed_in_place():
    draw = _draw(7)
    mix, space = _mixer(256, 24, draw), _workspace(3, 256)
    x = torch.randn(3, 4, 256, generator=draw).bfloat16()
    post, comb = torch.rand(3, 4, generator=draw), torch.rand(3, 16, generator=draw)
    out, apart = torch.randn(3, 256, generator=draw).bfloat16(), torch.empty_like(x)
    kernels.post_mix(x, apart, post, comb, mix, space, out, None, None)
    kernels.post_mix(x, x, post, comb, mix, space, out, None, None)
    assert torch.equal(x, apart)


@pytest.mark.usefixtures("form")
def test_the_head_reads_the_sampled_rows_alone():
    tokens, draw = 6, _draw(6)
    mix, norm, space = _mixer(256, 4, draw), torch.rand(256, generator=draw) + 0.5, _workspace(tokens, 256)
    ids = torch.arange(tokens, dtype=torch.int64)
    x, post, comb = (
        _poison(tokens, 4, 256),
        torch.rand(tokens, 4, generator=draw),
        torch.rand(tokens, 16, generator=draw),
    )
    kernels.embed_mix(ids, torch.randn(tokens, 256, generator=draw).bfloat16(), x, mix, space)
    kernels.post_mix(x, x, post, comb, mix, space, torch.randn(tokens, 256, generator=draw).bfloat16(), None, None)
    rows = torch.tensor([4, 1, 5], dtype=torch.int32)
    got, want = _poison(3, 256), _poison(3, 256)
    kernels.head_norm(x, mix, space, norm, RULES, rows, got)
    ref.head_norm(x, mix, norm, RULES, rows, want)
    _close(got, want)
    assert mix.outputs == mixer.STREAMS
