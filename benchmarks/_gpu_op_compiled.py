"""Glue as torch.compile makes it, beside torch as it is and our kernels: what `--enable-torch-compile` could win here.

Each piece is the plain torch of its reference: the boundary between two layers (both mixes, Sinkhorn, RMSNorm, FP8),
what lies between the experts' products, the router's choice, row quantisation. All three run in CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks._gpu_op import EXPERTS, INNER, Bench, D, K

SIZES = (1, 64, 4096)
Call = Callable[[], object]


def compiled(bench: Bench) -> None:
    """Microseconds by piece and tokens, and how much faster ours is than the compiled one."""
    for tokens in SIZES:
        for name, ours, plain in _pieces(bench, tokens):
            mine = bench.time([ours] * 10)
            bench.record(f"{name}_{tokens}_ours", mine)
            if bench.warming:
                continue
            began = time.perf_counter()
            fused: Call = torch.compile(plain, dynamic=False)
            fused()
            seconds = time.perf_counter() - began
            eager, joined = bench.time([plain] * 10), bench.time([fused] * 10)
            bench.record(f"{name}_{tokens}_torch", eager)
            bench.record(f"{name}_{tokens}_compiled", joined)
            bench.metrics[f"{name}_{tokens}_compile_s"] = round(seconds, 1)
            bench.metrics[f"{name}_{tokens}_ours_vs_compiled"] = round(joined / mine, 2)
            print(f"{name} {tokens}: ours {joined / mine:.2f} x as fast as compiled ({seconds:.1f} s)", flush=True)


def _pieces(bench: Bench, tokens: int) -> Iterator[tuple[str, Call, Call]]:
    """Name, our kernel's call, the same in torch."""
    yield _boundary(bench, tokens)
    yield _middle(bench, tokens)
    yield _choice(bench, tokens)
    yield _rows(bench, tokens)


def _boundary(bench: Bench, t: int) -> tuple[str, Call, Call]:
    from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer, triton
    from worker_svc.ops.hyper_mix.ref import collapse, expand, mix_weights
    from worker_svc.ops.quant_fp8 import quantise, scale_value

    rules = BoundaryRules(20, 1e-6, 1e-6)
    shapes = ((24, 4 * D), (3,), (24,))
    mixer = prepare_mixer(*(bench.randn(*shape, dtype=torch.float32, scale=0.01) for shape in shapes))
    space = Workspace(t, D, "meta" if bench.warming else bench.device)
    if bench.warming:
        space.partials = torch.empty(space.partials.numel())
    x, new, o = bench.randn(t, 4, D), bench.empty(t, 4, D), bench.randn(t, D)
    post, comb = (bench.randn(t, n, dtype=torch.float32).sigmoid() for n in (4, 16))
    norm, y = bench.randn(D, dtype=torch.float32), bench.empty(t, D)
    post2, comb2 = bench.empty(t, 4, dtype=torch.float32), bench.empty(t, 16, dtype=torch.float32)
    q = bench.empty(t, D, dtype=torch.float8_e4m3fn)
    sf = bench.empty(D // 128, -(-t // 4) * 4, dtype=torch.float32).t()[:t]

    def ours() -> None:
        triton.post_mix(x, new, post, comb, mixer, space, o, None, None)
        triton.pre_norm(new, mixer, space, norm, rules, y, post2, comb2, q, sf, None)

    scale = torch.cat([part.expand(n) for part, n in zip(mixer.scale.unbind(), (4, 4, 16))]).contiguous()
    weight = mixer.fn.float().t().contiguous()

    def plain() -> tuple[Tensor, ...]:
        streams = expand(o.float(), x.float(), post, comb.view(-1, 4, 4)).bfloat16()
        flat = streams.flatten(1).float()
        mixes = flat @ weight * _rms(flat) * scale + mixer.base
        pre, after, between = mix_weights(mixes, 4, rules.iterations, rules.eps)
        joined = collapse(streams.float(), pre).bfloat16().float()
        normed = (joined * _rms(joined) * norm).bfloat16()
        codes, exponent = quantise(normed.float(), 128)
        return streams, normed, after, between, codes, scale_value(exponent)

    return "boundary", ours, plain


def _rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _middle(bench: Bench, t: int) -> tuple[str, Call, Call]:
    from worker_svc.ops.quant_fp8 import quantise, scale_value
    from worker_svc.ops.swiglu_experts import Hidden, triton

    rows = t * K
    hidden, weights = bench.randn(rows, 2 * INNER, scale=3.0), bench.randn(rows, dtype=torch.float32)
    codes = bench.empty(rows, INNER, dtype=torch.float8_e4m3fn)
    stack = Hidden(hidden, codes, bench.empty(rows, INNER // 128, dtype=torch.float32), weights)

    def plain() -> tuple[Tensor, Tensor]:
        gate, up = hidden.float().chunk(2, -1)
        gate = gate.clamp(max=10.0)
        inner = gate * torch.sigmoid(gate) * up.clamp(-10.0, 10.0)
        found, exponent = quantise((inner * weights.unsqueeze(1)).bfloat16().float(), 128)
        return found, scale_value(exponent)

    return "middle", partial(triton.middle, stack, None, 10.0), plain


def _choice(bench: Bench, t: int) -> tuple[str, Call, Call]:
    from worker_svc.ops.topk_gate import triton

    logits, bias = bench.randn(t, EXPERTS, dtype=torch.float32), bench.randn(EXPERTS, dtype=torch.float32)
    ids, weights = bench.empty(t, K, dtype=torch.int32), bench.empty(t, K, dtype=torch.float32)

    def plain() -> tuple[Tensor, Tensor]:
        scores = torch.nn.functional.softplus(logits).sqrt()
        chosen = torch.topk(scores + bias, K, dim=-1).indices
        picked = scores.gather(1, chosen)
        return chosen.int(), picked / picked.sum(-1, keepdim=True) * 1.5

    return "router", partial(triton.select, logits, bias, ids, weights, 1.5, None), plain


def _rows(bench: Bench, t: int) -> tuple[str, Call, Call]:
    from worker_svc.ops.quant_fp8 import quantise, scale_value, triton

    x, codes = bench.randn(t, 8192), bench.empty(t, 8192, dtype=torch.float8_e4m3fn)
    scale = bench.empty(64, -(-t // 4) * 4, dtype=torch.float32).t()[:t]

    def plain() -> tuple[Tensor, Tensor]:
        found, exponent = quantise(x.float(), 128)
        return found, scale_value(exponent)

    return "quantisation", partial(triton.quantise_rows, x, codes, scale), plain
