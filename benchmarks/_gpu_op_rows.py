"""Kernels that work on rows: the mHC boundary, routing, expert sort, middle, quantisation, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks._gpu_op import (
    EXPERTS,
    INNER,
    VOCAB,
    Bench,
    D,
    K,
)


def boundary(bench: Bench, tokens: Sequence[int]) -> None:
    """Both passes, in all forms."""
    from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer, ref, triton
    from worker_svc.ops.quant_fp8 import quantise, scale_value

    rules = BoundaryRules(20, 1e-6, 1e-6)
    mixer = prepare_mixer(
        bench.randn(24, 4 * D, dtype=torch.float32, scale=0.01),
        bench.randn(3, dtype=torch.float32) * 0 + 1,
        bench.randn(24, dtype=torch.float32),
    )
    for t in tokens:
        space = Workspace(t, D, "meta" if bench.warming else bench.device)
        if bench.warming:
            space.partials = torch.empty(space.partials.numel())
        x, o = bench.randn(t, 4, D), bench.randn(t, D)
        rows = bench.randn(t * K, D)
        post, comb = (bench.randn(t, n, dtype=torch.float32).sigmoid() for n in (4, 16))
        new, y = bench.empty(t, 4, D), bench.empty(t, D)
        norm = bench.randn(D, dtype=torch.float32) + 1
        q, sf2 = bench.empty(t, D, dtype=torch.float8_e4m3fn), bench.empty(t, D // 128, dtype=torch.float32)
        sf = bench.empty(D // 128, -(-t // 4) * 4, dtype=torch.float32).t()[:t]
        post2, comb2 = bench.empty(t, 4, dtype=torch.float32), bench.empty(t, 16, dtype=torch.float32)

        into = (x, new, post, comb, mixer, space)
        after = partial(triton.post_mix, *into, o, None, None)
        combine = partial(triton.post_mix, *into, None, rows, o)
        norms = partial(triton.pre_norm, new, mixer, space, norm, rules, y, post2, comb2, q, sf, sf2)
        for call, name, extra in ((after, "post", 1), (combine, "combine", K + 1)):
            micros = bench.time([call] * 20)
            bench.record(f"mhc_{name}_{t}", micros, t * D * 2 * (8 + extra) + 2 * 24 * 4 * D * 2)
            if not bench.warming and t <= 1024:
                truth = torch.empty_like(x)
                ref.post_mix(x, truth, post, comb, *((o, None, None) if name == "post" else (None, rows, o)))
                bench.check(f"mhc_{name}_{t}", new, truth)
        bench.record(f"mhc_norm_{t}", bench.time([norms] * 20), t * D * (8 + 2 + 1))
        if not bench.warming and t <= 1024:
            truths = [torch.empty_like(a) for a in (y, post2, comb2, q, sf, sf2)]
            ref.pre_norm(new, mixer, norm, rules, *truths)
            for name, got, truth in zip(("y", "post", "comb"), (y, post2, comb2), truths):
                bench.check(f"mhc_{name}_{t}", got, truth)
            codes, exponent = quantise(y.float(), 128)
            same = torch.equal(codes.view(torch.uint8), q.view(torch.uint8))
            bench.exact(f"mhc_fp8_of_own_y_{t}", same and torch.equal(scale_value(exponent), sf))
            back = q.float() * sf.repeat_interleave(128, 1)
            bench.check(f"mhc_fp8_{t}", back, truths[3].float() * truths[4].repeat_interleave(128, 1))


CUTS_MANY = (
    (64, 32, 4, 3, 0),
    (64, 32, 8, 1, 128),
    (64, 32, 8, 2, 0),
    (64, 32, 8, 2, 128),
    (64, 32, 8, 3, 128),
    (64, 64, 8, 2, 0),
    (128, 32, 8, 2, 0),
    (32, 32, 4, 2, 0),
    (32, 32, 4, 3, 0),
    (32, 64, 8, 1, 0),
    (32, 64, 8, 2, 0),
    (16, 64, 4, 2, 0),
    (16, 128, 8, 2, 0),
)
"""Tokens and channels of a tile, warps, stages, registers."""
CUTS_FEW = ((16, 64, 4, 2, 0), (16, 64, 4, 3, 0), (16, 128, 8, 2, 0), (32, 64, 8, 2, 0), (32, 32, 4, 2, 0))


def boundary_cuts(bench: Bench, sizes: Sequence[int] = (256, 1024, 4096, 16384)) -> None:
    """Other ways to cut a boundary at many tokens: microseconds of both passes, after attention and after experts."""
    from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer, triton

    mixer = prepare_mixer(
        *(bench.randn(*shape, dtype=torch.float32, scale=0.01) for shape in ((24, 4 * D), (3,), (24,)))
    )
    rules, norm, usual = BoundaryRules(20, 1e-6, 1e-6), bench.randn(D, dtype=torch.float32), triton.split
    for t in sizes:
        space = Workspace(max(t, 2048), D, "meta" if bench.warming else bench.device)
        if bench.warming:
            space.partials = torch.empty(space.partials.numel())
        x, new, o, rows = bench.randn(t, 4, D), bench.empty(t, 4, D), bench.randn(t, D), bench.randn(t * K, D)
        post, comb = (bench.randn(t, n, dtype=torch.float32).sigmoid() for n in (4, 16))
        y, q = bench.empty(t, D), bench.empty(t, D, dtype=torch.float8_e4m3fn)
        sf = bench.empty(D // 128, -(-t // 4) * 4, dtype=torch.float32).t()[:t]
        into = (x, new, post, comb, mixer, space)
        calls = (
            partial(triton.post_mix, *into, o, None, None),
            partial(triton.post_mix, *into, None, rows, o),
            partial(triton.pre_norm, new, mixer, space, norm, rules, y, post, comb, q, sf, None),
        )
        results = []
        cuts = [
            triton.Split(tokens, channels, D // channels // parts, parts, warps, stages, registers)
            for tokens, channels, warps, stages, registers in (CUTS_FEW if t <= 1024 else CUTS_MANY)
            for parts in ((8, 16) if t <= 1024 else (2, 4))
        ]
        cuts += [triton.Split(16, 128, 1, D // 128, 4)] * (t <= 256)
        for cut in [usual(t, D), *cuts]:
            triton.split = partial(lambda chosen, tokens, width: chosen, cut)
            try:
                micros = [bench.time([call] * 8, 5) for call in calls]
            except Exception as error:  # noqa: BLE001 - a cut that does not fit is a result
                print(f"  {cut}: {type(error).__name__}")
                continue
            results.append((sum(micros), " + ".join(f"{m:.1f}" for m in micros), str(cut)))
        triton.split = usual
        if not bench.warming:
            print(f"boundary {t} now: {results[0]}", flush=True)
            for total, each, cut_name in sorted(results)[:4]:
                print(f"   {total:.1f} = {each} {cut_name}", flush=True)
            best = min(results)
            bench.metrics[f"cuts_{t}"] = f"{best[0]:.1f} = {best[1]} {best[2]}"


def routing(bench: Bench, tokens: Sequence[int]) -> None:
    """Router choice, expert sort, middle, row quantisation."""
    from worker_svc.ops import expert_sort, quant_fp8, topk_gate
    from worker_svc.ops.expert_sort import ref as sort_ref
    from worker_svc.ops.expert_sort import triton as sort_kernels
    from worker_svc.ops.quant_fp8 import triton as quant_kernels
    from worker_svc.ops.swiglu_experts import Hidden
    from worker_svc.ops.swiglu_experts import ref as middle_ref
    from worker_svc.ops.swiglu_experts import triton as middle_kernels
    from worker_svc.ops.topk_gate import triton as gate_kernels

    for t in tokens:
        logits, bias = bench.randn(t, EXPERTS, dtype=torch.float32), bench.randn(EXPERTS, dtype=torch.float32) * 0.1
        ids, weights = bench.empty(t, K, dtype=torch.int32), bench.empty(t, K, dtype=torch.float32)
        bench.record(
            f"select_{t}", bench.time([partial(gate_kernels.select, logits, bias, ids, weights, 1.5, None)] * 20)
        )
        if not bench.warming:
            truth = torch.empty_like(ids), torch.empty_like(weights)
            scores = topk_gate.gate_scores(logits.clone())
            chosen = topk_gate.pick_experts(scores, bias, K)
            truth[0].copy_(chosen)
            bench.exact(f"select_{t}", bool((truth[0] == ids).float().mean() > 0.999))
            bench.check(f"select_{t}", weights, topk_gate.expert_weights(scores, ids.long(), 1.5))
        order = expert_sort.allocate(t, K, EXPERTS, 8, "cpu" if bench.warming else bench.device)
        fields = (order.slots, order.experts, order.num_padded, order.layout)
        bench.record(f"sort_{t}", bench.time([partial(sort_kernels.sort_slots, ids, *fields, order.counts, 8)] * 20))
        if not bench.warming:
            cpu = expert_sort.allocate(t, K, EXPERTS, 8, "cpu")
            sort_ref.sort_slots(ids.cpu(), cpu.slots, cpu.experts, cpu.num_padded, cpu.layout, 8)
            end = int(cpu.num_padded)
            same = torch.equal(order.slots[:end].cpu(), cpu.slots[:end]) and torch.equal(order.layout.cpu(), cpu.layout)
            bench.exact(f"sort_{t}", same and torch.equal(order.experts[: end // 8].cpu(), cpu.experts[: end // 8]))
        rows = t * K
        hidden, shared = bench.randn(rows, 2 * INNER, scale=3.0), bench.randn(t, 2 * INNER, scale=3.0)
        stacks = [
            Hidden(
                h,
                bench.empty(len(h), INNER, dtype=torch.float8_e4m3fn),
                bench.empty(len(h), 16, dtype=torch.float32),
                w,
            )
            for h, w in ((hidden, weights.view(-1)), (shared, None))
        ]
        micros = bench.time([partial(middle_kernels.middle, stacks[0], stacks[1], 10.0)] * 20)
        bench.record(f"middle_{t}", micros, (rows + t) * INNER * 5)
        if not bench.warming:
            for name, stack in zip(("routed", "shared"), stacks):
                truth_codes, truth_scale = torch.empty_like(stack.codes), torch.empty_like(stack.scale)
                middle_ref.middle(stack.hidden, truth_codes, truth_scale, stack.weights, 10.0)
                got = stack.codes.float() * stack.scale.repeat_interleave(128, 1)
                bench.check(f"middle_{name}_{t}", got, truth_codes.float() * truth_scale.repeat_interleave(128, 1))
        x, codes = bench.randn(t, 8192), bench.empty(t, 8192, dtype=torch.float8_e4m3fn)
        scale = bench.empty(64, -(-t // 4) * 4, dtype=torch.float32).t()[:t]
        bench.record(
            f"quant_{t}", bench.time([partial(quant_kernels.quantise_rows, x, codes, scale)] * 20), t * 8192 * 3
        )
        if not bench.warming:
            want, exponent = quant_fp8.quantise(x, 128)
            same = torch.equal(want.view(torch.uint8), codes.view(torch.uint8))
            bench.exact(f"quant_{t}", same and torch.equal(scale, quant_fp8.scale_value(exponent)))


def sampling(bench: Bench, rows: Sequence[int]) -> None:
    """Greedy, plain temperature, top-k + top-p; tokens against the host's sampler."""
    from worker_svc.ops.sample import Params, ref, triton

    for n in rows:
        logits = bench.randn(n, VOCAB, dtype=torch.float32, scale=3.0)

        def ints(n: int = n) -> Tensor:
            if bench.warming:
                return torch.empty(n, dtype=torch.int32)
            return torch.randint(-(2**31), 2**31 - 1, (n,), device=bench.device).int()

        for name, (temperature, top_k, top_p) in {
            "greedy": (0.0, 0, 1.0),
            "plain": (1.0, 0, 1.0),
            "top": (0.8, 50, 0.95),
            "nucleus": (0.25, 0, 0.95),
            "flat_nucleus": (0.8, 0, 0.95),
        }.items():
            device = logits.device
            params = Params(
                torch.full((n,), temperature, device=device),
                torch.full((n,), top_k, dtype=torch.int32, device=device),
                torch.full((n,), top_p, device=device),
                torch.zeros(n, device=device),
                ints(),
                ints(),
                ints(),
                ints(),
            )
            tokens, faults = bench.empty(n, dtype=torch.int32), bench.empty(n, dtype=torch.int32)
            call = partial(triton.sample, logits, params, tokens, faults, 1, None, None)
            bench.record(f"sample_{name}_{n}", bench.time([call] * 5), n * VOCAB * 4)
            if not bench.warming:
                some = min(n, 16)
                host = Params(*(getattr(params, f)[:some].cpu() for f in Params.__slots__))
                want, fault = torch.empty(some, dtype=torch.int32), torch.empty(some, dtype=torch.int32)
                ref.sample(logits[:some].cpu(), host, want, fault, 1, None, None)
                bench.exact(f"sample_{name}_{n}", torch.equal(want, tokens[:some].cpu()))
