"""From a config to a warm executor: model folder, number formats, pool sizes, load progress, memory arithmetic.

Runs on the compute thread. Says what it does on stderr: a bar on a terminal, else one line per phase and per 5 s.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import torch

from meshkit.config import env
from meshkit.errors import ConfigError, MemoryShort
from meshkit.models import resolve_model, served_name
from meshkit.types import PAGE_TOKENS
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import choose_numerics
from worker_svc.compiled_glue import GlueError, prepare
from worker_svc.config import WorkerConfig
from worker_svc.core.table import PoolConfig
from worker_svc.executor import CpuExecutor
from worker_svc.kernel_cache import open_cache, this_machine
from worker_svc.kv.layout import KvLayout
from worker_svc.loaded import Loaded
from worker_svc.model.glue import Glue, GlueShapes
from worker_svc.ops import registry
from worker_svc.warmup import warm_up

MAX_AUTO_KV: Final = 4 << 30
MAX_VERIFY: Final = 1
SLOTS: Final = 16
EVERY_S: Final = 5.0
NAMES: Final = {"build": "layers", "compile": "pieces compiled"}

log = logging.getLogger(__name__)


def _read_pins(words: str) -> None:
    """They are for a GPU; ConfigError for what no GPU would take either."""
    if not words:
        return
    try:
        registry.parse_pins(registry.pin_words(words))
    except registry.KernelError as error:
        raise ConfigError(str(error)) from error
    log.info("--kernel %s pins backends of a GPU: nothing changes on a CPU", words)


def load(config: WorkerConfig) -> Loaded:
    """Everything until the first request could be served. Raises StartError and CheckpointError classes."""
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        from worker_svc.gpu.loading import load as load_on_gpu

        return load_on_gpu(config)
    start = time.perf_counter()
    refuse_compiled_deterministic(config)
    _read_pins(config.kernel)
    threads = config.threads or _physical_cores()
    torch.set_num_threads(threads)  # of this thread: OpenMP keeps the number per calling thread
    folder = resolve_model(config.model)
    layout = _layout(folder, config)
    pages, tails = _pool_sizes(layout, config)
    log.info("loading %s: %s, %d threads", folder.name, layout.numerics.describe(), threads)
    progress = LoadProgress()
    glue = _compiled_glue(layout, config, progress) if config.torch_compile else None
    executor = CpuExecutor.load(
        folder,
        name=config.served_model_name or served_name(folder),
        numerics=layout.numerics,
        deterministic=config.deterministic,
        slots=config.slots or SLOTS,
        pages=pages,
        tails=tails,
        max_verify=MAX_VERIFY,
        progress=progress,
        glue=glue,
    )
    progress.close()
    info = executor.info
    warm = warm_up(executor, pages=pages, max_context=info.max_context, vocab_size=info.vocab_size)
    step_tokens = config.max_step_tokens or warm.max_step_tokens
    log.info(
        "warm-up ok in %.1f s: decode step %.1f ms, chunks of %d tokens", warm.seconds, warm.decode_s * 1e3, step_tokens
    )
    log.info("resident memory %.2f GB", psutil.Process().memory_info().rss / 1e9)
    log.info("READY %.1f s", time.perf_counter() - start)
    return Loaded(
        executor,
        info,
        PoolConfig(
            slots=config.slots or SLOTS, pages=pages, tails=tails, max_step_tokens=step_tokens, max_verify=MAX_VERIFY
        ),
    )


def refuse_compiled_deterministic(config: WorkerConfig) -> None:
    """ConfigError if the glue is to be compiled and bits are to repeat: a compiled sum follows the batch's size."""
    if config.torch_compile and config.deterministic:
        raise ConfigError(
            "--torch-compile (serve: --enable-torch-compile) with --deterministic: compiled code rounds the ends of "
            "its vectors differently, so bits would follow the batch; leave one of the two out"
        )


