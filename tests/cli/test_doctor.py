"""`v4mesh doctor`, `config` and `health`: verdicts, values with their source, probes."""

import json
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from meshkit.cli import doctor
from meshkit.cli.main import main
from meshkit.exit_codes import Exit
from meshkit.models import DEFAULT_MODEL
from tests.cli.conftest import Script


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *args])
    report = json.loads(capsys.readouterr().out)
    assert report["exit"] == status
    return status, {row["name"]: row for row in report["rows"]}


def test_a_machine_that_runs_these_tests_is_fit(capsys: pytest.CaptureFixture[str]):
    status, found = rows(capsys)
    assert status == 0
    assert set(found) == {"python", "torch", "extras", "gpu", "cores", "memory", "model", "port", "sockets"}
    assert str(DEFAULT_MODEL) in found["model"]["fact"]
    assert metadata.version("torch") in found["torch"]["fact"]


def test_the_table_has_marks_and_a_summary(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "✓ python" in out
    assert "0 to fix" in err


@pytest.mark.parametrize(("version", "status"), [("2.13.0+cpu", "ok"), ("2.10.1", "fail"), ("2.15.0", "fail")])
def test_torch_is_compared_with_what_is_supported(version: str, status: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    (row,) = doctor.torch_row()
    assert row.status == status
    assert version in row.fact


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    (row,) = doctor.torch_row()
    assert (row.status, row.fix) == ("fail", 'pip install "v4mesh[cpu]"')


def test_a_gpu_that_is_asked_for_and_absent_ends_with_4(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "_nvml", lambda: (0, "none"))
    status, found = rows(capsys, "--device", "cuda")
    assert status == Exit.GPU
    assert "no NVIDIA GPU is visible" in found["gpu"]["fact"]
    assert "--device cpu" in found["gpu"]["fact"]


def test_hidden_gpus_are_told_from_absent_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_nvml", lambda: (8, "NVIDIA H200"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (row,) = doctor.gpu_row("cuda")
    assert 'NVML sees 8 GPUs, CUDA sees 0: CUDA_VISIBLE_DEVICES="" is set' in row.fact
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (row,) = doctor.gpu_row("cpu")
    assert (row.status, "8 visible (NVIDIA H200)" in row.fact) == ("ok", True)


@pytest.mark.parametrize(
    ("said", "status", "fact", "fix"),
    [
        ({"tuned": "3 of 13 choices tuned, 2026-11-30"}, "ok", "covers this machine and model; tuned: 3 of 13", ""),
        (
            {"tuned": "nothing", "problem": "there is no manifest"},
            "warn",
            "for minutes: there is no manifest",
            "precache",
        ),
        ({}, "warn", "asking the worker failed: KeyError", "worker_svc.precache"),
    ],
)
def test_the_kernel_cache_of_a_gpu_is_told(
    said: dict[str, str], status: str, fact: str, fix: str, monkeypatch: pytest.MonkeyPatch
):
    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--where" in line and str(DEFAULT_MODEL) in line and line[-2:] == ["--cache", "/cache/kernels"]
        return subprocess.CompletedProcess(line, 9, stdout="a line\n" + json.dumps(said) + "\n")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setenv("DEEPGEMM_CACHE_DIR", "/cache/kernels")
    (row,) = doctor.cache_row(None)
    assert row.status == status and fact in row.fact and fix in row.fix
    assert list(doctor.cache_row("/nonexistent/model")) == []


def test_a_model_that_is_not_there_ends_with_6(capsys: pytest.CaptureFixture[str]):
    status, found = rows(capsys, "--model", "/nonexistent/model")
    assert status == Exit.MODEL
    assert "/nonexistent/model" in found["model"]["fact"]


def test_a_busy_port_is_only_to_know(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, found = rows(capsys, "--port", str(taken.getsockname()[1]))
    assert (status, found["port"]["status"]) == (0, "warn")


def test_config_show_says_where_each_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "mesh.toml"
    file.write_text("[up]\nport = 9000\n\n[scheduler]\ndepth = 2\n")
    monkeypatch.setenv("V4MESH_WORKER_SLOTS", "4")
    assert main(["--config", str(file), "config", "show", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert sections["up"]["port"] == {"value": 9000, "source": f"{file}:2"}
    assert sections["scheduler"]["depth"] == {"value": 2, "source": f"{file}:5"}
    assert sections["worker"]["slots"] == {"value": 4, "source": "env V4MESH_WORKER_SLOTS"}
    assert sections["up"]["host"] == {"value": "127.0.0.1", "source": "default"}
    assert main(["--config", str(file), "config", "show", "--diff-default", "--section", "up"]) == 0
    assert capsys.readouterr().out.splitlines() == ["[up]", f"port = {'9000':24}  # {file}:2"]


def test_config_check_reports_every_section_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mesh.toml"
    file.write_text('[worker]\nkv_cache_dtyp = "fp8"\n[gateway]\nencode_threads = 0\n')
    assert main(["--config", str(file), "config", "check"]) == Exit.CONFIG
    err = capsys.readouterr().err
    assert f"unknown option kv_cache_dtyp in [worker] ({file}:2). Nearest: kv_cache_dtype" in err
    assert "encode_threads = 0" in err
    file.write_text("[gateway]\nencode_threads = 2\n")
    assert main(["--config", str(file), "config", "check"]) == 0


def test_the_file_may_be_named_by_a_variable_or_lie_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v4mesh.toml").write_text("[up]\nport = 1234\n")
    assert main(["config", "show", "--section", "up"]) == 0
    assert "1234" in capsys.readouterr().out
    (tmp_path / "other.toml").write_text("[up]\nport = 4321\n")
    monkeypatch.setenv("V4MESH_CONFIG", str(tmp_path / "other.toml"))
    assert main(["config", "show", "--section", "up"]) == 0
    assert "4321" in capsys.readouterr().out


def test_the_schema_names_every_section_and_key(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"up", "gateway", "scheduler", "worker"} <= set(schema["properties"])
    up = schema["$defs"]["UpConfig"]
    assert {"model", "host", "port"} <= set(up["properties"])
    assert not up["additionalProperties"]


def test_health_of_a_gateway_and_of_the_mesh_behind_it(server: Script, capsys: pytest.CaptureFixture[str]):
    assert main(["health", "gateway", "--target", server.url]) == 0
    assert main(["health", "mesh", "--target", server.url]) == 1
    assert "/ready answered 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("service", "target"), [("gateway", "http://127.0.0.1:9"), ("worker", "unix:/nonexistent.sock")]
)
def test_health_of_nobody_is_1(service: str, target: str, capsys: pytest.CaptureFixture[str]):
    assert main(["health", service, "--target", target]) == 1
    assert f"{service} at {target}: " in capsys.readouterr().err


def _answer(monkeypatch: pytest.MonkeyPatch, stdout: str) -> list[list[str]]:
    """Doctor's question about kernels gets this answer; what it asked."""
    asked: list[list[str]] = []

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(line)
        return subprocess.CompletedProcess(line, 0, stdout=stdout, stderr="")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    return asked


def test_kernels_are_listed_with_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    package = {"name": "humming", "available": False, "version": "", "reason": "not installed", "pip": "humming==1"}
    op = {"op": "experts", "backend": "torch", "pinned": False, "passed_over": {"humming": "not installed"}}
    op["pip"] = "pip install humming==1"
    table = {"chip": 90, "packages": [package], "ops": [op]}
    asked = _answer(monkeypatch, json.dumps(table))
    status, found = rows(capsys, "--kernels", "--kernel", "experts=torch")
    assert status == 0 and asked[0][-1] == "experts=torch"
    assert found["kernels: humming"]["fix"] == "pip install humming==1"
    assert found["op experts"]["fact"] == "torch; not humming: not installed"


def test_a_pin_that_cannot_run_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    error = "--kernel experts=humming: no NVIDIA GPU"
    table = {"chip": 0, "packages": [], "ops": [{"op": "experts", "error": error}]}
    _answer(monkeypatch, json.dumps(table))
    status, found = rows(capsys, "--kernels")
    assert status == Exit.GPU and found["op experts"]["fact"] == error


@pytest.mark.parametrize("said", ["", "Traceback", json.dumps({"error": "--kernel x=y: no operation 'x'"})])
def test_a_failed_probe_is_a_row(said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    _answer(monkeypatch, said)
    _, found = rows(capsys, "--kernels")
    assert found["kernels"]["status"] in ("warn", "fail")
