"""Which backend computes each operation of the GPU forward: what was found, why not, what was chosen, what is pinned.

An operation has an ordered list of backends; the first that can run on this machine is chosen once, at start. A pin
(`--kernel op=backend`) takes one of the list and fails, with the reason and the pip line, if it cannot run. Probing
imports packages, and asks torch for the GPU; importing this module does neither.
`python -m worker_svc.ops.registry [op=backend ...]` prints the whole table as JSON.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

HOPPER, BLACKWELL = 90, 100


@dataclass(frozen=True, slots=True)
class Package:
    """Something to import. `pip` is the exact requirement that was tested; `chips` the SM versions it runs on."""

    module: str
    distributions: tuple[str, ...]
    pip: str
    chips: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capability:
    """What probing one package gave. `reason` says why it is not available."""

    name: str
    available: bool
    version: str = ""
    reason: str = ""
    pip: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One operation: its backend, whether a pin chose it, and why each better one was passed over."""

    op: str
    backend: str
    pinned: bool
    passed_over: dict[str, str]
    pip: str  # what to install for the first choice, if that is missing


class KernelError(ValueError):
    """A pin that names no operation or backend, or a backend that cannot run here."""


PACKAGES: Mapping[str, Package] = {
    "triton": Package("triton", ("triton",), "triton==3.6.0", (HOPPER, BLACKWELL)),
    "deep_gemm": Package(
        "deep_gemm",
        ("tokenspeed-deepgemm", "sgl-deep-gemm", "deep-gemm"),
        "tokenspeed-deepgemm==2.5.0.post20260629",
        (HOPPER, BLACKWELL),
    ),
    "flash_mla": Package(
        "flash_mla", ("sgl-flash-mla", "tokenspeed-flashmla"), "--no-deps sgl-flash-mla==1.0.0", (HOPPER, BLACKWELL)
    ),
    "flashinfer": Package("flashinfer", ("flashinfer-python",), "flashinfer-python==0.6.18.post1", (HOPPER, BLACKWELL)),
    "humming": Package("humming", ("humming-kernels",), "humming-kernels==0.1.20", (HOPPER, BLACKWELL)),
    "nvrtc": Package("cuda.bindings.nvrtc", ("cuda-bindings",), "cuda-bindings", (HOPPER,)),
    "xgrammar": Package("xgrammar", ("xgrammar",), "xgrammar==0.2.9"),
}

# Best first. "torch" runs anywhere; on a GPU it is for checks: some of it waits for the device, so no graph holds it.
# With one backend there is nothing to pin: that is what the operation runs on a GPU, and on the CPU it is torch.
OPS: Mapping[str, tuple[str, ...]] = {
    "fp8_gemm": ("deep_gemm", "triton", "torch"),
    "bf16_gemm": ("deep_gemm", "torch", "triton"),  # unpinned, the number of rows decides: see ops.bf16_gemm
    "experts": ("humming", "torch"),
    "large_experts": ("nvrtc", "humming"),  # steps of many tokens: our own product on humming's weights
    "sparse_attention": ("flash_mla", "triton", "torch"),
    "index_scores": ("deep_gemm", "triton", "torch"),
    "paged_attention": ("triton",),
    "top_entries": ("triton", "flashinfer"),
    "latent_rows": ("triton",),
    "query_heads": ("triton",),
    "compress_step": ("triton",),
    "attention_output": ("triton",),
    "kv_rows": ("triton",),
    "step_lists": ("triton",),
    "slot_step": ("triton",),
    "hyper_boundary": ("triton", "torch"),
    "topk_gate": ("triton", "torch"),
    "expert_sort": ("triton", "torch"),
    "swiglu_middle": ("triton", "torch"),
    "quant_fp8": ("triton", "torch"),
    "skinny_gemm": ("triton", "torch"),
    "sample": ("triton", "torch"),
}

_pins: dict[str, str] = {}
_required: dict[str, str] = {}
"""By `ops.invariant`, of which no pin is another."""


@functools.cache
def probe(name: str) -> Capability:
    """Import one package of PACKAGES and say what came of it. Never raises."""
    package = PACKAGES[name]
    owners = [d for d in package.distributions if _version(d)]
    if len(owners) > 1:
        return Capability(name, False, "", f"{' and '.join(owners)} both install {package.module}", package.pip)
    version = _version(owners[0]) if owners else ""
    try:
        importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        missing = error.name or package.module
        reason = "not installed" if missing.split(".")[0] == package.module else f"needs the Python module {missing}"
        return Capability(name, False, version, reason, package.pip)
    except (ImportError, OSError, AssertionError, RuntimeError, AttributeError) as error:
        return Capability(name, False, version, _why(error), package.pip)
    return Capability(name, True, version, "", package.pip)


