"""From process start to ready on a GPU, Flash-shaped layers, kernel caches empty and packed; and what precache costs.

    python -m benchmarks._gpu_coldstart FOLDER CACHE

is one start: a worker's own loading code over a config and weights drawn on the device in place of files, so that
"beyond weight loading" means what it says. It prints a JSON line.
"""
# mypy: disallow-untyped-calls=False

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from meshkit.config import environment

SLOTS, LIMIT_S = 64, 540
STAGES = ("empty", "precache", "packed")


def start(folder: Path, cache: str) -> dict[str, Any]:
    """Load as a worker does; seconds since this process began, in parts."""
    born = psutil.Process().create_time()
    import torch

    from benchmarks._gpu_model import RandomSource
    from worker_svc.checkpoint.config import V4Config
    from worker_svc.config import WorkerConfig
    from worker_svc.gpu import loading
    from worker_svc.kernel_cache import CompileWatch
    from worker_svc.sampling import VocabRules

    laps = {"imports": time.time() - born}
    begin = time.perf_counter()
    config = WorkerConfig(device="cuda", model=str(folder), kernel_cache=cache, slots=SLOTS)
    device = loading.gpu()
    torch.zeros(1, device=device)
    covered = loading.prepare_kernels(config, folder)
    watch = CompileWatch.of_environment()
    known = watch.ready()
    shape = V4Config.load(folder)
    laps["device"] = time.perf_counter() - begin
    rules = VocabRules(vocab_size=shape.vocab_size, eos_ids=(shape.eos_token_id,))
    loading.from_source(config, folder, RandomSource(shape, device), device, rules, laps, covered)
    ready = time.time() - born
    return laps | {
        "ready": ready,
        "beyond_weights": ready - laps["weights"],
        "covered": covered,
        "known": known,
        "compiled": watch.new(expected=True),
    }


def measure(config: Any, report: Any, caches: Path | None = None, stages: Sequence[str] = STAGES) -> None:
    """A start with empty caches; precache over what that left, deterministic mode and tuning too, packed; a start from
    the unpacked file.

    The caches are `first` and `second` in the folder `caches`, if given: what one run leaves, another's stages find.
    """
    with tempfile.TemporaryDirectory() as name:
        home, kept = Path(name), caches or Path(name)
        folder = home / "flash8"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        if "empty" in stages:
            _row(report, "empty", _child([str(folder), str(kept / "first")]))
        mesh = [sys.executable, "-m", "meshkit.cli", "precache", str(folder), "--slots", str(SLOTS)]
        archive = kept / "kernels.tar.gz"
        if "precache" in stages:
            first = ["--cache-dir", str(kept / "first"), "--deterministic", "--tune", "--pack", str(archive)]
            _command(report, "precache", [*mesh, *first], archive)
        if "packed" in stages:
            _command(report, "unpack", [*mesh, "--cache-dir", str(kept / "second"), "--unpack", str(archive)], archive)
            _row(report, "packed", _child([str(folder), str(kept / "second")]))


def _command(report: Any, what: str, line: list[str], archive: Path) -> None:
    begin = time.perf_counter()
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=_environment(), timeout=LIMIT_S)
    seconds = time.perf_counter() - begin
    size = archive.stat().st_size / 1e6 if archive.exists() else 0.0
    report.row("coldstart", what=what, status=done.returncode, seconds=seconds, megabytes=size)
    for said in (line for line in done.stdout.splitlines() if not line.startswith("cache")):  # a path of this machine
        report.row("coldstart", said=said[:300])


def _row(report: Any, caches: str, found: dict[str, Any]) -> None:
    report.row("coldstart", caches=caches, **found)
    for key in ("ready", "beyond_weights", "compiled"):
        report.metrics[f"coldstart_{caches}_{key}"] = round(found[key], 2)


def _child(args: list[str]) -> dict[str, Any]:
    line = [sys.executable, "-m", "benchmarks._gpu_coldstart", *args]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=_environment(), timeout=LIMIT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    """Ours without what names cache folders: `--kernel-cache` decides."""
    from meshkit.kernel_cache import VARIABLES

    kept = {name: value for name, value in environment().items() if name not in VARIABLES}
    return kept | {"PYTHONPATH": ":".join(filter(None, sys.path))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(start(Path(sys.argv[1]), sys.argv[2])) + "\n")
