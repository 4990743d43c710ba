"""The GPU forward's kernels one by one on this GPU: right against torch, and how fast against the memory's floor.

Covers the mHC boundary, routing, expert sort, middle, row quantisation, skinny products, FP4 experts and sampling.
Each time is a median of replays of a CUDA graph that holds fresh inputs and enough weights to miss the L2 cache.
Kernels are compiled beforehand by as many processes as there are cores. `--tune` tries tiles beside the built-in ones.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

TITLE = "GPU kernels one by one: error against torch, microseconds, fraction of the floor (needs a GPU)"

BANDWIDTH, FP8_PEAK, BF16_PEAK = 4.3e12, 1.58e15, 7.9e14  # one H200: bytes/s read + written, FLOP/s
D, INNER, EXPERTS, K, VOCAB = 4096, 2048, 256, 6, 129280
EXPERT_BYTES = 3 * D * INNER // 2 + 3 * D * INNER // 32
L2_BYTES = 200 << 20
SKINNY = {  # name: groups, columns, inner (FP8)
    "wq_a_wkv": (1, 1536, 4096),
    "wq_b": (1, 32768, 1024),
    "wq_b_index": (1, 40960, 1024),
    "wo_a": (8, 1024, 4096),
    "wo_b": (1, 4096, 8192),
    "shared_w13": (1, 4096, 4096),
    "shared_w2": (1, 4096, 2048),
}
SKINNY_BF16 = {"compress_c4": 2624, "compress_c128": 1024, "router": 256, "head": VOCAB}
ROWS = (1, 8, 16, 32, 64)
TOKENS = (1, 8, 32, 64, 256, 1024, 4096, 16384)


@dataclass
class Bench:
    """Where tensors live, and what was measured. On the CPU everything is empty and launches only compile."""

    device: str
    seed: int = 0
    metrics: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def warming(self) -> bool:
        """True while kernels are only compiled."""
        return self.device == "cpu"

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Fresh normal numbers."""
        if self.warming:
            return torch.empty(shape, dtype=dtype)
        return (torch.randn(shape, device=self.device, dtype=torch.float32) * scale).to(dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Poisoned room for a result."""
        if self.warming:
            return torch.empty(shape, dtype=dtype)
        poison = torch.full(shape, 255, dtype=torch.uint8, device=self.device)
        if dtype.itemsize > 1:
            poison = poison.repeat_interleave(dtype.itemsize, -1)
        return poison.view(dtype)

    def codes(self, *shape: int) -> Tensor:
        """FP8 numbers as weights and activations are distributed."""
        return self.randn(*shape, scale=40.0).to(torch.float8_e4m3fn)

    def time(self, calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
        """Median microseconds of one call, from replays of a graph of all of them. Warming: runs them once, 0."""
        for call in calls[:1] if self.warming else calls:
            call()
        if self.warming:
            return 0.0
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        times: list[float] = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
        return sorted(times)[len(times) // 2]

    def record(self, name: str, micros: float, moved: float = 0.0, flops: float = 0.0, peak: float = FP8_PEAK) -> None:
        """One line of the table."""
        if self.warming:
            return
        floor = max(moved / BANDWIDTH, flops / peak) * 1e6
        line = f"{name:44} {micros:9.1f} us"
        self.metrics[f"{name}_us"] = round(micros, 2)
        if moved:
            self.metrics[f"{name}_tb_s"] = round(moved / micros / 1e6, 3)
            self.metrics[f"{name}_of_floor"] = round(floor / micros, 3)
            line += f"  {moved / micros / 1e6:5.2f} TB/s  {floor / micros:5.2f} of floor"
        if flops:
            line += f"  {flops / micros / 1e6:6.0f} TFLOP/s"
            self.metrics[f"{name}_tflops"] = round(flops / micros / 1e6, 1)
        print(line, flush=True)

    def check(self, name: str, got: Tensor, truth: Tensor) -> None:
        """Relative Frobenius error; the result was poisoned, so NaN means something was not written."""
        if self.warming:
            return
        error = float((got.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
        self.metrics[f"error_{name}"] = round(error, 6) if math.isfinite(error) else "NaN"
        mark = "" if error <= 2e-3 else "  <-- above 2e-3"
        print(f"error {name:38} {error:.6f}{mark}", flush=True)

    def exact(self, name: str, same: bool) -> None:
        """A result that has to be equal bit for bit."""
        if not self.warming:
            self.metrics[f"exact_{name}"] = int(same)
            print(f"exact {name:38} {'yes' if same else 'NO'}", flush=True)


# The mHC boundary


def boundary(bench: Bench, tokens: Sequence[int]) -> None:
    """Both passes, in all forms."""
    from worker_svc.ops.hyper_boundary import BoundaryRules, Workspace, prepare_mixer, ref, triton

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
            back = q.float() * sf.repeat_interleave(128, 1)
            bench.check(f"mhc_fp8_{t}", back, truths[3].float() * truths[4].repeat_interleave(128, 1))


def boundary_cuts(bench: Bench) -> None:
    """Other ways to cut pass 1 at many tokens."""
    from worker_svc.ops.hyper_boundary import Workspace, prepare_mixer, triton

    mixer = prepare_mixer(
        *(bench.randn(*shape, dtype=torch.float32, scale=0.01) for shape in ((24, 4 * D), (3,), (24,)))
    )
    for t in (256, 1024, 4096):
        space = Workspace(t, D, "meta" if bench.warming else bench.device)
        if bench.warming:
            space.partials = torch.empty(space.partials.numel())
        x, new, o = bench.randn(t, 4, D), bench.empty(t, 4, D), bench.randn(t, D)
        post, comb = (bench.randn(t, n, dtype=torch.float32).sigmoid() for n in (4, 16))
        results, usual = [], triton.split
        for rows, channels, warps in ((16, 64, 4), (16, 128, 8), (32, 64, 8), (64, 32, 4), (64, 32, 8), (64, 64, 8)):
            for parts in (2, 4, 8):
                for stages in (1, 2):
                    if t // rows * parts < 128 or (stages == 2 and parts == 8):
                        continue
                    cut = triton.Split(rows, channels, D // channels // parts, parts, warps, stages)
                    triton.split = partial(lambda chosen, tokens, width: chosen, cut)
                    call = partial(triton.post_mix, x, new, post, comb, mixer, space, o, None, None)
                    try:
                        results.append((bench.time([call] * 10, 5), str(cut)))
                    except Exception as error:  # noqa: BLE001 - a cut that does not fit is a result
                        print(f"  {cut}: {type(error).__name__}")
        triton.split = usual
        if not bench.warming:
            best = sorted(results)[:5]
            print(f"mhc_post {t}: " + "; ".join(f"{micros:.1f} {cut}" for micros, cut in best), flush=True)
            bench.metrics[f"cuts_{t}"] = f"{best[0][0]:.1f} {best[0][1]}"


# Routing and the middle


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


# Skinny products


def skinny(bench: Bench, rows: Sequence[int], *, tune: bool) -> None:
    """FP8 and BF16 products of few rows, DeepGEMM and cuBLAS beside them."""
    from worker_svc.ops.skinny_gemm import ref
    from worker_svc.ops.skinny_gemm import triton as kernels

    for name, (groups, columns, inner) in SKINNY.items():
        if tune and name == "wq_b":
            continue  # as wq_b_index
        size = groups * columns * inner
        copies = max(1, min(32, L2_BYTES // size)) if not bench.warming else 1
        weights = [bench.codes(groups, columns, inner) for _ in range(copies)]
        scale = bench.randn(groups, columns // 128, inner // 128, dtype=torch.float32).abs() + 0.1
        for m in rows:
            x = bench.codes(m, groups, inner)
            sx = bench.empty(groups, inner // 128, -(-m // 4) * 4, dtype=torch.float32).permute(2, 0, 1)[:m]
            if not bench.warming:
                sx.copy_(torch.rand(sx.shape, device=bench.device) + 0.1)
            out = bench.empty(m, groups, columns)
            tiles = [kernels.tile_fp8(m, columns * groups, inner)]
            if tune:
                tiles += [t for t in _fp8_tiles(m, columns, inner) if t not in tiles]
            best: tuple[float, Any] = (math.inf, None)
            for i, tile in enumerate(tiles):
                calls = [partial(kernels.fp8_grouped, x, sx, w, scale, out, tile) for w in weights]
                try:
                    micros = bench.time(calls, 5)
                except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result of the search
                    print(f"  {name} {m} {tile}: {type(error).__name__}")
                    continue
                best = min(best, (micros, tile), key=lambda pair: pair[0])
                if i == 0:
                    bench.record(f"fp8_{name}_{m}", micros, size + m * groups * (inner + 2 * columns), 2.0 * m * size)
                    if not bench.warming:
                        truth = torch.empty_like(out)
                        ref.fp8_grouped(x, sx, weights[-1], scale, truth)
                        bench.check(f"fp8_{name}_{m}", out, truth)
            if tune and not bench.warming:
                print(f"  best {name} {m}: {best[0]:.1f} us {best[1]}", flush=True)
                bench.metrics[f"fp8_{name}_{m}_best_us"] = round(best[0], 2)
                bench.metrics[f"fp8_{name}_{m}_best"] = str(best[1])
            _deep_gemm(bench, name, m, weights, x, sx, scale)
    for name, columns in SKINNY_BF16.items():
        copies = max(1, min(32, L2_BYTES // (columns * D * 2))) if not bench.warming else 1
        weights = [bench.randn(columns, D) for _ in range(copies)]
        for m in rows:
            x = bench.randn(m, D)
            parts = 8 if columns <= 256 else 0
            out = bench.empty(*((parts,) if parts else ()), m, columns, dtype=torch.float32)
            tiles = [kernels.tile_bf16(m, columns, D)]
            if tune:
                tiles += [t for t in _bf16_tiles(m, columns) if t not in tiles]
            best = (math.inf, None)
            for i, tile in enumerate(tiles):
                calls = [partial(kernels.bf16, x, w, out, tile) for w in weights]
                try:
                    micros = bench.time(calls, 5)
                except Exception as error:  # noqa: BLE001 - as above
                    print(f"  {name} {m} {tile}: {type(error).__name__}")
                    continue
                best = min(best, (micros, tile), key=lambda pair: pair[0])
                if i == 0:
                    bench.record(f"bf16_{name}_{m}", micros, columns * D * 2, 2.0 * m * columns * D, BF16_PEAK)
                    if not bench.warming:
                        truth = x.float() @ weights[-1].float().t()
                        bench.check(f"bf16_{name}_{m}", out.sum(0) if parts else out, truth)
            if not bench.warming:
                if tune:
                    print(f"  best {name} {m}: {best[0]:.1f} us {best[1]}", flush=True)
                    bench.metrics[f"bf16_{name}_{m}_best"] = f"{best[0]:.1f} {best[1]}"
                result = torch.empty(m, columns, dtype=torch.float32, device=bench.device)
                micros = bench.time([partial(torch.mm, x, w.t(), out_dtype=torch.float32, out=result) for w in weights])
                bench.record(f"cublas_{name}_{m}", micros, columns * D * 2)


def _fp8_tiles(rows: int, columns: int, inner: int) -> list[Any]:
    from worker_svc.ops.skinny_gemm.triton import Tile

    shapes = ((16, 2, 512, 4), (16, 2, 512, 8), (32, 2, 512, 4), (32, 4, 512, 4), (64, 4, 256, 6), (64, 4, 512, 3))
    found = []
    for width, warps, step, stages in shapes:
        room = (width + max(8, rows)) * step * stages
        if inner % (2 * step) == 0 and room <= 200 << 10 and (rows <= 32 or warps == 4) and width <= columns:
            found.append(Tile(width, step, stages, warps))
    return found


def _bf16_tiles(rows: int, columns: int) -> list[Any]:
    from worker_svc.ops.skinny_gemm.triton import Tile

    found = []
    for width, warps, step, stages in ((16, 2, 256, 4), (16, 2, 512, 3), (16, 4, 512, 2), (32, 4, 256, 4)):
        room = (width + max(8, rows)) * step * stages * 2
        if room <= 200 << 10 and (rows <= 32 or warps == 4) and width <= columns:
            found.append(Tile(width, step, stages, warps))
    return found


def _deep_gemm(bench: Bench, name: str, rows: int, weights: list[Tensor], x: Tensor, sx: Tensor, scale: Tensor) -> None:
    """The public kernel on the same operands, where it is installed."""
    if bench.warming:
        return
    try:
        import deep_gemm  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, OSError, AssertionError, RuntimeError):
        return
    groups, columns, inner = weights[0].shape
    out = torch.empty(rows, groups, columns, dtype=torch.bfloat16, device=bench.device)
    if groups == 1:
        operands = (x[:, 0].contiguous(), torch.empty(inner // 128, -(-rows // 4) * 4, device=bench.device).t()[:rows])
        operands[1].copy_(sx[:, 0])
        calls = [partial(deep_gemm.fp8_gemm_nt, operands, (w[0], scale[0]), out[:, 0]) for w in weights]
    else:
        calls = [
            partial(deep_gemm.fp8_einsum, "bhr,hdr->bhd", (x, sx), (w, scale), out, recipe=(1, 128, 128))
            for w in weights
        ]
    bench.record(f"deepgemm_{name}_{rows}", bench.time(calls, 5), groups * columns * inner)


# Experts


def experts(bench: Bench, tokens: Sequence[int], *, checks: Sequence[int] = (1, 8, 64)) -> None:
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
    for label, backend, activation in (("w4a8", "humming", "fp8"), ("w4a16", "humming", "bf16")):
        started = time.perf_counter()
        try:
            layer: Any = load_experts(packed, limit=10.0, backend=backend, activation=activation)  # type: ignore[arg-type]
        except ImportError as error:
            print(f"{backend} {label}: {error}")
            continue
        torch.cuda.synchronize()
        print(f"{backend} {label}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
        started = time.perf_counter()
        compiled = layer.prepare(tokens, K)
        bench.metrics[f"experts_{label}_compile_s"] = round(time.perf_counter() - started, 1)
        print(f"  {compiled} kernels compiled in {time.perf_counter() - started:.1f} s", flush=True)
        oracle = load_experts(packed, limit=10.0, backend="torch", activation=activation)  # type: ignore[arg-type]
        for t in tokens:
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
                ups.append(partial(layer._up, x, scale, order, K, plan.up, hidden))
                inner = torch.randn(t * K, INNER, device=bench.device, dtype=torch.bfloat16)
                inner_scale = None
                if activation == "fp8":
                    inner8 = torch.empty_like(inner, dtype=torch.float8_e4m3fn)
                    inner_scale = torch.empty(t * K, INNER // 128, device=bench.device)
                    quantise_rows(inner, inner8, inner_scale)
                    inner = inner8
                out = torch.empty(t * K, D, dtype=torch.bfloat16, device=bench.device)
                downs.append(partial(layer._down, inner, inner_scale, order, 1, plan.down, out))
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
            winners[t] = min(winners.get(t, (math.inf, "")), (micros, f"{backend} {label}"))
        calls, ups, downs = [], [], []
        del layer
        torch.cuda.empty_cache()
    for t, (micros, name) in winners.items():
        bench.metrics[f"experts_winner_{t}"] = f"{name} {micros:.1f} us"


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
    layer._up(x, scale, order, K, plan.up, hidden)
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
    layer._down(inner, inner_scale, order, 1, plan.down, out)
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
    import json

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
    import json

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


# Sampling


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


PARTS: dict[str, Callable[[Bench, bool], None]] = {
    "boundary": lambda bench, tune: boundary(bench, (1, 8, 64, 256, 1024, 4096)),
    "routing": lambda bench, tune: routing(bench, (1, 8, 64, 256, 1024, 4096, 16384)),
    "skinny": lambda bench, tune: skinny(bench, (1,) if tune else ROWS, tune=tune),
    "experts": lambda bench, tune: experts(bench, TOKENS),
    "boundary_cuts": lambda bench, tune: boundary_cuts(bench),
    "expert_tiles": lambda bench, tune: expert_tiles(bench),
    "sampling": lambda bench, tune: sampling(bench, (1, 64, 256)),
}


def _warm(job: tuple[str, int, int, bool]) -> str:
    """Compile one part's kernels, every n-th launch of it, into the cache on disk; nothing runs."""
    import itertools

    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, unused-ignore]
    from triton.runtime import driver, jit  # type: ignore[import-untyped, unused-ignore]

    name, share, shares, tune = job
    torch.set_num_threads(1)

    class Absent:
        """A driver that names the target and nothing else."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    driver.set_active(Absent())
    launch, numbers = jit.JITFunction.run, itertools.count()

    def compile_some(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if next(numbers) % shares == share:
            return launch(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    jit.JITFunction.run = compile_some
    try:
        PARTS[name](Bench("cpu"), tune)
    except Exception as error:  # noqa: BLE001 - it will be seen again, on the GPU
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def run(args: list[str]) -> dict[str, float | int | str]:
    """Check and time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_ops", description=TITLE)
    parser.add_argument(
        "--parts", default=",".join(p for p in PARTS if p != "expert_tiles"), help=f"which of {', '.join(PARTS)}"
    )
    parser.add_argument("--tune", action="store_true", help="also try other tiles of the skinny products")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="that compile beforehand")
    options = parser.parse_args(args)
    parts = options.parts.split(",")
    started = time.perf_counter()
    shares = max(1, options.processes // 2)
    jobs = [(part, share, shares, options.tune) for part in parts for share in range(shares)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for problem in filter(None, pool.imap_unordered(_warm, jobs)):
            print("while compiling,", problem)
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    if not torch.cuda.is_available():
        return {"compiled": 1}
    bench = Bench("cuda")
    torch.manual_seed(int(time.time()))
    torch.backends.cuda.matmul.allow_tf32 = False
    bench.metrics["gpu"] = torch.cuda.get_device_name()
    for part in parts:
        began = time.perf_counter()
        try:
            PARTS[part](bench, options.tune)
        except Exception as error:  # noqa: BLE001 - the other parts' results are worth having
            bench.metrics[f"failed_{part}"] = f"{type(error).__name__}: {error}"[:300]
            print(f"FAILED {part}: {type(error).__name__}: {error}"[:2000], flush=True)
        print(f"-- {part}: {time.perf_counter() - began:.1f} s", flush=True)
    return bench.metrics
