"""From a config to a warm GPU executor: formats, memory arithmetic, weights, graphs. Runs on the compute thread."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from meshkit.compile_modes import NOTHING_ON_A_GPU
from meshkit.errors import GpuError, MemoryShort
from meshkit.kernel_cache import TUNED
from meshkit.memory_plan import Shape, plan
from meshkit.models import resolve_model, served_name
from meshkit.types import PAGE_TOKENS, ModelInfo
from worker_svc import tuning
from worker_svc.checkpoint.errors import NumericsError
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics, choose_numerics
from worker_svc.config import WorkerConfig
from worker_svc.core.table import PoolConfig
from worker_svc.executor import revision_of, rules_of
from worker_svc.gpu.ahead import compile_ahead, warm_up
from worker_svc.gpu.executor import GpuExecutor
from worker_svc.gpu.layout import GpuSizes, check_shapes
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.self_check import check_forward, check_kernels
from worker_svc.gpu.transformer import Transformer
from worker_svc.gpu.weights import WeightLoader, WeightSource
from worker_svc.kernel_cache import CompileWatch, mismatch, open_cache, read_manifest, shape_digest, this_machine
from worker_svc.kv.layout import KvLayout
from worker_svc.loaded import Loaded
from worker_svc.loading import LoadProgress
from worker_svc.ops import invariant, registry
from worker_svc.sampling import VocabRules
from worker_svc.tuning.file import REMEDY, TunedFileError, tuned_folder, usable

SLOTS: Final = 64
STEP_TOKENS: Final = 8192
MAX_VERIFY: Final = 1
POOL_SHARE: Final = 0.75
"""Of the memory left beside the weights: the rest is for activations of the largest step, graphs and libraries."""

log = logging.getLogger(__name__)


def load(config: WorkerConfig) -> Loaded:
    """Everything until the first request could be served. Raises StartError and CheckpointError classes."""
    start = time.perf_counter()
    device = gpu()
    folder = resolve_model(config.model)
    if config.torch_compile:
        log.info("--torch-compile changes nothing on a GPU: %s", NOTHING_ON_A_GPU)
    covered = prepare_kernels(config, folder)
    check_memory(config, folder, torch.cuda.mem_get_info(device)[0])
    progress = LoadProgress()
    checkpoint = load_checkpoint(folder, progress=lambda done, total: progress("read", done, total))
    laps: dict[str, float] = {}
    loaded = from_source(config, folder, checkpoint, device, rules_of(folder, checkpoint), laps, covered, progress)
    progress.close()
    spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in laps.items())
    log.info("device memory %.2f GB", torch.cuda.memory_allocated(device) / 1e9)
    log.info("READY %.1f s: %s", time.perf_counter() - start, spent)
    return loaded


def from_source(
    config: WorkerConfig,
    folder: Path,
    source: WeightSource,
    device: torch.device,
    rules: VocabRules,
    laps: dict[str, float],
    covered: bool,
    progress: LoadProgress | None = None,
) -> Loaded:
    """Weights, pools, compiling, graphs, warm-up: `laps` gets the seconds of each.

    `folder` has the config, weights or not; `covered`: the kernel cache is complete, see `prepare_kernels`.
    """
    numerics = gpu_numerics(source, config)
    layout = KvLayout(config=source.config, numerics=numerics, max_verify=MAX_VERIFY)
    log.info("loading %s on %s: %s", folder.name, torch.cuda.get_device_name(device), numerics.describe())
    slots, step_tokens = config.slots or SLOTS, config.max_step_tokens or STEP_TOKENS
    switch_mode(config)
    with _lap(laps, "weights", device):
        told = None if progress is None else lambda done, total: progress("build", done, total)
        weights = WeightLoader(source, device).model(told)
    if config.deterministic:
        with _lap(laps, "operations checked", device):
            check_kernels(weights, source.config, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the pools are sized by what is free now
    with _lap(laps, "pools", device):
        pages, tails = pool_sizes(layout, config, slots, torch.cuda.mem_get_info(device)[0])
        pools = GpuPools(layout, slots=slots, pages=pages, tails=tails, device=device)
        info = ModelInfo(
            name=config.served_model_name or served_name(folder),
            revision=revision_of(folder),
            vocab_size=source.config.vocab_size,
            max_context=min(source.config.max_position_embeddings, pages * PAGE_TOKENS),
            eos_ids=(source.config.eos_token_id,),
            kv_layout_id=f"{layout.layout_id}-gpu",  # pages hold other bytes than those of the CPU
            layers=len(layout.ratios),
        )
        model = Transformer(weights, source.config, pools, max_context=info.max_context, max_tokens=step_tokens + slots)
        executor = GpuExecutor(model=model, pools=pools, info=info, rules=rules, max_rows=slots)
    with _lap(laps, "compiling", device):
        compile_ahead(executor, step_tokens, covered=covered)
    with _lap(laps, "graphs", device):
        executor.capture()
    with _lap(laps, "warm-up", device):
        warm_up(executor, step_tokens)
    if config.deterministic:
        with _lap(laps, "forward checked", device):
            check_forward(executor, step_tokens)
    executor.watch(CompileWatch.of_environment())
    return Loaded(
        executor,
        info,
        PoolConfig(slots=slots, pages=pages, tails=tails, max_step_tokens=step_tokens, max_verify=MAX_VERIFY),
    )


def switch_mode(config: WorkerConfig) -> None:
    """Deterministic mode on or off, before weights choose their backends; GpuError if a pin or the machine forbids."""
    try:
        invariant.switch(config.deterministic)
    except registry.KernelError as error:
        raise GpuError(str(error)) from error


@contextmanager
def _lap(laps: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    laps[name] = time.perf_counter() - begin


def prepare_kernels(config: WorkerConfig, folder: Path) -> bool:
    """Pins and the kernel cache, before any kernel package is imported; whether the cache has all kernels.

    GpuError for what cannot be kept.
    """
    machine = this_machine()
    root = open_cache(config.kernel_cache, machine, fresh=config.jit_recompile)
    pin_backends(config.kernel)
    digest = shape_digest(json.loads((folder / "config.json").read_bytes()))
    lacking = mismatch(read_manifest(root), machine, digest, deterministic=config.deterministic)
    if lacking and not config.jit:
        raise GpuError(f"--no-jit: the kernel cache {root} does not cover this model: {lacking}")
    tuned = use_tuned(config, tuned_folder(root, config.autotune_cache, machine.key), machine.key, digest)
    log.info("kernels: %s; %s%s", root, tuned, f"; {lacking}, so they compile now" if lacking else "")
    return not lacking


def pin_backends(words: str) -> None:
    """OP=BACKEND,... for this process, libraries that compile for minutes loaded. GpuError for what cannot be kept."""
    try:
        registry.pin(registry.pin_words(words))
        if registry.pinned("top_entries") == "flashinfer":
            from worker_svc.ops.top_entries import flashinfer

            flashinfer.library()
    except (registry.KernelError, RuntimeError) as error:
        raise GpuError(str(error)) from error


def use_tuned(config: WorkerConfig, root: Path, machine: str, model: str) -> str:
    """Put the measured choices of a kernel cache for this machine and model into use; in words, how many.

    A pin leaves alone the choices that it is part of, and a cache of BF16 rows those that were timed on FP8 rows.
    """
    tuning.use({})
    try:
        tuned = usable(root, machine, model)
    except TunedFileError as error:
        log.warning("%s is not used: %s; %s", root / TUNED, error, REMEDY)
        return "no choice tuned"
    if tuned is None:
        return "no choice tuned"
    if config.deterministic:
        return "no choice tuned (deterministic mode)"
    if not config.autotune:
        return f"no choice tuned (--no-autotune; {tuned.describe()} in {root})"
    pinned = {op for op in registry.OPS if registry.pinned(op)}
    values = tuned.without(pinned | ({"sparse_attention"} if config.kv_cache_dtype == "bf16" else set()))
    tuning.use(values)
    return f"{len(values)} of {len(tuned.choices)} choices tuned"


def check_memory(config: WorkerConfig, folder: Path, free: int) -> None:
    """MemoryShort, with the arithmetic, if the model cannot fit into `free` bytes: before a byte of it is read."""
    try:
        shape = Shape.of(json.loads((folder / "config.json").read_bytes()))
    except ValueError:
        return  # the loader says what is wrong with it
    found = plan(
        shape,
        free,
        slots=config.slots or SLOTS,
        step_tokens=config.max_step_tokens or STEP_TOKENS,
        tails=config.tails,
        kv="bf16" if config.kv_cache_dtype == "bf16" else "fp8_e4m3",
        pages=config.pages,
    )
    if not found.fits:
        lines = "\n  ".join(found.table("free on this card"))
        fact = f"{folder.name} needs {found.short / 1e9:.2f} GB more than there is"
        raise MemoryShort(f"{fact}\n  {lines}\n  fix: see `v4mesh plan {folder}` for what would fit")


def gpu() -> torch.device:
    """The device to compute on, or GpuError saying what is missing."""
    if not torch.cuda.is_available():
        raise GpuError(
            "--device cuda: torch sees no GPU here; see `v4mesh doctor`; a worker also runs with --device cpu"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (9, 0):
        raise GpuError(
            f"--device cuda: {torch.cuda.get_device_name(device)} is older than Hopper (SM 9.0); use --device cpu"
        )
    return device


def gpu_numerics(source: WeightSource, config: WorkerConfig) -> Numerics:
    """FP8 activations and KV unless told otherwise; refuses what no kernel does. Checks the model's shapes too."""
    check_shapes(source.config)
    if source.expert_format != "fp4":
        raise NumericsError(
            "--device", "cuda", "the checkpoint has FP8 experts, for which there is no kernel yet", ("cpu",)
        )
    numerics = choose_numerics(
        source.expert_format,
        quantization="fp4" if config.quantization == "auto" else config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        indexer_dtype="fp8" if config.indexer_dtype == "auto" else config.indexer_dtype,
    )
    if numerics.activations != "fp8":
        raise NumericsError("--quantization", config.quantization, "exact maths runs on the CPU only", ("auto", "fp4"))
    if numerics.kv not in ("fp8_e4m3", "bf16"):
        raise NumericsError("--kv-cache-dtype", config.kv_cache_dtype, "no GPU kernel reads it", ("fp8_e4m3", "bf16"))
    if numerics.indexer != "fp8":
        raise NumericsError("--indexer-dtype", config.indexer_dtype, "no GPU kernel reads it", ("fp8",))
    return numerics


