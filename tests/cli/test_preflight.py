"""What is refused before anything starts: every problem at once, each with a fact and what to do."""

import contextlib
import json
import os
import shutil
import socket
import struct
from pathlib import Path

import pytest

from meshkit.cli import plan, preflight
from meshkit.cli.main import main
from meshkit.cli.mesh import listening
from meshkit.cli.model_folder import check_model_folder, cpu_bytes, find_model
from meshkit.cli.up import UpConfig, make_plan
from meshkit.exit_codes import Exit, ProblemsError
from meshkit.models import DEFAULT_MODEL
from meshkit.numerics_names import FOREIGN_SCHEMES, KV_DTYPES, SCHEMES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model without its bulk: the real header, the data as a hole of the right size."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "v4mesh.json"):
        shutil.copy(DEFAULT_MODEL / name, folder)
    real = DEFAULT_MODEL / "model.safetensors"
    with real.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length) + header)
        file.truncate(real.stat().st_size)
    return folder


def facts(folder: Path) -> list[str]:
    return [p.fact for p in check_model_folder(folder)]


def test_the_demo_model_has_no_problem():
    assert find_model(None) == DEFAULT_MODEL
    assert check_model_folder(DEFAULT_MODEL) == []
    assert make_plan(UpConfig(), None).name == "v4-nano"


def test_a_folder_without_config_points_at_the_model_inside(model: Path):
    with pytest.raises(ProblemsError) as refused:
        find_model(str(model.parent))
    (problem,) = refused.value.problems
    assert (problem.code, problem.exit) == ("MODEL_DIR", Exit.MODEL)
    assert f"{model.parent} has no config.json. It holds: model/" in problem.fact
    assert f"Did you mean {model}?" in problem.fact


def test_a_hub_id_is_found_in_the_cache_and_never_downloaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config = UpConfig(model="deepseek-ai/DeepSeek-V4-Flash")
    with pytest.raises(ProblemsError) as refused:
        make_plan(config, None)
    (problem,) = refused.value.problems
    assert "no model deepseek-ai/DeepSeek-V4-Flash on this machine; nothing is downloaded" in problem.fact
    repository = tmp_path / "hub" / "models--deepseek-ai--DeepSeek-V4-Flash"
    shutil.copytree(model, repository / "snapshots" / "8a1f")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("8a1f")
    plan = make_plan(config, None)
    assert plan.model == repository / "snapshots" / "8a1f"
    assert plan.name == "deepseek-ai/DeepSeek-V4-Flash"


