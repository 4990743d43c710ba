"""Products of few rows: our weight-streaming kernels beside DeepGEMM and cuBLAS, and tiles to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_op import (
    BF16_PEAK,
    L2_BYTES,
    VOCAB,
    Bench,
    D,
)

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
