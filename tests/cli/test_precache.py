"""`v4mesh precache`: what is asked of the worker, the archive around it, refusals."""

import json
import subprocess
from pathlib import Path

import pytest

from meshkit.cli import precache
from meshkit.cli.main import main
from meshkit.exit_codes import Exit
from meshkit.kernel_cache import MANIFEST, TUNED


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A worker that compiles in no time; the lines it was called with."""
    lines: list[list[str]] = []
    root = tmp_path / "root"

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        lines.append(line[3:])
        root.mkdir(exist_ok=True)
        found = {"root": str(root), "tuned": "nothing: run `v4mesh precache MODEL --tune`"}
        if "--tune" in line:
            choices = ["fp8_gemm.skinny_rows: 8 42, 16 30 us -> 16 (1.40 x as fast)"]
            found |= {"choices": choices, "tuned": "1 of 12 choices tuned, 2026-11-30"}
            (root / TUNED).write_text("{}")
        if "--where" not in line:
            (root / MANIFEST).write_text("{}")
            found |= {"seconds": 1.5, "compiled": 3, "kernels": 3}
        there = (root / MANIFEST).exists()
        found |= {} if there else {"problem": "there is no manifest"}
        said = f"a log line\n{json.dumps(found)}\n"
        return subprocess.CompletedProcess(line, 0 if there else 9, stdout=said)

    monkeypatch.setattr(precache.subprocess, "run", run)
    return lines


def test_compile_pack_and_unpack(worker: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    archive = str(tmp_path / "cache.tar.gz")
    assert main(["precache", "--check"]) == Exit.THRESHOLD
    pins = "top_entries=flashinfer,fp8_gemm=triton"
    assert main(["precache", "--slots", "8", "--deterministic", "--kernel", pins, "--pack", archive]) == 0
    out = capsys.readouterr().out
    assert "compiled   3" in out and "covers this machine and model" in out
    assert worker[-1][worker[-1].index("--slots") + 1] == "8" and "--deterministic" in worker[-1]
    assert worker[-1][worker[-1].index("--kernel") + 1] == pins and "--kernel" not in worker[0]
    (tmp_path / "root" / MANIFEST).unlink()
    assert main(["precache", "--unpack", archive, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["root"] == str(tmp_path / "root")


def test_tuning_is_told_choice_by_choice_and_travels_with_the_cache(
    worker: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    archive = str(tmp_path / "cache.tar.gz")
    assert main(["precache", "--tune", "--pack", archive]) == 0
    out = capsys.readouterr().out
    assert "fp8_gemm.skinny_rows: 8 42, 16 30 us -> 16 (1.40 x as fast)" in out
    assert "tuned      1 of 12 choices tuned, 2026-11-30" in out and "--tune" in worker[-1]
    (tmp_path / "root" / TUNED).unlink()
    assert main(["precache", "--unpack", archive]) == 0 and (tmp_path / "root" / TUNED).exists()
    assert main(["precache", "--check"]) == 0
    assert "tuned      nothing: run `v4mesh precache MODEL --tune`" in capsys.readouterr().out
    assert "--tune" not in worker[-1]
    assert main(["precache", "--check", "--tune"]) == Exit.USAGE
    assert main(["precache", "--unpack", archive, "--tune"]) == Exit.USAGE


def test_the_guides_folders_are_shared_with_serve(worker: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPGEMM_CACHE_DIR", "/cache/kernels")
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_CACHE_DIR", "/cache/tuned")
    assert main(["precache"]) == 0
    assert worker[-1][worker[-1].index("--cache") + 1] == "/cache/kernels"
    assert worker[-1][worker[-1].index("--autotune-cache") + 1] == "/cache/tuned"
    assert main(["precache", "--cache-dir", "/mine"]) == 0
    assert worker[-1][worker[-1].index("--cache") + 1] == "/mine", "what is typed comes first"


@pytest.mark.usefixtures("worker")
def test_a_bad_archive_is_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.tar.gz").write_bytes(b"nothing")
    assert main(["precache", "--unpack", str(tmp_path / "bad.tar.gz")]) == Exit.CONFIG
    assert "bad.tar.gz" in capsys.readouterr().err
    assert main(["precache", "--unpack", "x", "--check"]) == Exit.USAGE


@pytest.mark.parametrize(("status", "ends"), [(4, Exit.GPU), (1, Exit.BUG), (0, Exit.BUG)])
def test_a_worker_that_cannot_ends_with_its_status(status: int, ends: Exit, monkeypatch: pytest.MonkeyPatch):
    done = subprocess.CompletedProcess([], status, stdout="")
    monkeypatch.setattr(precache.subprocess, "run", lambda line, **_: done)
    assert main(["precache"]) == ends
