"""`python -m worker_svc.precache`: compile all kernels of a model for this GPU into the cache, and write its manifest.

The last line of stdout is a JSON object; what happens meanwhile goes to stderr. `--where` prints the cache's folder
and whether it covers this machine and model, and compiles nothing. `--tune` also times the choices of
`worker_svc.tuning` on this GPU: a line for each, and `tuned.json` beside the manifest.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshkit.command import option, service_main
from meshkit.config import Loaded
from meshkit.kernel_cache import TUNED
from meshkit.models import resolve_model
from meshkit.obs import setup_logging
from meshkit.types import PAGE_TOKENS
from worker_svc import tuning
from worker_svc.kernel_cache import (
    CompileWatch,
    Machine,
    Manifest,
    mismatch,
    open_cache,
    read_manifest,
    shape_digest,
    this_machine,
)
from worker_svc.tuning.file import REMEDY, Tuned, TunedFileError, tuned_folder, usable

if TYPE_CHECKING:
    from worker_svc.checkpoint.config import V4Config
    from worker_svc.gpu.executor import GpuExecutor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecacheConfig:
    """Compile the GPU kernels of a model for this machine."""

    model: str = option("", "Model folder or hub id found on this machine.")
    cache: str = option("", "Folder of kernel caches (default: the user's).")
    slots: int = option(64, "Choices that run at once when served.")
    step_tokens: int = option(8192, "Most tokens in one step when served.")
    context: int = option(0, "Longest context when served, 0 = the model's.")
    kernel: str = option("", "Pinned GPU backends, as the worker will have them: OP=BACKEND,...")
    deterministic: bool = option(False, "Compile the kernels of deterministic mode too.")
    tune: bool = option(False, "Time what can be chosen on this GPU, and keep what wins.")
    autotune_cache: str = option("", "Folder of what was measured (default: with the kernels).")
    where: bool = option(False, "Only say where the cache is and whether it fits.")


def precache(config: PrecacheConfig) -> dict[str, Any]:
    """What was done, for the last line; key `problem` is there if the cache is not good."""
    folder = resolve_model(config.model)
    machine = this_machine()
    root = open_cache(config.cache, machine)
    digest = shape_digest(json.loads((folder / "config.json").read_bytes()))
    found: dict[str, Any] = {"root": str(root), "machine": machine.key}
    measured = tuned_folder(root, config.autotune_cache, machine.key)
    if not config.where:
        from worker_svc.gpu.loading import pin_backends

        pin_backends(config.kernel)
        known, _ = tuned_of(measured, machine, digest)
        with tuning.trial({} if known is None or config.tune else known.changed):
            found |= _compile(config, folder, root, machine, digest)
        if config.tune and found["failures"]:
            log.error("nothing is tuned: what failed above comes first")
        elif config.tune:
            found |= _tune(config, folder, root, measured, machine, digest)
    _, said = tuned_of(measured, machine, digest)
    problem = mismatch(read_manifest(root), machine, digest, deterministic=config.deterministic)
    return found | {"tuned": said} | ({"problem": problem} if problem else {})


def tuned_of(root: Path, machine: Machine, digest: str) -> tuple[Tuned | None, str]:
    """What is tuned in a cache for this machine and model, and the same in words."""
    try:
        tuned = usable(root, machine.key, digest)
    except TunedFileError as error:
        return None, f"{TUNED} is not used: {error}; {REMEDY}"
    if tuned is None:
        return None, f"nothing: {REMEDY}"
    return tuned, f"{tuned.describe()}, {tuned.date}"


def _compile(config: PrecacheConfig, folder: Path, root: Path, machine: Machine, digest: str) -> dict[str, Any]:
    """Run what a worker runs at start, over zeros, in each mode asked for; write the manifest."""
    from worker_svc.checkpoint.config import V4Config
    from worker_svc.gpu.ahead import WARM_SIZES
    from worker_svc.ops import invariant

    watch = CompileWatch.of_environment()
    before, start = watch.ready(), time.perf_counter()
    found = read_manifest(root)
    covered = not mismatch(found, machine, digest, deterministic=config.deterministic)
    kept = not mismatch(found, machine, digest, deterministic=True)
    shape, failures, buckets = V4Config.load(folder), list[str](), list[int]()
    for deterministic in (False, True) if config.deterministic else (False,):
        with invariant.switched(deterministic):
            executor = _executor(shape, config)
            failures += _run_all(executor, config, covered=covered)
            buckets = executor.buckets
            del executor
    seconds = time.perf_counter() - start
    compiled = watch.new(expected=True)
    Manifest(
        machine=machine,
        model=digest,
        decode=tuple(buckets),
        chunks=tuple(size for size in WARM_SIZES if size <= config.step_tokens),
        seconds=round(seconds, 1),
        kernels=before + compiled,
        failures=tuple(failures),
        deterministic=config.deterministic or kept,
    ).write(root)
    return {"seconds": round(seconds, 1), "compiled": compiled, "kernels": before + compiled, "failures": failures}


def _tune(
    config: PrecacheConfig, folder: Path, root: Path, measured: Path, machine: Machine, digest: str
) -> dict[str, Any]:
    """Time all choices over drawn weights; keep the values once the kernels that a worker runs with them are there."""
    from worker_svc.checkpoint.config import V4Config
    from worker_svc.gpu.loading import gpu
    from worker_svc.gpu.weights import WeightLoader
    from worker_svc.precache.hollow import HollowSource, one_of_each
    from worker_svc.tuning import timing
    from worker_svc.tuning.cases import Cases
    from worker_svc.tuning.tuner import tune

    began, lines = time.perf_counter(), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    gc.collect()  # what was compiled with; then its memory goes back
    whole, device = V4Config.load(folder), gpu()
    cut = one_of_each(whole)
    sizes = {"most": config.step_tokens + config.slots, "slots": config.slots, "context": _context(config, whole)}
    weights = WeightLoader(HollowSource(cut, device, drawn=True), device).model()
    choices = tune(Cases(weights, cut, whole, device, **sizes), timing.cuda_timer, say)
    del weights
    date = datetime.now(UTC).isoformat(timespec="seconds")
    tuned = Tuned(machine=machine.key, model=digest, date=date, choices=choices)
    log.info("tuning: %s in %.1f s", tuned.describe(), time.perf_counter() - began)
    found: dict[str, Any] = {"choices": lines, "tune_seconds": round(time.perf_counter() - began, 1)}
    before = read_manifest(root)
    if tuned.changed and before is not None:
        log.info("compiling what a worker runs with these values")
        # Deterministic mode takes none of them, and the manifest's word on it stays.
        with tuning.trial(tuned.changed):
            again = _compile(dataclasses.replace(config, deterministic=False), folder, root, machine, digest)
        if again["failures"]:
            before.write(root)
            log.error("the tuned values do not run, so none is kept: %s", "; ".join(again["failures"]))
            return found
        found["kernels"] = again["kernels"]
    measured.mkdir(parents=True, exist_ok=True)
    tuned.write(measured)
    return found


def _run_all(executor: GpuExecutor, config: PrecacheConfig, *, covered: bool) -> list[str]:
    """Everything that compiles, in the mode that is on; what failed."""
    from worker_svc.gpu.ahead import compile_ahead, warm_up
    from worker_svc.gpu.self_check import check_kernels
    from worker_svc.ops import invariant

    steps: dict[str, Callable[[], object]] = {
        "products": lambda: compile_ahead(executor, config.step_tokens, covered=covered),
        "decode": executor.capture,
        "prefill": lambda: warm_up(executor, config.step_tokens),
    }
    if invariant.on():
        model = executor.model
        steps = {"checks": lambda: check_kernels(model.weights, model.config, executor.device)} | steps
    failures = []
    for name, run in steps.items():
        began = time.perf_counter()
        try:
            run()
        except Exception as error:
            log.exception("%s failed", name)
            failures.append(f"{name}: {type(error).__name__}: {error}"[:500])
        log.info("%s%s: %.1f s", "deterministic " * invariant.on(), name, time.perf_counter() - began)
    return failures


def _executor(whole: V4Config, config: PrecacheConfig) -> GpuExecutor:
    """A worker's executor over one hollow layer of each kind."""
    from meshkit.types import ModelInfo
    from worker_svc.checkpoint.quant_choice import choose_numerics
    from worker_svc.gpu.executor import GpuExecutor
    from worker_svc.gpu.layout import check_shapes
    from worker_svc.gpu.loading import MAX_VERIFY, gpu
    from worker_svc.gpu.pools import GpuPools
    from worker_svc.gpu.transformer import Transformer
    from worker_svc.gpu.weights import WeightLoader
    from worker_svc.kv.layout import KvLayout
    from worker_svc.precache.hollow import HollowSource, one_of_each
    from worker_svc.sampling import VocabRules

    check_shapes(whole)
    device, cut = gpu(), one_of_each(whole)
    context = _context(config, whole)
    numerics = choose_numerics("fp4", quantization="fp4", kv_cache_dtype="auto", indexer_dtype="fp8")
    layout = KvLayout(config=cut, numerics=numerics, max_verify=MAX_VERIFY)
    pages = -(-context // PAGE_TOKENS) + config.step_tokens // PAGE_TOKENS + 1
    pools = GpuPools(layout, slots=config.slots, pages=pages, tails=1, device=device)
    info = ModelInfo(
        name="precache",
        revision="",
        vocab_size=cut.vocab_size,
        max_context=context,
        eos_ids=(cut.eos_token_id,),
        kv_layout_id="",
        layers=cut.num_hidden_layers,
    )
    weights = WeightLoader(HollowSource(cut, device), device).model()
    model = Transformer(weights, cut, pools, max_context=context, max_tokens=config.step_tokens + config.slots)
    rules = VocabRules(vocab_size=cut.vocab_size, eos_ids=(cut.eos_token_id,))
    return GpuExecutor(model=model, pools=pools, info=info, rules=rules, max_rows=config.slots)


def _context(config: PrecacheConfig, whole: V4Config) -> int:
    return min(config.context or whole.max_position_embeddings, whole.max_position_embeddings)


def _run(loaded: Loaded[PrecacheConfig]) -> int:
    setup_logging("precache", fmt="text", level="info")
    found = precache(loaded.value)
    sys.stdout.write(json.dumps(found) + "\n")
    return 9 if found.get("problem") else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if the cache covers this machine and model."""
    return service_main(PrecacheConfig, "precache", _run, argv)


if __name__ == "__main__":
    sys.exit(main())