def test_another_model_type_is_named(model: Path):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert facts(model) == [f"{model}: this is another model (model_type 'llama'), not supported"]
    (model / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v4_1"}))
    assert facts(model) == [f"{model}: this is V4.1 (model_type 'deepseek_v4_1'), not supported"]


def test_all_problems_come_at_once(model: Path):
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    assert facts(model) == [f"{model} holds no .safetensors weights", f"{model} has no tokenizer.json"]


def test_missing_and_cut_shards_are_named(model: Path):
    whole = (model / "model.safetensors").stat().st_size
    for number in (1, 3):
        shutil.copy(model / "model.safetensors", model / f"model-{number}.safetensors")
    (model / "model.safetensors").unlink()
    index = {"weight_map": {f"t{n}": f"model-{n}.safetensors" for n in (1, 2, 3)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    os.truncate(model / "model-3.safetensors", whole - 1000)
    assert facts(model) == [
        f"{model}: shard 2 of 3 (model-2.safetensors) is missing",
        f"{model}: shard 3 of 3 (model-3.safetensors): {whole - 1000:,} of {whole:,} bytes (interrupted download?)",
    ]


@pytest.mark.parametrize("junk", [b"", b"\x00" * 7, b"<html>not found</html>", struct.pack("<Q", 4) + b"nope"])
def test_a_file_that_is_no_safetensors_is_named(model: Path, junk: bytes):
    (model / "model.safetensors").write_bytes(junk)
    (fact,) = facts(model)
    assert "is no safetensors file, or cut off in its header" in fact


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_broken_config_is_named(model: Path, text: str):
    (model / "config.json").write_text(text)
    (fact,) = facts(model)
    assert fact.startswith(f"{model}/config.json ")


def test_an_unreadable_config_names_owner_and_mode(model: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> bytes:  # chmod would not stop root, who runs these tests in containers
        raise PermissionError(13, "Permission denied", str(path))

    (model / "config.json").chmod(0o600)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    (problem,) = check_model_folder(model)
    assert (problem.code, problem.exit) == ("PERM", Exit.MODEL)
    assert f"cannot read {model}/config.json: owner {os.getuid()} mode 0600, we are uid {os.getuid()}" in problem.fact
    assert "chmod a+r" in problem.fix


def test_a_missing_extra_is_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preflight, "NEEDED", {"worker": "no_such_torch", "gateway": "aiohttp"})
    assert main(["up", "--port", "0"]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "EXTRA  the worker needs the package no_such_torch, which is not installed" in err
    assert 'pip install "v4mesh[worker]"' in err


def test_a_grammar_service_that_is_asked_for_must_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preflight, "COMPILER", "no_such_compiler")
    assert main(["up", "--port", "0", "--grammar", "on"]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "EXTRA  the grammar needs the package no_such_compiler" in err and '"v4mesh[grammar]"' in err
    assert not make_plan(UpConfig(), None).grammar and make_plan(UpConfig(grammar="on"), None).grammar


def test_a_port_in_use_names_its_owner(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = preflight.check_port("127.0.0.1", port)
        assert main(["up", "--port", str(port)]) == Exit.PORT
    assert (problem.code, problem.exit) == ("PORT", Exit.PORT)
    assert problem.fact.startswith(f"127.0.0.1:{port} is in use by pid {os.getpid()} (")
    assert "--port 0 picks a free one" in problem.fix
    assert problem.fact in capsys.readouterr().err
    assert preflight.check_port("127.0.0.1", port) == []


def test_an_address_of_another_machine_is_refused():
    (problem,) = preflight.check_port("192.0.2.1", 8000)
    assert problem.fact == "cannot listen on 192.0.2.1:8000: Cannot assign requested address"


def test_too_little_memory_shows_the_sum(model: Path, monkeypatch: pytest.MonkeyPatch):
    class Memory:
        available = 1_000_000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    (problem,) = preflight.check_memory(model)
    assert problem.exit == Exit.MEMORY
    # 18.9 M parameters in FP32, as the model's README says; the files hold FP8 and FP4.
    assert problem.details[0].startswith("weights in FP32 ")
    assert problem.details[0].endswith(" 0.1 GB   (0.0 GB of files, dequantised)")
    assert "short by 0.1 GB before any KV" in problem.details[1]
    assert cpu_bytes(model) == 4 * 18_913_152


def test_several_failures_are_reported_together_and_the_first_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "v4mesh.toml"
    config.write_text('[up]\nmodel = "/nonexistent/model"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--config", str(config), "up", "--port", str(port)]) == Exit.MODEL
    err = capsys.readouterr().err
    assert "MODEL_DIR  there is no folder /nonexistent/model" in err
    assert f"PORT  127.0.0.1:{port} is in use" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up --kv-cache-dtype bogus", "kv_cache_dtype = 'bogus' (flag --kv-cache-dtype): must be one of auto, fp32"),
        ("up --quantization int3", "quantization = 'int3' (flag --quantization): must be one of auto, exact, fp8"),
        ("up --quantization compressed-tensors", "--quantization compressed-tensors: this checkpoint's format is fp8"),
        ("up --api-key-file /nope", "KEY  --api-key-file /nope: No such file or directory"),
        ("serve --api-key-file /nope", "KEY  --api-key-file /nope: No such file or directory"),
    ],
)
def test_settings_that_a_service_would_refuse_are_refused_before_it_starts(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("meshkit.cli.mesh.make_run_folder", start)
    assert main([*line.split(), "--port", "0"]) == Exit.CONFIG
    assert said in capsys.readouterr().err


def test_a_key_file_we_may_not_read_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, encoding: str) -> str:  # chmod would not stop root, who runs these tests in containers
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("meshkit.api_keys.Path.read_text", refuse)
    assert main(["up", "--port", "0", "--api-key-file", str(tmp_path / "keys")]) == Exit.CONFIG
    assert f"KEY  --api-key-file {tmp_path / 'keys'}: Permission denied" in capsys.readouterr().err


def test_the_names_refused_early_are_those_the_worker_refuses():
    from worker_svc.checkpoint.errors import NumericsError
    from worker_svc.checkpoint.quant_choice import choose_numerics

    for name in KV_DTYPES:
        choose_numerics("fp4", kv_cache_dtype=name)
    for name in set(SCHEMES) - set(FOREIGN_SCHEMES):
        accepted = 0
        for experts in ("fp4", "fp8"):
            with contextlib.suppress(NumericsError):
                choose_numerics(experts, quantization=name)
                accepted += 1
        assert accepted, name


def test_a_wrong_key_names_file_line_and_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "v4mesh.toml"
    config.write_text("[up]\nprot = 8000\n")
    assert main(["--config", str(config), "up"]) == Exit.CONFIG
    assert f"KEY  unknown option prot in [up] ({config}:2). Nearest: port" in capsys.readouterr().err


def test_the_run_folder_is_private_short_and_cleaned_after_a_killed_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runtime = tmp_path / "r"
    runtime.mkdir()
    stale = runtime / "v4mesh-dead"
    stale.mkdir()
    (stale / "pid").write_text("999999999")
    monkeypatch.setattr(preflight, "MAX_UNIX_PATH", 4096)
    folder = preflight.make_run_folder(None, str(runtime))
    assert folder.parent == runtime
    assert folder.stat().st_mode & 0o777 == 0o700
    assert preflight.check_run_folder(folder) == []
    assert not stale.exists()


def test_a_run_folder_open_to_others_or_too_long_is_refused(tmp_path: Path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir(mode=0o755)
    codes = [p.code for p in preflight.check_run_folder(folder)]
    assert codes == ["RUN_DIR", "RUN_DIR"]


@pytest.mark.parametrize("wanted", ["/proc/v4mesh", "/dev/null", "/dev/null/deeper"])
def test_what_can_be_no_run_folder_is_refused_with_a_way_out(wanted: str):
    with pytest.raises(ProblemsError) as refused:
        preflight.make_run_folder(wanted, None)
    (problem,) = refused.value.problems
    assert problem.code == "RUN_DIR" and wanted in problem.fact and "--run-dir" in problem.fix


def test_a_run_folder_too_long_is_not_made(tmp_path: Path):
    wanted = tmp_path / ("x" * 100)
    with pytest.raises(ProblemsError, match="too long for a unix socket"):
        preflight.make_run_folder(str(wanted), None)
    assert not wanted.exists()


@pytest.mark.parametrize("count", [1, 2])
def test_connections_that_a_former_mesh_closed_do_not_keep_its_port(count: int):
    held = list(listening("127.0.0.1", free := preflight.free_port("127.0.0.1"), count))
    with contextlib.ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(socket.create_connection(("127.0.0.1", free)))
        for it in held:
            it.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    it.accept()[0].close()  # first, so that this end waits for late packets
            it.close()
    assert preflight.check_port("127.0.0.1", free) == []


def test_a_host_that_is_not_ours_says_what_would_be():
    (problem,) = preflight.check_port("203.0.113.9", 0)
    assert problem.exit == Exit.PORT and "203.0.113.9" in problem.fact and "0.0.0.0" in problem.fix


def test_a_model_is_held_against_the_gpus_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "present", lambda: ("NVIDIA H200", 150_000_000_000))
    assert preflight.check_gpu_memory(DEFAULT_MODEL) == []
    monkeypatch.setattr(plan, "present", lambda: ("a small one", 2_000_000_000))
    (problem,) = preflight.check_gpu_memory(DEFAULT_MODEL)
    assert problem.exit == Exit.MEMORY and "does not fit on 1 x a small one" in problem.fact
    monkeypatch.setattr(plan, "present", lambda: None)
    (problem,) = preflight.check_gpu_memory(DEFAULT_MODEL)
    assert problem.exit == Exit.GPU
    (tmp_path / "config.json").write_text("{}")
    (problem,) = preflight.check_gpu_memory(tmp_path)
    assert problem.exit == Exit.MODEL and "hidden_size" in problem.fact
