"""The V4 forward on one GPU: correctness against the CPU model, step times against the floor and against peers.

Sections, each by name: ops, check, diverge, decode, long, prefill, mesh, launches, prefill_profile, w4a16,
transformers, coldstart (kernels alone: `gpu_ops`, `gpu_attention`). Results are printed as they come; `--out FILE`
writes all after every section, with the counted bytes and operations.
"""
# mypy: disallow-untyped-calls=False

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

TITLE = "V4 forward on a GPU: correctness, decode and prefill against floor and peers (needs an NVIDIA GPU)"

LAYERS: Final = 8
RATIOS: Final = (0, 0, 4, 128, 4, 128, 4, 128, 0)
CONTEXT: Final = 4096
BATCHES: Final = (1, 8, 32, 64, 128, 256)
PEER_DECODE_MS: Final = {1: 2.07, 8: 3.70, 32: 7.41, 64: 10.14, 128: 12.29, 256: 15.38}
PEER_PREFILL_MS: Final = {4096: 52.8, 16384: 180.0}
PEER: Final = "SGLang 0.5.17, 8 layers of Flash, best backend, one H200, measured 2026-11-29"
OF_MODEL: Final = {0: 2, 4: 21, 128: 20}
"""Layers of each kind in the whole of Flash."""
PROBE: Final = {0: (0, 1), 4: (2, 4, 6), 128: (3, 5, 7)}
"""And in the model that is measured."""


@dataclass(slots=True)
class Report:
    """Metrics by name, tables by section."""

    metrics: dict[str, float | int | str] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    out: Path | None = None

    def row(self, section: str, **values: Any) -> None:
        """One line of a section's table."""
        self.tables.setdefault(section, []).append(values)
        shown = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        print(f"{section}: {shown}", flush=True)

    def save(self) -> None:
        """Write what there is so far."""
        if self.out is not None:
            self.out.write_text(json.dumps({"metrics": self.metrics, "tables": self.tables}, indent=1) + "\n")


class Lab:
    """Builds what sections need, once: the random 8-layer weights on the GPU."""

    def __init__(self) -> None:
        import torch

        from worker_svc.gpu.loading import gpu

        self.device = gpu()
        self._weights: Any = None
        torch.backends.cuda.matmul.allow_tf32 = False

    @property
    def config(self) -> Any:
        """Flash cut to 8 layers of every kind."""
        from worker_svc.checkpoint.census import preset

        return replace(preset("flash"), num_hidden_layers=LAYERS, compress_ratios=RATIOS)

    @property
    def weights(self) -> Any:
        """All of them, 29 GB."""
        if self._weights is None:
            from benchmarks._gpu_model import RandomSource
            from worker_svc.gpu.weights import WeightLoader

            begin = time.perf_counter()
            self._weights = WeightLoader(RandomSource(self.config, self.device), self.device).model()
            print(f"weights {time.perf_counter() - begin:.1f} s", flush=True)
        return self._weights

    def use(self, weights: Any) -> None:
        """These from now on, until they are forgotten."""
        self._weights = weights

    def forget(self) -> None:
        """Give the memory of the weights back."""
        import torch

        self._weights = None
        gc.collect()
        torch.cuda.empty_cache()

    def bench(self, *, slots: int, context: int, max_tokens: int) -> Any:
        """A fresh executor with filled pools."""
        import torch

        from benchmarks._gpu_model import assemble, fill

        gc.collect()
        torch.cuda.empty_cache()
        bench = assemble(self.config, self.weights, self.device, slots=slots, context=context, max_tokens=max_tokens)
        fill(bench.pools)
        return bench


