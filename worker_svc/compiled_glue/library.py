"""The compiled pieces of one model on this machine: found in the cache or compiled, loaded, and checked.

A folder of objects per everything that they depend on: sizes of the model, mode, torch, this package's code, the
processor's instructions (Inductor compiles for this very one). It lies in Inductor's own cache folder.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from typing import Final

import psutil
import torch

from meshkit.config import env
from meshkit.errors import StartError
from worker_svc.compiled_glue import pieces as pieces_module
from worker_svc.compiled_glue.glue import CompiledGlue, Run
from worker_svc.compiled_glue.pieces import PIECES, Outputs
from worker_svc.model.glue import Glue, GlueShapes
from worker_svc.ops.hyper_mix import ref as hyper_mix_ref

JOBS: Final = 4
LIMIT_S: Final = 600.0
CHECKED_TOKENS: Final = (1, 2, 3, 37, 256)
SCRATCH: Final = ".process-"  # and a process's number: the folder that it compiles in
TOLERANCE: Final = 2e-4
WITHOUT: Final = "or start without --torch-compile (serve: --enable-torch-compile)"

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class GlueError(StartError):
    """The pieces cannot be had here: no compiler, a compile that fails, an object that computes something else."""

    exit_code = 3
    code = "COMPILE"


def prepare(
    shapes: GlueShapes, mode: str, cache: Path, *, compiling: bool = True, progress: Progress | None = None
) -> CompiledGlue:
    """The glue of a model, ready to run; progress("compile", done, pieces). GlueError says what to do about it."""
    start = time.perf_counter()
    folder = cache / f"glue-{_digest(shapes, mode)}"
    lacking = [name for name in PIECES if not _file(folder, name).is_file()]
    if lacking:
        if not compiling:
            raise GlueError(f"--no-jit: {folder} lacks {', '.join(lacking)}; compile them with --jit, {WITHOUT}")
        _check_compiler()
        log.info("compiling %d fused pieces of the forward, mode %s, into %s", len(lacking), mode, folder)
        _compile(shapes, mode, folder, lacking, progress)
    glue = CompiledGlue(shapes, {name: _load(_file(folder, name)) for name in PIECES})
    check(glue)
    how = f"{len(lacking)} compiled now" if lacking else "from the cache"
    log.info("fused pieces ready in %.1f s: %d, %s", time.perf_counter() - start, len(PIECES), how)
    return glue


@torch.inference_mode()
def check(glue: CompiledGlue) -> None:
    """Every piece against the plain path, at one token and more; GlueError naming the piece that differs."""
    plain, draw = Glue(glue.shapes), torch.Generator().manual_seed(7)
    for name, piece in PIECES.items():
        for tokens in CHECKED_TOKENS:
            inputs = piece.example(glue.shapes, tokens, draw)
            ours, truth = glue.run(name, *inputs), _several(piece.plain(plain, *inputs))
            if not all(map(_close, ours, truth)):
                fact = f"compiled piece {name} computes something else than plain torch at {tokens} tokens"
                raise GlueError(f"{fact}: compile it again with --jit-recompile, {WITHOUT}")


def _several(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _close(ours: torch.Tensor, truth: torch.Tensor) -> bool:
    return ours.shape == truth.shape and torch.allclose(ours, truth, rtol=TOLERANCE, atol=TOLERANCE)


def _digest(shapes: GlueShapes, mode: str) -> str:
    sources = [Path(str(module.__file__)).read_text() for module in (pieces_module, hyper_mix_ref)]
    sources.append(Path(__file__).with_name("__main__.py").read_text())
    facts = [asdict(shapes), mode, torch.__version__, _processor(), sources]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


@functools.cache
def _processor() -> list[str]:
    """What compiled code may count on."""
    facts = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        facts += sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)})
    return facts


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.so"


def _check_compiler() -> None:
    compiler = env("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise GlueError(
            f"--torch-compile: there is no C++ compiler {compiler!r} here. Install one (Debian, Ubuntu: apt install "
            f"g++), name another with CXX, {WITHOUT}"
        )


def _compile(shapes: GlueShapes, mode: str, folder: Path, names: list[str], progress: Progress | None) -> None:
    """All of `names`, by a few processes; GlueError with the compiler's last words if one fails."""
    _tidy(folder)
    finished = SimpleQueue[str]()
    jobs = min(JOBS, os.cpu_count() or 1, len(names))
    with ThreadPoolExecutor(jobs, thread_name_prefix="compile") as pool:
        running = [pool.submit(_child, shapes, mode, folder, names[job::jobs], finished) for job in range(jobs)]
        for done in range(len(names)):
            if progress is not None:
                progress("compile", done, len(names))
            finished.get()  # an empty name: a child that failed, and names no more
        for job in running:
            job.result()
    if progress is not None:
        progress("compile", len(names), len(names))


def _tidy(folder: Path) -> None:
    """An existing folder, without what processes that are gone left half done; GlueError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(f"{SCRATCH}*"):
            if not psutil.pid_exists(int(scratch.name.removeprefix(SCRATCH))):
                shutil.rmtree(scratch, ignore_errors=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        fact = f"--torch-compile keeps what it compiled in {folder}: {error}"
        raise GlueError(f"{fact}; name another folder with --kernel-cache, {WITHOUT}") from error


def _child(shapes: GlueShapes, mode: str, folder: Path, names: list[str], finished: SimpleQueue[str]) -> None:
    said, left = folder / f"{names[0]}.log", list(names)
    line = [sys.executable, "-m", "worker_svc.compiled_glue", mode, str(folder), *names]
    with said.open("wb") as errors, subprocess.Popen(line, stdin=PIPE, stdout=PIPE, stderr=errors) as child:
        assert child.stdin is not None and child.stdout is not None
        limit = threading.Timer(LIMIT_S, child.kill)
        limit.start()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(asdict(shapes)).encode() + b"\n")
            child.stdin.flush()  # and stays open: its end tells the child that we are gone
        for name in child.stdout:
            left.remove(name.decode().strip())
            finished.put(name.decode().strip())
        child.wait()
        limit.cancel()
    for _ in left:
        finished.put("")
    if left:
        words = [word for word in said.read_text(errors="replace").splitlines() if word.strip()]
        told = " | ".join(words[-3:])[-600:] or f"status {child.returncode}"
        fact = f"--torch-compile: piece {left[0]} could not be compiled: {told} (all of it: {said})"
        raise GlueError(f"{fact}; mend that, {WITHOUT}")
    said.unlink()


def _load(file: Path) -> Run:
    try:
        run: Run = torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1).run
    except RuntimeError as error:
        raise GlueError(f"{file} cannot be loaded: {error}; delete it, {WITHOUT}") from error
    return run