def pool_sizes(layout: KvLayout, config: WorkerConfig, slots: int, free: int) -> tuple[int, int]:
    """(pages, tails) within the memory that is left; says the arithmetic. MemoryShort if not one request would fit."""
    sizes, tails = GpuSizes(layout), config.tails or 4 * slots
    budget = config.kv_memory or int(free * POOL_SHARE)
    fixed = slots * sizes.bytes_per_slot + tails * sizes.bytes_per_tail
    context = layout.config.max_position_embeddings
    wanted = 2 * slots * (-(-context // PAGE_TOKENS) + 1)
    pages = config.pages or min(wanted, max(0, budget - fixed) // sizes.bytes_per_page)
    total = fixed + pages * sizes.bytes_per_page
    line = (
        f"KV: {pages} pages x {sizes.bytes_per_page / 1e6:.2f} MB + {slots} slots x {sizes.bytes_per_slot / 1e6:.2f} MB"
        f" + {tails} tails x {sizes.bytes_per_tail / 1e6:.2f} MB = {total / 1e9:.2f} GB"
    )
    if pages < 2 or total > free:
        raise MemoryShort(
            f"the KV pools do not fit\n  {line}\n  budget {budget / 1e9:.2f} GB of {free / 1e9:.2f} GB free there\n"
            f"  fix: fewer slots or tails, or a larger kv_memory"
        )
    log.info("%s of %.2f GB free", line, free / 1e9)
    return pages, tails
