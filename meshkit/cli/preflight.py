"""What can fail at start is checked here first, all of it at once, before the first byte of weights.

Each check returns the problems it sees; `up` reports them together and starts nothing while there is one.
"""

import importlib.util
import json
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from meshkit.address import MAX_UNIX_PATH, Address
from meshkit.address import check_port as _check_port
from meshkit.api_keys import read_api_keys
from meshkit.cli.model_folder import cpu_bytes, weight_bytes
from meshkit.errors import ConfigError, PortError
from meshkit.exit_codes import Exit, Problem, ProblemsError
from meshkit.numerics_names import FOREIGN_SCHEMES
from meshkit.own_folder import make_own_folder

NEEDED = {"worker": "torch", "gateway": "aiohttp"}
COMPILER = "xgrammar"  # what the grammar service needs
LONGEST_SOCKET_NAME = "/scheduler.sock"
_NO_RUN_DIR = "leave --run-dir out, or name a folder that is not there yet"


def has_compiler() -> bool:
    """Can a grammar service run here? Looked up, not imported."""
    return importlib.util.find_spec(COMPILER) is not None


def check_extras(*, grammar: bool = False) -> list[Problem]:
    """Are the packages there that the services import? Looked up, not imported. `grammar`: that service is wanted."""
    return [
        Problem(
            "EXTRA",
            Exit.USAGE,
            f"the {service} needs the package {package}, which is not installed",
            f'pip install "v4mesh[{service}]"',
        )
        for service, package in (NEEDED | ({"grammar": COMPILER} if grammar else {})).items()
        if importlib.util.find_spec(package) is None
    ]


def check_port(host: str, port: int) -> list[Problem]:
    """Can we listen there? Names the process that already does, as far as we may see it."""
    try:
        _check_port(Address(host.strip("[]"), port))
    except PortError as e:
        fact, _, fix = e.message.partition(". ")
        if not fix:
            denied = isinstance(e.__cause__, PermissionError)
            fix = "a port above 1023" if denied else "--host: an address of this machine, or 0.0.0.0 for all of them"
        return [Problem("PORT", Exit.PORT, fact, fix)]
    return []


def free_port(host: str) -> int:
    """A port nobody uses at this moment."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def check_memory(model: Path) -> list[Problem]:
    """Do the weights fit into what is free, before any KV? The worker does the exact sum once it knows its layout."""
    import psutil

    weights, free = cpu_bytes(model), int(psutil.virtual_memory().available)
    if weights <= free:
        return []
    details = (
        f"weights in FP32    {weights / 1e9:8.1f} GB   ({weight_bytes(model) / 1e9:.1f} GB of files, dequantised)",
        f"available memory   {free / 1e9:8.1f} GB   short by {(weights - free) / 1e9:.1f} GB before any KV",
    )
    fact = f"{model.name} does not fit into this machine's memory"
    return [Problem("MEMORY", Exit.MEMORY, fact, "a machine with more memory, or the demo model: v4mesh up", details)]


def check_gpu_memory(model: Path) -> list[Problem]:
    """Does the model fit on the GPU in this machine, served with the usual sizes? The worker does the exact sum."""
    from meshkit.cli.plan import present, refusal
    from meshkit.memory_plan import Shape, plan

    card = present()
    try:
        shape = Shape.of(read_model_config(model))
    except ValueError as e:
        return [Problem("MODEL", Exit.MODEL, str(e))]
    if card is None:
        return [Problem("GPU_NONE", Exit.GPU, "--device cuda: no NVIDIA GPU is visible here", "--device cpu")]
    found = plan(shape, card[1], slots=64, step_tokens=8192)
    return [] if found.fits else [refusal(found, model.name, card[0], 1)]


def check_api_keys(path: str) -> list[Problem]:
    """Can the gateway read its keys? Nothing to say where none are wanted."""
    if not path:
        return []
    try:
        read_api_keys(Path(path))
    except ConfigError as e:
        return [Problem(e.code, Exit(e.exit_code), e.message)]
    return []


def check_scheme(model: Path, scheme: str) -> list[Problem]:
    """compressed-tensors is a format of the checkpoint, not a switch: refuse it for any other checkpoint."""
    if scheme.lower() not in FOREIGN_SCHEMES:
        return []
    held = read_model_config(model).get("quantization_config")
    method = held.get("quant_method") if isinstance(held, dict) else None
    if method == scheme.lower():
        fact = f"this checkpoint is in the {method} format, whose loader is not built yet"
        return [Problem("FLAG", Exit.CONFIG, f"--quantization {scheme}: {fact}", "use DeepSeek's original checkpoint")]
    fact = f"--quantization {scheme}: this checkpoint's format is {method}"
    return [Problem("FLAG", Exit.CONFIG, fact, "leave the flag out: native formats are found without it")]


def read_model_config(model: Path) -> dict[str, Any]:
    """config.json, or nothing: `check_model_folder` says what is wrong with it."""
    try:
        data = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def make_run_folder(wanted: str | None, runtime_dir: str | None) -> Path:
    """A private folder for sockets: `wanted`, else a fresh one under the user's runtime folder or the temp folder.

    Raises ProblemsError where `wanted` is no folder in which files can be made; the rest is `check_run_folder`'s.
    """
    if wanted:
        folder = Path(wanted).absolute()
        if problems := _length_problems(folder):
            raise ProblemsError(problems)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as e:
            fact = f"--run-dir {wanted} is no folder for sockets: {e.strerror}"
            raise ProblemsError(Problem("RUN_DIR", Exit.CONFIG, fact, _NO_RUN_DIR)) from e
    for parent in (runtime_dir, tempfile.gettempdir(), "/tmp"):
        if parent and os.access(parent, os.W_OK | os.X_OK) and _fits(Path(parent) / "v4mesh-xxxxxxxx"):
            return make_own_folder(Path(parent))
    return make_own_folder(Path(tempfile.gettempdir()))


def check_run_folder(folder: Path) -> list[Problem]:
    """Ours, closed to others, and short enough for a unix socket's path."""
    problems = []
    info = folder.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        fact = f"{folder} is open to others (owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o})"
        fix = f"{_NO_RUN_DIR}; where it is yours alone: chmod 700 {folder}"
        problems.append(Problem("RUN_DIR", Exit.CONFIG, fact, fix))
    return [*problems, *_length_problems(folder)]


def _length_problems(folder: Path) -> list[Problem]:
    if _fits(folder):
        return []
    length = len(os.fsencode(folder)) + len(LONGEST_SOCKET_NAME)
    fact = f"{folder} is too long for a unix socket: {length} bytes with the socket's name, {MAX_UNIX_PATH} fit"
    return [Problem("RUN_DIR", Exit.CONFIG, fact, "give a short --run-dir, such as /tmp/v4mesh")]


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + len(LONGEST_SOCKET_NAME) <= MAX_UNIX_PATH
