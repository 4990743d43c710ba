"""`v4mesh doctor`: what this machine can run, row by row: ✓ works, ! works but, ✗ does not, each with what to do.

Looks and never changes anything. Imports torch and NVML only if they are installed; asks no server outside.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import click

from meshkit.address import MAX_UNIX_PATH
from meshkit.cli.flag_table import folders_of_caches
from meshkit.cli.help_pages import command
from meshkit.cli.mesh import DEFAULT_PORT
from meshkit.cli.model_folder import check_model_folder, find_model, weight_bytes
from meshkit.cli.preflight import LONGEST_SOCKET_NAME, check_port
from meshkit.cli.screen import Screen, shared_options
from meshkit.config import environment
from meshkit.exit_codes import Exit, Problem, ProblemsError

Status = Literal["ok", "warn", "fail"]
MARKS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
TORCH_FROM, TORCH_BELOW = (2, 11), (2, 15)
EXTRAS = {"gateway": "aiohttp", "worker": "torch", "grammar": "xgrammar", "test": "pytest"}
PROBE_S = 120.0  # importing every kernel package; JIT caches on a network disk are slow
GPU_NONE = (
    "no NVIDIA GPU is visible (driver library absent). Laptop? add --device cpu. In Docker? the service needs a device "
    "reservation or --gpus all; toolkit check: nvidia-ctk --version"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `exit` is the status a failed row asks for."""

    name: str
    status: Status
    fact: str
    fix: str = ""
    exit: int = int(Exit.THRESHOLD)