def _why(error: Exception) -> str:
    """One short line of an import that failed; the usual one gets its meaning in front."""
    text = " ".join(str(error).split())[:160] or "no message"
    if "CUDAErrorLogCapture" in text or "undefined symbol" in text:
        return f"built for another torch: {text}"
    return f"{type(error).__name__}: {text}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def chip() -> int:
    """SM version of the GPU (90: Hopper), 0 if there is none to use."""
    try:
        import torch
    except ImportError:
        return 0
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def pin_words(text: str) -> list[str]:
    """OP=BACKEND,... as single words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_pins(pins: Iterable[str]) -> dict[str, str]:
    """op=backend words -> a mapping; raises KernelError naming what there is."""
    found = {}
    for pin in pins:
        op, _, backend = pin.partition("=")
        if op not in OPS:
            raise KernelError(f"--kernel {pin}: no operation {op!r}; there are: {', '.join(OPS)}")
        if backend not in OPS[op]:
            raise KernelError(f"--kernel {pin}: {op} has the backends {', '.join(OPS[op])}")
        found[op] = backend
    return found


def pin(pins: Iterable[str]) -> None:
    """Pin backends for this process; every pinned one must be able to run. Call once, before weights are loaded."""
    chosen = parse_pins(pins)
    for op in chosen:
        choose(op, chosen)
    _pins.clear()
    _pins.update(chosen)
    backend.cache_clear()


def pinned(op: str) -> str:
    """The pin of an operation, or nothing."""
    return _pins.get(op, "")


def require(chosen: Mapping[str, str]) -> None:
    """These backends whatever comes first in the table, until the next call; see `ops.invariant`."""
    _required.clear()
    _required.update(chosen)
    backend.cache_clear()


def required() -> dict[str, str]:
    """What `require` was last told."""
    return dict(_required)


def choose(op: str, pins: Mapping[str, str]) -> Choice:
    """The backend of one operation; KernelError if it is pinned to one that cannot run."""
    wanted = pins.get(op)
    passed: dict[str, str] = {}
    first = probe(OPS[op][0]) if OPS[op][0] in PACKAGES else None
    pip = f"pip install {first.pip}" if first is not None and not first.available else ""
    for name in (wanted,) if wanted else OPS[op]:
        reason = obstacle(name)
        if not reason:
            return Choice(op, name, wanted is not None, passed, pip)
        passed[name] = reason
    if wanted is None:
        return Choice(op, "torch", False, passed, pip)
    name, reason = next(iter(passed.items()))
    fix = f"; pip install {PACKAGES[name].pip}" if not probe(name).available else ""
    raise KernelError(f"--kernel {op}={name}: {reason}{fix}")


def obstacle(name: str) -> str:
    """Why a backend cannot run here; empty if it can."""
    if name == "torch":
        return ""
    if chip() == 0:
        return "no NVIDIA GPU"
    chips = PACKAGES[name].chips
    if chips and chip() // 10 not in [c // 10 for c in chips]:
        return f"not for SM {chip()} (it runs on {', '.join(map(str, chips))})"
    found = probe(name)
    return "" if found.available else found.reason


@functools.cache
def backend(op: str) -> str:
    """The chosen backend's name, pins and requirements applied."""
    return choose(op, _pins | _required).backend


def on_kernel(op: str, is_cuda: bool) -> bool:
    """True if an operation on such tensors is our kernel's: not on the CPU, and not where torch is pinned."""
    return is_cuda and backend(op) == "triton"


def table(pins: Iterable[str] = ()) -> dict[str, object]:
    """Everything for `doctor`: the GPU, packages, and a choice per operation (or the error of its pin)."""
    chosen = parse_pins(pins)
    ops = []
    for op in OPS:
        try:
            ops.append(asdict(choose(op, chosen)))
        except KernelError as error:
            ops.append({"op": op, "backend": "", "pinned": True, "passed_over": {}, "pip": "", "error": str(error)})
    return {"chip": chip(), "packages": [asdict(probe(name)) for name in PACKAGES], "ops": ops}


def main(argv: list[str]) -> int:
    """Print the table as one JSON line."""
    try:
        sys.stdout.write(json.dumps(table(argv)) + "\n")
    except KernelError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
