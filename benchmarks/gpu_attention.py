"""Attention-side kernels on this GPU: right against torch on fresh inputs, and microseconds inside a CUDA graph.

Covers what lies between the products of a layer: step lists, latents and KV rows, compressors, query heads, indexer
scores and selection, attention over rows, output quantisation, and the gathers of prefill, at the shapes of Flash. Each
time is a median of replays of a graph that walks several layers' pools. Where FlashMLA or DeepGEMM is installed, they
are timed on the same inputs. `--tune` times tiles of the attention kernel beside the built-in ones.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import _gpu_attention_checks as checks
from benchmarks._gpu_attention_cases import CHUNK_OPS, DECODE_OPS, Chunk, Decode
from benchmarks._gpu_floor import BANDWIDTH

TITLE = "GPU attention kernels: error against torch, microseconds per launch (needs a GPU)"

Metrics = dict[str, float | int | str]
FEW_TILES = ((32, 64, 8, 1), (32, 16, 4, 1), (32, 32, 4, 1), (64, 16, 4, 1), (64, 64, 8, 2))
MANY_TILES = ((64, 64, 8, 1), (64, 64, 8, 2), (32, 64, 8, 2))
"""Keys, heads, warps, stages."""


def run(args: list[str]) -> Metrics:
    """All checks, then the times of decode at several batches and contexts and of one prefill chunk."""
    parser = argparse.ArgumentParser(prog="gpu_attention")
    parser.add_argument("--tune", action="store_true", help="time tiles of the attention kernel")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--only", default="", help="operations to time, comma separated; all if empty")
    parser.add_argument("--batches", default="1,8,64,256", help="tokens of the decode steps at 4K")
    parser.add_argument("--long", action=argparse.BooleanOptionalAction, default=True, help="64K and 1M contexts")
    options = parser.parse_args(args)
    if not torch.cuda.is_available():
        raise SystemExit("gpu_attention needs an NVIDIA GPU; on a CPU `pytest tests/ops` runs the same kernels")
    torch.manual_seed(0)
    metrics: Metrics = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        if not options.no_checks:
            metrics |= _checked()
        only = {name for name in options.only.split(",") if name}
        steps = [(int(tokens), 4096) for tokens in options.batches.split(",")]
        for tokens, context in steps + ([(8, 65536), (1, 1 << 20)] if options.long else []):
            metrics |= _decode_times(tokens, context, only, tune=options.tune)
        for tokens in (4096, 16384):
            metrics |= _chunk_times(tokens, only)
    return metrics


def _checked() -> Metrics:
    found: Metrics = {}
    for name, error in checks.all_checks():
        found[f"{name}_error"] = error
        print(f"{name:28s} error {error:.2e}{'' if error <= checks.LIMITS.get(name, 2e-3) else '   WRONG'}", flush=True)
    return found


def _decode_times(tokens: int, context: int, only: set[str], *, tune: bool) -> Metrics:
    layers = [Decode(tokens, context, seed) for seed in range(8 if tokens < 64 and context < 1 << 20 else 3)]
    found: Metrics = {}
    label = f"b{tokens}_{context // 1024}k"
    for name, op in DECODE_OPS.items():
        if only and name not in only:
            continue
        micros = _time([partial(op, layer) for layer in layers])
        if micros is not None:
            found |= _line(name, label, micros, layers[0].least_bytes())
    _table(label, found)
    if tune and context == 4096:
        found |= _tiles(layers, label)
    return found


def _chunk_times(tokens: int, only: set[str]) -> Metrics:
    chunk = Chunk(tokens)
    found: Metrics = {}
    for name, op in CHUNK_OPS.items():
        if only and name not in only:
            continue
        micros = _time([partial(op, chunk)])
        if micros is not None:
            found |= _line(name, f"p{tokens}", micros, chunk.least_bytes())
    _table(f"prefill {tokens}", found)
    return found


def _tiles(layers: Sequence[Decode], label: str) -> Metrics:
    """Times of `attend` alone over its tiles, numbers of splits, and the type of the queries."""
    from worker_svc.ops.sparse_attention.triton import Tile

    found: Metrics = {}
    few = layers[0].tokens < 64
    tiles = [Tile(keys, heads, warps, stages) for keys, heads, warps, stages in (FEW_TILES if few else MANY_TILES)]
    for tile, splits, half in itertools.product(tiles, (5, 10, 20) if few else (1, 2), (True, False)):
        micros = _time([partial(layer.attend, splits, tile, half=half) for layer in layers])
        if micros is not None:
            shape = f"k{tile.keys}_h{tile.heads}_w{tile.warps}_s{tile.stages}_n{splits}"
            found[f"attend_{label}_{shape}_{'f16' if half else 'bf16'}_us"] = round(micros, 2)
    best = sorted(found.items(), key=lambda item: float(item[1]))[:6]
    print("  best tiles:", *(f"{name}={value}" for name, value in best), sep="\n    ", flush=True)
    return found


def _time(calls: Sequence[Callable[[], object]], repeat: int = 4, replays: int = 12) -> float | None:
    """Median microseconds of one call; None, with the reason printed, if it cannot run here."""
    try:
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeat):
                for call in calls:
                    call()
    except Exception as error:  # noqa: BLE001 - a kernel that fails here is a line of the table
        print(f"    failed: {type(error).__name__}: {str(error)[:160]}", flush=True)
        return None
    graph.replay()
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return float(statistics.median(times)) * 1000 / (repeat * len(calls))


def _line(name: str, label: str, micros: float, least: Mapping[str, float]) -> Metrics:
    """Its time, and the least time over it where bytes are what it moves."""
    line: Metrics = {f"{name}_{label}_us": round(micros, 2)}
    if name in least:
        line[f"{name}_{label}_of_floor"] = round(least[name] / BANDWIDTH * 1e6 / micros, 3)
    return line


def _table(label: str, found: Metrics) -> None:
    times = {name: value for name, value in found.items() if name.endswith("_us")}
    names = {name.split(f"_{label}")[0].split("_p")[0]: value for name, value in times.items()}
    print(label, " ".join(f"{name} {value}" for name, value in names.items()), flush=True)