@command()
@click.option("--model", "--model-path", "model", metavar="DIR", help="Check this model (default: the demo model).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="cuda: a GPU must be there.")
@click.option("--host", default="127.0.0.1", help="Address the gateway would listen on.")
@click.option("--port", default=DEFAULT_PORT, type=click.IntRange(1, 65535), help="Port the gateway would listen on.")
@click.option("--kernels", is_flag=True, help="Which backend computes what on the GPU (always, if there is one).")
@click.option("--kernel", "pins", multiple=True, metavar="OP=BACKEND", help="As if this backend were pinned.")
@shared_options
@click.pass_obj
def doctor(
    screen: Screen, *, model: str | None, device: str, host: str, port: int, kernels: bool, pins: tuple[str, ...]
) -> int:
    """Check this machine. Exit 0 if nothing fails, else the exit code of the first failed row."""
    checks: tuple[Callable[[], Iterator[Row]], ...] = (
        python_row,
        torch_row,
        extras_rows,
        lambda: gpu_row(device),
        cpu_rows,
        lambda: model_rows(model),
        lambda: port_row(host, port),
        sockets_row,
        lambda: kernel_rows(pins) if kernels or pins or _nvml()[0] else iter(()),
        lambda: cache_row(model) if _nvml()[0] else iter(()),
    )
    rows = [row for check in checks for row in check()]
    failed = [row for row in rows if row.status == "fail"]
    status = failed[0].exit if failed else int(Exit.OK)
    if screen.as_json:
        screen.result(json.dumps({"schema_version": 1, "exit": status, "rows": [asdict(r) for r in rows]}))
        return status
    width = max(len(r.name) for r in rows)
    for row in rows:
        mark, style = MARKS[row.status]
        screen.result(f"{screen.paint(mark, style, sys.stdout)} {row.name:{width}}  {row.fact}")
        if row.fix and row.status != "ok":
            screen.result(f"  {'':{width}}  -> {row.fix}")
    warned = sum(r.status == "warn" for r in rows)
    screen.note(f"\n{len(rows) - warned - len(failed)} fine, {warned} to know, {len(failed)} to fix")
    return status


def python_row() -> Iterator[Row]:
    """The interpreter."""
    fact = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.platform.startswith("linux"):
        yield Row("python", "ok", fact)
    else:
        yield Row("python", "warn", fact, "tested on Linux; elsewhere a killed `up` can leave its services behind")


def torch_row() -> Iterator[Row]:
    """Is torch there, in a version the worker is tested with? Read from its metadata: importing takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Row("torch", "fail", "not installed: no worker can run here", 'pip install "v4mesh[cpu]"')
        return
    short = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    supported = f"{'.'.join(map(str, TORCH_FROM))} to below {'.'.join(map(str, TORCH_BELOW))}"
    if TORCH_FROM <= short < TORCH_BELOW:
        yield Row("torch", "ok", f"{version} (supported: {supported})")
    else:
        yield Row("torch", "fail", f"{version}; supported: {supported}", "pip install -c constraints.txt torch")


def extras_rows() -> Iterator[Row]:
    """Which services this installation can run."""
    there = [name for name, package in EXTRAS.items() if importlib.util.find_spec(package)]
    missing = [name for name in ("gateway", "worker", "grammar") if name not in there]
    if missing:
        fix = f'pip install "v4mesh[{",".join(missing)}]"'
        yield Row("extras", "warn", f"installed: {', '.join(there) or 'none'}; missing: {', '.join(missing)}", fix)
    else:
        yield Row("extras", "ok", f"installed: {', '.join(there)}")


def gpu_row(device: str) -> Iterator[Row]:
    """What NVML sees, and whether CUDA_VISIBLE_DEVICES hides it."""
    count, detail = _nvml()
    wanted: Status = "fail" if device == "cuda" else "warn"
    hidden = environment().get("CUDA_VISIBLE_DEVICES")
    if count == 0:
        yield Row(
            "gpu", wanted if device == "cuda" else "ok", GPU_NONE if device == "cuda" else detail, "", int(Exit.GPU)
        )
    elif hidden is not None and not hidden.strip(" ,-1"):
        fact = f'NVML sees {count} GPUs, CUDA sees 0: CUDA_VISIBLE_DEVICES="{hidden}" is set (by: environment)'
        yield Row("gpu", wanted, fact, "unset CUDA_VISIBLE_DEVICES", int(Exit.GPU))
    else:
        yield Row("gpu", "ok", f"{count} visible ({detail}): serve on it with --device cuda")


def _nvml() -> tuple[int, str]:
    """(number of GPUs, what they are or why there is none)."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0, "none (driver library absent): everything runs on the CPU"
    if nvml.nvmlInit_v2() != 0:
        return 0, "none (the driver does not answer)"
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    names = []
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        nvml.nvmlDeviceGetName(handle, name, 96)
        names.append(name.value.decode(errors="replace"))
    nvml.nvmlShutdown()
    return count.value, ", ".join(dict.fromkeys(names)) or "none"


def cpu_rows() -> Iterator[Row]:
    """Cores this process may use, and free memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        yield Row("cores", "ok", f"{cores} usable")
    else:
        yield Row("cores", "warn", f"{cores} usable", "2 or more let gateway and worker run beside each other")
    memory = psutil.virtual_memory()
    fact = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < 2e9:
        yield Row("memory", "warn", fact, "the demo mesh needs about 2 GB")
    else:
        yield Row("memory", "ok", fact)


def model_rows(name: str | None) -> Iterator[Row]:
    """The model's files by name, size and header."""
    try:
        folder = find_model(name)
        problems = check_model_folder(folder)
    except ProblemsError as e:
        problems = list(e.problems)
    if not problems:
        yield Row("model", "ok", f"{folder} ({weight_bytes(folder) / 1e9:.2f} GB of weights)")
    for problem in problems:
        yield _from_problem("model", problem)


def port_row(host: str, port: int) -> Iterator[Row]:
    """Can the gateway listen?"""
    problems = check_port(host, port)
    if not problems:
        yield Row("port", "ok", f"{host}:{port} is free")
    for problem in problems:
        row = _from_problem("port", problem)
        yield Row("port", "warn", row.fact, row.fix)


def sockets_row() -> Iterator[Row]:
    """Is there a folder short enough for unix sockets, and writable?"""
    runtime = environment().get("XDG_RUNTIME_DIR")
    for parent in (runtime, tempfile.gettempdir()):
        if not parent or not os.access(parent, os.W_OK | os.X_OK):
            continue
        length = len(os.fsencode(Path(parent) / "v4mesh-xxxxxxxx")) + len(LONGEST_SOCKET_NAME)
        if length <= MAX_UNIX_PATH:
            yield Row("sockets", "ok", f"{parent} ({length} of {MAX_UNIX_PATH} bytes for a socket's path)")
            return
    yield Row("sockets", "fail", "no short writable folder for unix sockets", "v4mesh up --run-dir /short/path", 3)


def kernel_rows(pins: Sequence[str]) -> Iterator[Row]:
    """The worker's table of backends: packages found or not, then what computes each operation and why not better.

    Asked of a process of its own: it imports torch and every kernel package.
    """
    if importlib.util.find_spec("torch") is None:
        yield Row("kernels", "warn", "torch is not installed: nothing to choose from", 'pip install "v4mesh[worker]"')
        return
    line = [sys.executable, "-m", "worker_svc.ops.registry", *pins]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=PROBE_S)
        table = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        yield Row("kernels", "warn", f"probing the kernel packages failed: {type(error).__name__}", " ".join(line))
        return
    if "error" in table:
        yield Row("kernels", "fail", table["error"], "", int(Exit.USAGE))
        return
    for found in table["packages"]:
        fact = found["version"] or "found" if found["available"] else found["reason"]
        fix = "" if found["available"] else f"pip install {found['pip']}"
        yield Row(f"kernels: {found['name']}", "ok" if found["available"] else "warn", fact, fix)
    for op in table["ops"]:
        if op.get("error"):
            yield Row(f"op {op['op']}", "fail", op["error"], "", int(Exit.GPU))
            continue
        passed = "; ".join(f"not {name}: {why}" for name, why in op["passed_over"].items())
        pinned = " (pinned)" if op["pinned"] else ""
        slower = bool(op["passed_over"]) and table["chip"] > 0
        fact = f"{op['backend']}{pinned}{'; ' if passed else ''}{passed}"
        yield Row(f"op {op['op']}", "warn" if slower else "ok", fact, op["pip"])


def cache_row(model: str | None) -> Iterator[Row]:
    """Are the GPU's kernels compiled ahead, and is anything tuned? Asked of a process that imports torch."""
    try:
        folder = find_model(model)
    except ProblemsError:
        return  # the model's row says it
    line = [sys.executable, "-m", "worker_svc.precache", "--model", str(folder), "--where"]
    folders = folders_of_caches(environment())
    for option, name in (("--cache", "kernel_cache"), ("--autotune-cache", "autotune_cache")):
        line += [option, folders[name]] if name in folders else []
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=PROBE_S)
        found = json.loads(done.stdout.splitlines()[-1])
        problem, tuned = found.get("problem", ""), found["tuned"]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, KeyError) as error:
        yield Row("kernel cache", "warn", f"asking the worker failed: {type(error).__name__}", " ".join(line))
        return
    if problem:
        fact = f"a start compiles its kernels first, for minutes: {problem}"
        yield Row("kernel cache", "warn", fact, f"v4mesh precache {folder}")
    else:
        yield Row("kernel cache", "ok", f"covers this machine and model; tuned: {tuned}")


def _from_problem(name: str, problem: Problem) -> Row:
    return Row(name, "fail", problem.fact, problem.fix, int(problem.exit))
