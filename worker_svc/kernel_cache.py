"""The worker's side of the kernel cache: which folder belongs to this GPU and these versions, what is in it, and
whether anything was compiled since the worker was ready.

`open_cache` must run before any kernel package is imported: they read their variables then.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from meshkit.config import environment, export
from meshkit.kernel_cache import MANIFEST, default_folder, folder_variables

PACKAGES = (
    "torch",
    "triton",
    "tokenspeed-deepgemm",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "flashinfer-python",
    "humming-kernels",
    "apache-tvm-ffi",
)
WATCHED = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "HUMMING_CACHE_DIR")
SCHEMA = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """What compiled code depends on."""

    gpu: str
    chip: int
    cuda: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Folder name of a cache: readable, and different where anything is."""
        digest = hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=4).hexdigest()
        gpu = "".join(c if c.isalnum() else "-" for c in self.gpu.removeprefix("NVIDIA ").lower()) or "cpu"
        return f"{gpu}-sm{self.chip}-cu{self.cuda}-torch{self.packages.get('torch', '0').split('+')[0]}-{digest}"


def this_machine() -> Machine:
    """The GPU in use and the packages installed. Imports torch."""
    import torch

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return Machine("", 0, "", platform.python_version(), packages)
    major, minor = torch.cuda.get_device_capability()
    cuda = torch.version.cuda or ""
    return Machine(torch.cuda.get_device_name(), major * 10 + minor, cuda, platform.python_version(), packages)


def open_cache(folder: str, machine: Machine, *, fresh: bool = False) -> Path:
    """Point every package that compiles into this machine's folder under `folder` (default: the user's cache).

    A variable that is set already stays, and wins. `fresh`: an empty folder of its own, so that all is compiled again.
    """
    base = Path(folder) if folder else default_folder(environment())
    root = base / (machine.key if not fresh else f"{machine.key}-fresh-{os.getpid()}")
    root.mkdir(parents=True, exist_ok=True)
    export(folder_variables(root))
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a precache run left: for which machine and model shapes, which steps ran, how long it took."""

    machine: Machine
    model: str  # digest of the shapes that kernels were compiled for
    decode: tuple[int, ...]  # batch buckets
    chunks: tuple[int, ...]  # prefill chunk lengths
    seconds: float
    kernels: int
    failures: tuple[str, ...] = ()
    deterministic: bool = False  # its kernels too
    schema: int = SCHEMA

    def write(self, root: Path) -> None:
        """Replace the manifest of a cache at once."""
        partial = root / f"{MANIFEST}.part"
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(root / MANIFEST)


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of a cache; None if there is none that this version can read."""
    try:
        data = json.loads((root / MANIFEST).read_bytes())
        data["machine"] = Machine(**data["machine"])
        for name in ("decode", "chunks", "failures"):
            data[name] = tuple(data[name])
        found = Manifest(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.schema == SCHEMA else None


def shape_digest(config: Mapping[str, object]) -> str:
    """Digest of everything in a config.json that kernels are compiled for; names and token ids are not."""
    dropped = ("architectures", "transformers_version", "bos_token_id", "eos_token_id", "torch_dtype", "vocab_size")
    kept = {name: value for name, value in config.items() if name not in dropped}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def mismatch(manifest: Manifest | None, machine: Machine, model: str, *, deterministic: bool = False) -> str:
    """Why a cache does not cover this machine, model and mode; empty if it does."""
    if manifest is None:
        return "there is no manifest: run `v4mesh precache`"
    if manifest.machine != machine:
        changed = [n for n in ("gpu", "chip", "cuda", "python") if getattr(manifest.machine, n) != getattr(machine, n)]
        ours, theirs = machine.packages, manifest.machine.packages
        changed += sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        return f"it was made for another machine ({', '.join(changed)} differ)"
    if manifest.model != model:
        return "it was made for a model of other shapes"
    if deterministic and not manifest.deterministic:
        return "it was made without deterministic mode: run `v4mesh precache --deterministic`"
    return f"{len(manifest.failures)} steps failed when it was made" if manifest.failures else ""


class CompileWatch:
    """Counts kernels that appear in the caches: after `ready`, each is a compile while serving, and a fault.

    Every package makes one folder per kernel, so counting names is enough, and takes microseconds per hundred.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = dict(roots)
        self._known: set[str] = set()
        self.total = 0  # compiles told of so far

    @staticmethod
    def of_environment() -> CompileWatch:
        """The caches that this process's packages write to."""
        environ = environment()
        folders = {
            name: environ.get(name, "") for name in ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "HUMMING_CACHE_DIR")
        }
        return CompileWatch({name: Path(folder) for name, folder in folders.items() if folder})

    def ready(self) -> int:
        """Take what is there as known; how many kernels that is."""
        self._known = self._names()
        return len(self._known)

    def new(self, *, expected: bool = False) -> int:
        """Kernels since `ready` or the last call; each is a warning, unless it is `expected`."""
        names = self._names()
        fresh = sorted(names - self._known)
        self._known |= names
        for name in fresh:
            if expected:
                log.debug("compiled %s", name)
            else:
                log.warning("a kernel was compiled while serving: %s", name)
        self.total += len(fresh)
        return len(fresh)

    def _names(self) -> set[str]:
        names: set[str] = set()
        for variable, root in self._roots.items():
            for folder in (root, root / "cache"):
                try:
                    names.update(f"{variable}:{entry.name}" for entry in os.scandir(folder) if entry.is_dir())
                except OSError:
                    continue
        return names