def _compiled_glue(layout: KvLayout, config: WorkerConfig, progress: "LoadProgress") -> Glue:
    """The compiled pieces, from the cache of this machine and these versions or made now. Raises GlueError."""
    try:
        root = open_cache(config.kernel_cache, this_machine(), fresh=config.jit_recompile)
    except OSError as error:
        raise GlueError(f"--torch-compile needs a folder for what it compiles: {error}; see --kernel-cache") from error
    cache = Path(env("TORCHINDUCTOR_CACHE_DIR", str(root)))
    shapes = GlueShapes.of(layout.config)
    return prepare(shapes, config.torch_compile_mode, cache, compiling=config.jit, progress=progress)


def _layout(folder: Path, config: WorkerConfig) -> KvLayout:
    checkpoint = load_checkpoint(folder, check_values=False)  # headers only: the formats decide the layout
    numerics = choose_numerics(
        checkpoint.expert_format,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        indexer_dtype=config.indexer_dtype,
    )
    return KvLayout(config=checkpoint.config, numerics=numerics, max_verify=MAX_VERIFY)


def _pool_sizes(layout: KvLayout, config: WorkerConfig) -> tuple[int, int]:
    """(pages, tails) within the KV budget; says the arithmetic. MemoryShort if not one request would fit."""
    slots = config.slots or SLOTS
    tails = config.tails or 4 * slots
    free = int(psutil.virtual_memory().available)
    budget = config.kv_memory or min(MAX_AUTO_KV, free // 4)
    fixed = slots * layout.bytes_per_slot + tails * layout.bytes_per_tail
    per_page, context = layout.bytes_per_page, layout.config.max_position_embeddings
    wanted = slots * (-(-context // PAGE_TOKENS) + 1)
    # Twice what the slots can fill: the rest caches prefixes. More would only cost memory.
    pages = config.pages or min(2 * wanted, max(0, budget - fixed) // per_page)
    total = fixed + pages * per_page
    lines = (
        f"KV: {pages} pages x {per_page / 1e6:.2f} MB + {slots} slots x {layout.bytes_per_slot / 1e6:.2f} MB"
        f" + {tails} tails x {layout.bytes_per_tail / 1e6:.2f} MB = {total / 1e9:.2f} GB"
    )
    if pages < 2 or total > free:
        raise MemoryShort(
            f"the KV pools do not fit\n  {lines}\n  budget {budget / 1e9:.2f} GB of {free / 1e9:.2f} GB free\n"
            f"  fix: fewer slots or tails, or a larger kv_memory"
        )
    log.info("%s of %.2f GB free", lines, free / 1e9)
    if pages * PAGE_TOKENS < context:
        log.info("longest context that fits: %d of the model's %d tokens", pages * PAGE_TOKENS, context)
    return pages, tails


def _physical_cores() -> int:
    """Cores that this process may use, without the second thread of each."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


class LoadProgress:
    """Called as progress(stage, done, total) from the loader, often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._began = 0.0
        self._said = 0.0
        self._bar = _Bar() if sys.stderr.isatty() else None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.show(stage, done, total)
            return
        now = self._clock()
        if stage != self._stage:
            self._stage, self._began, self._said = stage, now, now
        elif done < total and now - self._said < EVERY_S:
            return
        self._said = now
        log.info("%s", _line(stage, done, total, now - self._began))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()


def _line(stage: str, done: int, total: int, seconds: float) -> str:
    """`weights 96.0/159.6 GB 5.9 GB/s eta 11 s`, `layers 3/5`."""
    if stage != "read":
        return f"{NAMES.get(stage, stage)} {done}/{total}"
    text = f"weights {done / 1e9:.2f}/{total / 1e9:.2f} GB"
    if done and seconds > 0.5:
        text += f" {done / seconds / 1e9:.1f} GB/s eta {(total - done) * seconds / done:.0f} s"
    return text


class _Bar:
    """A rich progress bar on stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._progress.start()
        self._tasks = {stage: self._progress.add_task(stage, total=None) for stage in ("read", "build")}

    def show(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=None)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()
