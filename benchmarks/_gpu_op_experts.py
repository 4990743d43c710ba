"""FP4 experts: whole, product by product, and tiles to try at few tokens and at prefill sizes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_op import (
    BANDWIDTH,
    BF16_PEAK,
    EXPERT_BYTES,
    EXPERTS,
    FP8_PEAK,
    INNER,
    Bench,
    D,
    K,
)

OWN_FROM = 256
"""Tokens from which our own product is tried."""


def experts(bench: Bench, tokens: Sequence[int], *, checks: Sequence[int] = (1, 8, 64, 1024, 4096)) -> None:
    """FP4 experts: sort, both products and the middle, for each candidate; the winner is marked in the metrics."""
    if bench.warming:
        return
    from worker_svc.ops.expert_sort import allocate, sort_slots
    from worker_svc.ops.fp4_experts import PackedExperts, load_experts
    from worker_svc.ops.quant_fp8 import quantise_rows

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=bench.device)

    def scales(*shape: int) -> Tensor:
        return torch.randint(118, 122, shape, dtype=torch.uint8, device=bench.device)

    packed = PackedExperts(
        codes(EXPERTS, 2 * INNER, D // 2),
        scales(EXPERTS, 2 * INNER, D // 32),
        codes(EXPERTS, D, INNER // 2),
        scales(EXPERTS, D, INNER // 32),
    )
    winners: dict[int, tuple[float, str]] = {}
    candidates = (("w4a8", "humming", "fp8"), ("w4a8_own", "humming", "fp8"), ("w4a16", "humming", "bf16"))
    for label, backend, activation in candidates:
        started = time.perf_counter()
        try:
            layer: Any = load_experts(packed, limit=10.0, backend=backend, activation=activation)  # type: ignore[arg-type]
        except ImportError as error:
            print(f"{backend} {label}: {error}")
            continue
        layer._large = label == "w4a8_own" and layer._up.readable and layer._down.readable
        layer.own_from = 0
        if label == "w4a8_own" and not layer._large:
            print(f"{label}: cannot run here")
            continue
        torch.cuda.synchronize()
        print(f"{backend} {label}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
        started = time.perf_counter()
        compiled = layer.prepare(tokens, K)
        bench.metrics[f"experts_{label}_compile_s"] = round(time.perf_counter() - started, 1)
        print(f"  {compiled} kernels compiled in {time.perf_counter() - started:.1f} s", flush=True)
        oracle = load_experts(packed, limit=10.0, backend="torch", activation=activation)  # type: ignore[arg-type]
        for t in tokens:
            if label == "w4a8_own" and t < OWN_FROM:
                continue
            plan = layer.plan(t, K)
            rounds = 6 if t <= 64 else 3 if t <= 256 else 1
            calls: list[Callable[[], object]] = []
            ups: list[Callable[[], object]] = []
            downs: list[Callable[[], object]] = []
            touched = 0
            for _ in range(rounds):
                ids = torch.rand(t, EXPERTS, device=bench.device).topk(K, 1).indices.int().contiguous()
                touched += len(set(ids.flatten().tolist()))
                x = torch.randn(t, D, device=bench.device, dtype=torch.bfloat16)
                weights = torch.rand(t, K, device=bench.device) + 0.1
                scale = None
                if activation == "fp8":
                    x8, scale = x.to(torch.float8_e4m3fn), torch.empty(t, D // 128, device=bench.device)
                    quantise_rows(x, x8, scale)
                    x = x8
                calls.append(partial(layer.run, plan, x, scale, ids, weights))
                order = allocate(t, K, EXPERTS, plan.block, bench.device)
                sort_slots(ids, order)
                hidden = torch.empty(t * K, 2 * INNER, dtype=torch.bfloat16, device=bench.device)
                ups.append(_product(layer._up, plan.up, x, scale, order, K, hidden))
                inner = torch.randn(t * K, INNER, device=bench.device, dtype=torch.bfloat16)
                inner_scale = None
                if activation == "fp8":
                    inner8 = torch.empty_like(inner, dtype=torch.float8_e4m3fn)
                    inner_scale = torch.empty(t * K, INNER // 128, device=bench.device)
                    quantise_rows(inner, inner8, inner_scale)
                    inner = inner8
                out = torch.empty(t * K, D, dtype=torch.bfloat16, device=bench.device)
                downs.append(_product(layer._down, plan.down, inner, inner_scale, order, 1, out))
            started = time.perf_counter()
            got = layer.run(plan, x, scale, ids, weights)
            torch.cuda.synchronize()
            jit = time.perf_counter() - started
            if t in checks:
                _check_products(bench, f"experts_{label}_{t}", packed, layer, plan, x, scale, ids, order)
                bench.check(f"experts_{label}_{t}_whole", got, oracle.run(oracle.plan(t, K), x, scale, ids, weights))
            moved = touched / rounds * EXPERT_BYTES
            flops, peak = 6.0 * t * K * D * INNER, FP8_PEAK if activation == "fp8" else BF16_PEAK
            micros = bench.time(calls, 5)
            bench.record(f"experts_{label}_{t}", micros, moved, flops, peak)
            bench.record(f"experts_{label}_{t}_w13", bench.time(ups, 5), moved * 2 / 3, flops * 2 / 3, peak)
            bench.record(f"experts_{label}_{t}_w2", bench.time(downs, 5), moved / 3, flops / 3, peak)
            print(f"  {touched / rounds:.0f} experts, block {plan.block}, first call {jit:.1f} s", flush=True)
            bench.metrics[f"experts_{label}_{t}_touched"] = round(touched / rounds, 1)
            winners[t] = min(winners.get(t, (math.inf, "")), (micros, label))
        calls, ups, downs = [], [], []
        del layer
        torch.cuda.empty_cache()
    for t, (micros, name) in winners.items():
        bench.metrics[f"experts_winner_{t}"] = f"{name} {micros:.1f} us"


def _product(
    product: Any, tile: str, x: Tensor, scale: Tensor | None, order: Any, k: int, out: Tensor
) -> Callable[[], object]:
    """One grouped product to call; our own gets its rows with one scale each, made beforehand."""
    from worker_svc.ops.fp4_experts import row_scales
    from worker_svc.ops.fp4_experts.humming import LARGE

    if tile != LARGE or scale is None:
        return partial(product, x, scale, order, k, tile, out)
    rows, row_scale = torch.empty_like(x), torch.empty(len(x), device=x.device)
    row_scales.fold(x, scale, rows, row_scale)
    return partial(product.many, rows, row_scale, order, k, out)


def _check_products(
    bench: Bench,
    name: str,
    packed: Any,
    layer: Any,
    plan: Any,
    x: Tensor,
    scale: Tensor | None,
    ids: Tensor,
    order: Any,
) -> None:
    """Each product alone, on the very inputs it gets: what lies between them rounds twice, and a whole run compared
    with another one measures how often those roundings fall apart."""
    from worker_svc.ops import quant_fp4

    t = len(x)
    hidden = torch.full((t * K, 2 * INNER), float("nan"), dtype=torch.bfloat16, device=bench.device)
    _product(layer._up, plan.up, x, scale, order, K, hidden)()
    exact = x.float() if scale is None else x.float() * scale.repeat_interleave(128, 1)
    inner = hidden[:, :INNER].contiguous()
    inner_scale = None
    if scale is not None:
        from worker_svc.ops.quant_fp8 import quantise_rows

        codes = torch.empty(t * K, INNER, dtype=torch.float8_e4m3fn, device=bench.device)
        inner_scale = torch.empty(t * K, INNER // 128, device=bench.device)
        quantise_rows(inner, codes, inner_scale)
        inner = codes
    out = torch.full((t * K, D), float("nan"), dtype=torch.bfloat16, device=bench.device)
    _product(layer._down, plan.down, inner, inner_scale, order, 1, out)()
    exact_inner = inner.float() if inner_scale is None else inner.float() * inner_scale.repeat_interleave(128, 1)
    flat = ids.flatten().long()
    truths = torch.empty_like(hidden, dtype=torch.float32), torch.empty_like(out, dtype=torch.float32)
    for expert in sorted(set(flat.tolist())):
        mine = (flat == expert).nonzero().flatten()
        truths[0][mine] = exact[mine // K] @ quant_fp4.dequantise(packed.w13[expert], packed.w13_scale[expert]).t()
        truths[1][mine] = exact_inner[mine] @ quant_fp4.dequantise(packed.w2[expert], packed.w2_scale[expert]).t()
    bench.check(f"{name}_w13", hidden, truths[0])
    bench.check(f"{name}_w2", out, truths[1])


def expert_tiles(bench: Bench) -> None:
    """Other tiles of the FP8 expert products at few tokens."""
    if bench.warming:
        return

    from worker_svc.ops.expert_sort import allocate, sort_slots
    from worker_svc.ops.fp4_experts import PackedExperts, load_experts
    from worker_svc.ops.quant_fp8 import quantise_rows

    def codes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=bench.device)

    packed = PackedExperts(
        codes(0, 256, EXPERTS, 2 * INNER, D // 2),
        codes(118, 122, EXPERTS, 2 * INNER, D // 32),
        codes(0, 256, EXPERTS, D, INNER // 2),
        codes(118, 122, EXPERTS, D, INNER // 32),
    )
    layer: Any = load_experts(packed, limit=10.0, backend="humming")
    variants: dict[str, dict[str, Any]] = {
        "stream_k": {"use_stream_k": True},
        "plain": {"use_stream_k": False},
        "plain_6": {"use_stream_k": False, "num_stages": 6},
        "narrow": {"block_shape": (8, 128, 128), "warp_shape": (8, 16, 128), "use_stream_k": False, "num_stages": 6},
        "narrow_3": {
            "block_shape": (8, 128, 128),
            "warp_shape": (8, 16, 128),
            "use_stream_k": False,
            "num_stages": 6,
            "num_ctas_per_sm": 3,
        },
        "wide": {"block_shape": (8, 512, 128), "warp_shape": (8, 64, 128), "use_stream_k": False, "num_ctas_per_sm": 1},
    }
    tiles = {
        (product, json.dumps(product.tile(8, K, "fp8") | change))
        for product in (layer._up, layer._down)
        for change in variants.values()
    }
    with ThreadPoolExecutor(16) as pool:
        for work_done in [pool.submit(product.prepare, tile) for product, tile in tiles]:
            if problem := work_done.exception():
                print(f"  a tile does not compile: {str(problem)[:120]}")
    for t in (1, 2, 4, 8, 16):
        rounds = 8
        for product, columns, inner, k in ((layer._up, 2 * INNER, D, K), (layer._down, D, INNER, 1)):
            name = "w13" if k == K else "w2"
            work, touched = [], 0
            for _ in range(rounds):
                ids = torch.rand(t, EXPERTS, device=bench.device).topk(K, 1).indices.int().contiguous()
                touched += len(set(ids.flatten().tolist()))
                order = allocate(t, K, EXPERTS, 8, bench.device)
                sort_slots(ids, order)
                rows = t if k == K else t * K
                x8 = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=bench.device)
                scale = torch.empty(rows, inner // 128, device=bench.device)
                quantise_rows(torch.randn(rows, inner, device=bench.device, dtype=torch.bfloat16), x8, scale)
                out = torch.empty(t * K, columns, dtype=torch.bfloat16, device=bench.device)
                work.append((x8, scale, order, out))
            results = []
            for label, change in variants.items():
                tile = json.dumps(product.tile(8, K, "fp8") | change)
                try:
                    micros = bench.time([partial(product, x, s, o, k, tile, out) for x, s, o, out in work], 5)
                except Exception as error:  # noqa: BLE001 - a tile that does not compile is a result
                    print(f"  {name} {t} {label}: {type(error).__name__} {str(error)[:100]}")
                    continue
                results.append((micros, label))
            moved = touched / rounds * columns * inner * (1 / 2 + 1 / 32)
            line = ", ".join(f"{label} {micros:.1f}" for micros, label in sorted(results))
            print(f"{name} {t} tokens, floor {moved / BANDWIDTH * 1e6:.1f} us: {line}", flush=True)
            bench.metrics[f"tiles_{name}_{t}"] = line
    _prefill_tiles(bench, layer)


def _prefill_tiles(bench: Bench, layer: Any) -> None:
    """Other tiles of the FP8 expert products at prefill sizes."""

    from worker_svc.ops.expert_sort import allocate, sort_slots
    from worker_svc.ops.quant_fp8 import quantise_rows

    changes = [
        {"block_shape": (m, n, 128), "warp_shape": (m, n // 8, 128), "num_stages": stages}
        for m in (96, 112, 128, 144, 160, 192, 224)
        for n in (128, 256)
        for stages in (3, 4)
    ]
    product: Any
    with ThreadPoolExecutor(16) as pool:
        base = {product: product.tile(4096, K, "fp8") for product in (layer._up, layer._down)}
        jobs = {(p, str(c)): pool.submit(p.prepare, json.dumps(base[p] | c)) for p in base for c in changes}
        fine = {key for key, job in jobs.items() if job.exception() is None}
    print(f"{len(fine)} of {len(jobs)} prefill tiles compile", flush=True)
    for t in (4096, 16384):
        ids = torch.rand(t, EXPERTS, device=bench.device).topk(K, 1).indices.int().contiguous()
        for product, columns, inner, k in ((layer._up, 2 * INNER, D, K), (layer._down, D, INNER, 1)):
            rows = t if k == K else t * K
            x8 = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=bench.device)
            scale = torch.empty(rows, inner // 128, device=bench.device)
            quantise_rows(torch.randn(rows, inner, device=bench.device, dtype=torch.bfloat16), x8, scale)
            out = torch.empty(t * K, columns, dtype=torch.bfloat16, device=bench.device)
            results = []
            for change in [{}, *changes]:
                if change and (product, str(change)) not in fine:
                    continue
                tile = (base[product] if change else product.tile(t, K, "fp8")) | change
                order = allocate(t, K, EXPERTS, tile["block_shape"][0], bench.device)
                sort_slots(ids, order)
                try:
                    micros = bench.time([partial(product, x8, scale, order, k, json.dumps(tile), out)], 5)
                except Exception as error:  # noqa: BLE001 - a tile that does not run is a result
                    print(f"  {change}: {type(error).__name__}")
                    continue
                label = f"{tile['block_shape']} x{tile['num_stages']}" if change else f"default {tile['block_shape']}"
                results.append((micros, label))
            name = "w13" if k == K else "w2"
            line = "; ".join(f"{label} {micros:.0f}" for micros, label in sorted(results)[:5])
            usual = next(micros for micros, label in results if label.startswith("default"))
            print(f"prefill {name} {t} tokens, default {usual:.0f} us: {line}", flush=True)
            bench.metrics[f"prefill_tiles_{name}_{t}"] = line