def decode(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Decode steps at 4K context, all batches: measured, floor, peer, and what the whole model would take."""
    from benchmarks import _gpu_floor as floor
    from benchmarks._gpu_times import decode_graph_ms, decode_loop_ms, distinct_experts, layers_ms

    bench = lab.bench(slots=max(options.batches), context=CONTEXT + 512, max_tokens=max(options.batches))
    c = lab.config
    for batch in options.batches:
        begin = time.perf_counter()
        graph = decode_graph_ms(bench, batch, CONTEXT, 30)
        made = time.perf_counter() - begin
        loop = decode_loop_ms(bench, batch, CONTEXT, 60)
        met = distinct_experts(bench, batch, CONTEXT)
        parts = [floor.decode_parts(c, ratio, batch, CONTEXT, n) for ratio, n in zip(c.layer_ratios, met)]
        head = floor.head_part(c, batch)
        least = (sum(floor.seconds(p) for p in parts) + head.seconds) * 1e3
        moved = sum(part.bytes for p in parts for part in p.values()) + head.bytes
        done = sum(part.flops for p in parts for part in p.values()) + head.flops
        peer = PEER_DECODE_MS.get(batch)
        row: dict[str, Any] = {
            "batch": batch,
            "graph_ms": graph,
            "loop_ms": loop,
            "floor_ms": least,
            "of_floor": least / loop,
            "peer_ms": peer,
            "vs_peer": peer / loop if peer else None,
            "experts": sum(met) / len(met),
            "gbytes": moved / 1e9,
            "gflop": done / 1e9,
            "first_s": made,
        }
        if batch in options.by_kind:
            row |= _whole_model(bench, batch, layers_ms)
        report.row("decode", **row)
        report.metrics[f"decode_b{batch}_ms"] = round(loop, 4)
        report.metrics[f"decode_b{batch}_of_floor"] = round(least / loop, 4)
        if peer:
            report.metrics[f"vs_sglang_decode_b{batch}"] = round(peer / loop, 3)


def _whole_model(bench: Any, batch: int, layers_ms: Callable[..., float]) -> dict[str, float]:
    """Milliseconds of one layer of each kind and of 43: T43 = 2 SWA + 21 C4 + 20 C128 + the rest (head, embedding)."""
    both = {ratio: layers_ms(bench, layers, batch, CONTEXT, 20) for ratio, layers in PROBE.items()}
    once = {ratio: layers_ms(bench, layers[:1], batch, CONTEXT, 20) for ratio, layers in PROBE.items()}
    each = {ratio: (both[ratio] - once[ratio]) / (len(PROBE[ratio]) - 1) for ratio in PROBE}
    rest = once[0] - each[0]
    whole = rest + sum(count * each[ratio] for ratio, count in OF_MODEL.items())
    return {"swa_ms": each[0], "c4_ms": each[4], "c128_ms": each[128], "rest_ms": rest, "t43_ms": whole}


def long(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Decode at 64K, batch 8, and at 1M, batch 1."""
    from benchmarks import _gpu_floor as floor
    from benchmarks._gpu_times import decode_graph_ms, distinct_experts

    del options
    for batch, context in ((8, 65_536), (1, 1_048_320)):
        bench = lab.bench(slots=batch, context=context + 256, max_tokens=64)
        graph = decode_graph_ms(bench, batch, context, 20)
        met, c = distinct_experts(bench, batch, context), lab.config
        parts = [floor.decode_parts(c, ratio, batch, context, n) for ratio, n in zip(c.layer_ratios, met)]
        least = (sum(floor.seconds(p) for p in parts) + floor.head_part(c, batch).seconds) * 1e3
        report.row("long", batch=batch, context=context, graph_ms=graph, floor_ms=least, of_floor=least / graph)
        report.metrics[f"decode_b{batch}_{context // 1024}k_of_floor"] = round(least / graph, 4)
        del bench


def prefill(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """A prompt of 4K and of 16K tokens, one request, from an empty context."""
    from benchmarks import _gpu_floor as floor
    from benchmarks._gpu_times import prefill_ms

    del options
    c = lab.config
    for tokens in PEER_PREFILL_MS:
        bench = lab.bench(slots=1, context=tokens + 256, max_tokens=tokens)
        taken, launch = prefill_ms(bench, tokens)
        parts = [floor.prefill_parts(c, ratio, tokens, c.n_routed_experts) for ratio in c.layer_ratios]
        least = (sum(floor.seconds(p) for p in parts) + floor.head_part(c, 1).seconds) * 1e3
        flops = sum(part.flops for p in parts for part in p.values())
        peer, name = PEER_PREFILL_MS[tokens], f"{tokens // 1024}k"
        report.row(
            "prefill",
            tokens=tokens,
            ms=taken,
            launch_ms=launch,
            floor_ms=least,
            of_floor=least / taken,
            peer_ms=peer,
            vs_peer=peer / taken,
            tflop=flops / 1e12,
        )
        report.metrics[f"prefill_{name}_of_floor"] = round(least / taken, 4)
        report.metrics[f"vs_sglang_prefill_{name}"] = round(peer / taken, 3)
        del bench


def launches(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Kernels of one decode step, by layer kind, from the profiler."""
    from benchmarks._gpu_profile import count_launches

    count_launches(lab, report, options)


def mesh(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """The GPU's idle time between steps, scheduler and load in processes of their own."""
    from benchmarks._gpu_mesh import measure

    del options
    measure(lab.bench(slots=64, context=1024, max_tokens=4096), 64, 400, report)


def transformers(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """transformers' DeepseekV4 on the same GPU, same layers, batch 64; against the decode section's time of ours."""
    from benchmarks._gpu_transformers import PROMPT, decode_ms

    del options
    lab.forget()
    theirs = decode_ms(lab.config, lab.device, 64)
    report.row("transformers", batch=64, context=PROMPT, ms=theirs)
    report.metrics["transformers_b64_ms"] = round(theirs, 2)
    ours = report.metrics.get("decode_b64_ms")
    if isinstance(ours, float):
        report.metrics["speedup_vs_transformers_b64"] = round(theirs / ours, 2)


def w4a16(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Experts on BF16 activations, as the peer's: decode and prompts again, for a like-for-like ratio."""
    from benchmarks._gpu_model import RandomSource
    from benchmarks._gpu_times import decode_loop_ms, prefill_ms
    from worker_svc.gpu.weights import WeightLoader

    lab.forget()
    source = RandomSource(lab.config, lab.device)
    lab.use(WeightLoader(source, lab.device, expert_activation="bf16").model())
    bench = lab.bench(slots=max(options.batches), context=CONTEXT + 512, max_tokens=max(options.batches))
    for batch in options.batches:
        loop = decode_loop_ms(bench, batch, CONTEXT, 30)
        report.row("w4a16", batch=batch, ms=loop, peer_ms=PEER_DECODE_MS[batch], vs_peer=PEER_DECODE_MS[batch] / loop)
        report.metrics[f"w4a16_vs_sglang_decode_b{batch}"] = round(PEER_DECODE_MS[batch] / loop, 3)
    del bench
    for tokens, peer in PEER_PREFILL_MS.items():
        bench = lab.bench(slots=1, context=tokens + 256, max_tokens=tokens)
        taken, _ = prefill_ms(bench, tokens)
        report.row("w4a16", tokens=tokens, ms=taken, peer_ms=peer, vs_peer=peer / taken)
        report.metrics[f"w4a16_vs_sglang_prefill_{tokens // 1024}k"] = round(peer / taken, 3)
        del bench
    lab.forget()


def coldstart(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Process start to ready, with empty kernel caches and with packed ones."""
    from benchmarks._gpu_coldstart import measure as starts

    lab.forget()
    starts(lab.config, report, options.cold_caches, options.cold_stages.split(","))


def tuned(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Decode steps with the values that `precache --tune` left in the kernel cache, beside the built-in ones."""
    from benchmarks._gpu_times import decode_graph_ms
    from worker_svc import tuning
    from worker_svc.kernel_cache import open_cache, this_machine
    from worker_svc.tuning.file import read_tuned

    found = read_tuned(open_cache(options.kernel_cache, this_machine()))
    if found is None:
        print("tuned: --kernel-cache has no measured values; `v4mesh precache MODEL --tune` leaves them", flush=True)
        return
    report.row("tuned", values=", ".join(f"{name}={value}" for name, value in found.changed.items()) or "none changed")
    for batch in options.batches:
        times: dict[str, list[float]] = {"built_in_ms": [], "tuned_ms": []}
        for what in ("built_in_ms", "tuned_ms", "tuned_ms", "built_in_ms"):  # what warms the card up hits both
            with tuning.trial(found.changed if what == "tuned_ms" else {}):
                bench = lab.bench(slots=batch, context=CONTEXT + 512, max_tokens=batch)
                times[what].append(decode_graph_ms(bench, batch, CONTEXT, 30))
                del bench
        least = {what: min(each) for what, each in times.items()}
        gain = least["built_in_ms"] / least["tuned_ms"]
        report.row("tuned", batch=batch, **least, gain=gain)
        report.metrics[f"tuned_gain_b{batch}"] = round(gain, 3)


def prefill_profile(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Where a prompt's time goes."""
    from benchmarks._gpu_profile import profile_prefill

    del options
    profile_prefill(lab, report)


def check(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """The whole forward of v4-nano against the CPU model with the same quantisation, and against its own roundings."""
    from benchmarks._gpu_checks import check_nano

    del options
    check_nano(lab.device, report)


def check_flash(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """The same for four layers of Flash width: minutes of plain torch on the CPU."""
    from benchmarks._gpu_checks import check_flash as four_layers

    four_layers(lab.device, report, tokens=options.flash_tokens)


def diverge(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Both modes: answers of v4-nano alone, in batches, restarted and resumed, to which token they stay the same."""
    from benchmarks._gpu_diverge import measure as answers

    answers(lab.device, report, sampled=options.requests)


def cost(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """What a step of Flash costs in deterministic mode."""
    from benchmarks._gpu_diverge import cost as both_modes

    del options
    both_modes(lab, report, CONTEXT)


def ops(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Each operation against its plain torch reference, fresh inputs, outputs poisoned."""
    from benchmarks._gpu_checks import check_ops

    del options
    check_ops(lab.device, report)


def overlap(lab: Lab, report: Report, options: argparse.Namespace) -> None:
    """Decode steps with launches one after the other, and overlapped: time, and whether the logits' bits are the same.

    The second answer of the launches in a row says how much repeats at all.
    """
    import torch

    from benchmarks._gpu_times import decode_graph_ms
    from worker_svc.ops import launches

    for batch in options.batches:
        times: dict[bool, list[float]] = {False: [], True: []}
        seen: dict[bool, list[Any]] = {False: [], True: []}
        for on in (False, True, True, False):
            with launches.overlapped(on):
                torch.manual_seed(1)
                bench = lab.bench(slots=batch, context=CONTEXT + 512, max_tokens=batch)
                times[on].append(decode_graph_ms(bench, batch, CONTEXT, 30))
                seen[on].append(bench.executor.graphs.bucket(bench.executor.buckets[-1]).logits[:batch].clone())
                del bench
        apart, joined = min(times[False]), min(times[True])
        same = [torch.equal(one, other) for one, other in (seen[False], seen[True], (seen[False][0], seen[True][0]))]
        row = dict(zip(("apart_repeats", "overlapped_repeats", "same"), same))
        report.row("overlap", batch=batch, apart_ms=apart, overlapped_ms=joined, gain=apart / joined, **row)
        report.metrics |= {f"overlap_gain_b{batch}": round(apart / joined, 3), f"overlap_same_b{batch}": int(same[2])}


SECTIONS: Final[dict[str, Callable[[Lab, Report, argparse.Namespace], None]]] = {
    "ops": ops,
    "check": check,
    "check_flash": check_flash,
    "diverge": diverge,
    "cost": cost,
    "decode": decode,
    "long": long,
    "prefill": prefill,
    "mesh": mesh,
    "launches": launches,
    "prefill_profile": prefill_profile,
    "w4a16": w4a16,
    "transformers": transformers,
    "coldstart": coldstart,
    "tuned": tuned,
    "overlap": overlap,
}


def run(args: list[str]) -> dict[str, float | int | str]:
    """Run the sections asked for, in their order; a section that fails says so and the others go on."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_forward")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of: " + ", ".join(SECTIONS))
    parser.add_argument("--batches", type=_numbers, default=list(BATCHES), help="decode batches, by comma")
    parser.add_argument(
        "--by-kind", type=_numbers, default=[1, 64], help="batches at which layer kinds are timed apart"
    )
    parser.add_argument("--requests", type=int, default=40, help="sampled requests that diverge compares, 0 for none")
    parser.add_argument("--flash-tokens", type=int, default=200, help="tokens of check_flash, 60 or more")
    parser.add_argument("--out", type=Path, help="file for tables and metrics")
    parser.add_argument("--kernel-cache", default="", help="folder of compiled kernels to use, as a worker's option")
    parser.add_argument("--cold-caches", type=Path, help="folder that coldstart leaves its caches in, empty at first")
    parser.add_argument("--cold-stages", default="empty,precache,packed", help="parts of coldstart, by comma")
    options = parser.parse_args(args)
    if not torch.cuda.is_available():
        raise SystemExit("gpu_forward needs an NVIDIA GPU; `python -m benchmarks forward_step` times the CPU's forward")
    if options.kernel_cache:
        from worker_svc.kernel_cache import open_cache, this_machine

        open_cache(options.kernel_cache, this_machine())
    lab, report = Lab(), Report(out=options.out)
    report.metrics |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "peer": PEER}
    for name in options.sections.split(","):
        begin = time.perf_counter()
        try:
            SECTIONS[name](lab, report, options)
        except Exception as error:  # noqa: BLE001 - device time is short: one broken section must not cost the others
            import traceback

            traceback.print_exc()
            report.metrics[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
        print(f"section {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        report.save()
    return report.metrics


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
