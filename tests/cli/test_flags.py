"""The operators' guide's command line: each flag and variable has its effect, or a line naming what is missing."""

import shlex

import pytest

from meshkit.cli.flag_table import (
    FLAGS,
    VARIABLES,
    Entry,
    answer,
    check_layout,
    read_flags,
    read_variables,
    variable_names,
)
from meshkit.cli.main import main
from meshkit.exit_codes import Exit
from meshkit.models import DEFAULT_MODEL

LAUNCH = """
serve --model-path {model} --tp 4 --ep-size 8 --enable-expert-parallel --enable-deepep
  --enable-two-batch-overlap --kv-cache-dtype fp8 --quantization fp4 --enable-torch-compile --speculative-algorithm MTP
  --speculative-num-steps 1 --moe-dp-size 4 --attention-dp-size 2 --trust-remote-code --host 0.0.0.0 --port 30000
"""

# What the guide names, with values it gives, and values that nothing could honour.
GUIDE: dict[str, tuple[list[str], list[str]]] = {
    "--model-path": (["deepseek-ai/DeepSeek-V4-Flash", "/model"], [""]),
    "--host": (["0.0.0.0", "::1"], [""]),
    "--port": (["30000", "0"], ["65536", "http", "-1"]),
    "--trust-remote-code": ([""], []),
    "--tp": (["1", "4", "8"], ["0", "-2", "two", "1.5"]),
    "--ep-size": (["1", "8"], ["0", "x"]),
    "--enable-expert-parallel": ([""], []),
    "--enable-deepep": ([""], []),
    "--enable-two-batch-overlap": ([""], []),
    "--moe-fp8-communication": ([""], []),
    "--moe-dp-size": (["1", "4"], ["0"]),
    "--attention-dp-size": (["1", "2"], ["0"]),
    "--attention-cp-size": (["1", "4"], ["0"]),
    "--kv-cache-dtype": (["fp8", "fp8_e4m3", "fp8_e5m2", "bf16"], ["int4", "fp7"]),
    "--quantization": (["fp8", "fp4", "w4a8", "compressed-tensors"], ["int3", "gguf"]),
    "--grammar-backend": (["xgrammar", "none"], ["outlines", ""]),
    "--constrained-json-disable-any-whitespace": ([""], []),
    "--constrained-json-whitespace-pattern": (["[ ]?", r"[\n\t ]?"], ["[ ]*", ""]),
    "--enable-torch-compile": ([""], []),
    "--speculative-algorithm": (["MTP", "EAGLE", "DFLASH"], ["MEDUSA"]),
    "--speculative-num-steps": (["1", "3"], ["-1", "1000", "x"]),
    "--speculative-eagle-model-path": (["/draft"], [""]),
    "DEEPGEMM_ENABLE_JIT": (["1", "0", "true"], ["maybe"]),
    "DEEPGEMM_FORCE_RECOMPILE": (["1", "off"], ["2"]),
    "DEEPGEMM_CACHE_DIR": (["/cache/deepgemm"], []),
    "FLASHINFER_AUTOTUNE": (["1", "no"], ["often"]),
    "FLASHINFER_AUTOTUNE_CACHE_DIR": (["/cache/flashinfer"], []),
    "SGLANG_MOE_BACKEND": (["deep_gemm", "flashinfer_trtllm", "flashinfer_cutedsl"], ["magic"]),
    "SGLANG_SCHEDULE_CONSERVATIVENESS": (["0.3", "1.0"], ["-1", "0", "bold", "nan", "inf"]),
    "SGLANG_TORCH_COMPILE_MODE": (["max-autotune", "default"], ["fastest"]),
    "SGLANG_ELASTIC_MEMORY_POOL": (["1", "0"], ["big"]),
    "SGLANG_HICACHE_L2_SIZE": (["64GB", "64GiB", "0"], ["lots", "-1"]),
    "SGLANG_HICACHE_L3_URL": (["redis://cache:6379/0", "rediss://cache"], ["http://cache", "cache:6379", "redis://"]),
    "SGLANG_RADIX_CACHE_TARGET_SLIDING_WINDOW": (["128", "4"], ["-1", "x"]),
    "SGLANG_RADIX_CACHE_EVICT_POLICY": (["lru", "lfu"], ["random"]),
}
TABLE = {entry.name: entry for entry in (*FLAGS, *VARIABLES)}
# These have their effect today; every other entry must say what it waits for.
IN_EFFECT = {
    "--model-path",
    "--host",
    "--port",
    "--trust-remote-code",
    "--kv-cache-dtype",
    "--quantization",
    "--grammar-backend",
    "--constrained-json-disable-any-whitespace",
    "SGLANG_RADIX_CACHE_TARGET_SLIDING_WINDOW",
    "SGLANG_SCHEDULE_CONSERVATIVENESS",
    "DEEPGEMM_ENABLE_JIT",
    "DEEPGEMM_FORCE_RECOMPILE",
    "DEEPGEMM_CACHE_DIR",
    "FLASHINFER_AUTOTUNE",
    "FLASHINFER_AUTOTUNE_CACHE_DIR",
    "--enable-torch-compile",
    "SGLANG_TORCH_COMPILE_MODE",
}


def test_the_table_holds_the_guide_and_nothing_else():
    assert set(TABLE) == set(GUIDE)


@pytest.mark.parametrize("name", list(GUIDE))
def test_each_is_in_effect_or_names_the_missing_part(name: str):
    entry = TABLE[name]
    for value in GUIDE[name][0]:
        found = answer(entry, value)
        shown = name if entry.switch else f"{name} {value}" if name.startswith("--") else f"{name}={value}"
        if found.value in entry.quiet:
            assert (found.status, found.line) == (
                "applied",
                f"applied: {shown} ({entry.ours}): it runs like this anyway",
            )
        elif name in IN_EFFECT:
            assert (found.status, entry.needs) == ("applied", "")
            assert found.line == f"applied: {shown} ({entry.ours}): {entry.does}"
            assert len(entry.does) > 10
        else:
            assert found.status == "recognised"
            assert found.line.startswith(f"recognised: {shown} ({entry.ours}")
            assert f"needs {entry.needs}, which is not built yet; {entry.meanwhile}" in found.line
            assert "\n" not in found.line


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (_, bad) in GUIDE.items() for v in bad])
def test_impossible_values_are_refused_with_what_is_accepted(name: str, value: str):
    with pytest.raises(ValueError, match=r"must (be|not be)|is no size"):
        answer(TABLE[name], value)


@pytest.mark.parametrize("entry", FLAGS, ids=lambda e: e.name)
def test_each_flag_is_parsed_by_serve(entry: Entry, capsys: pytest.CaptureFixture[str]):
    good = GUIDE[entry.name][0][0].replace("deepseek-ai/DeepSeek-V4-Flash", str(DEFAULT_MODEL))
    for name in (entry.name, *entry.aliases):
        line = [name] if entry.switch else [name, good]
        extra = ["--tp", "8"] if entry.field == "ep_size" else []
        status = main(["serve", *line, *extra, "--launcher", "print"])
        out, err = capsys.readouterr()
        assert status == 0, err
        assert {line.split()[1] for line in out.splitlines()} == {"scheduler", "grammar", "worker", "gateway"}
        if entry.needs and good != "1":
            assert err.count(f"recognised: {entry.name}") == 1


@pytest.mark.parametrize("entry", VARIABLES, ids=lambda e: e.name)
def test_each_variable_is_read_under_all_its_names(
    entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    good = GUIDE[entry.name][0][0]
    for name in variable_names(entry):
        with monkeypatch.context() as patch:
            patch.setenv(name, good)
            assert main(["serve", "--launcher", "print"]) == 0
            out, err = capsys.readouterr()
            section, key = entry.ours.split(".")
            if section == "scheduler" and answer(entry, good).status == "applied":
                scheduler = shlex.split(out.splitlines()[0])
                assert scheduler[scheduler.index(f"--{key.replace('_', '-')}") + 1] == good
            elif section == "worker" and not entry.needs:
                assert f"applied: {name}={good}" in err
            else:
                assert f"recognised: {name}={good}" in err
    monkeypatch.setenv(entry.name, "")
    assert main(["serve", "--launcher", "print"]) == 0
    assert "recognised" not in capsys.readouterr().err


def test_flags_in_effect_reach_the_services(capsys: pytest.CaptureFixture[str]):
    line = ["--model-path", str(DEFAULT_MODEL), "--host", "0.0.0.0", "--port", "30000", "--kv-cache-dtype", "fp8_e5m2"]
    assert main(["serve", *line, "--quantization", "w4a8", "--grammar-backend", "none", "--launcher", "print"]) == 0
    scheduler, worker, gateway = (shlex.split(row) for row in capsys.readouterr().out.splitlines())
    assert scheduler[:2] == ["v4mesh", "scheduler"]
    assert worker[worker.index("--kv-cache-dtype") + 1] == "fp8_e5m2"
    assert worker[worker.index("--quantization") + 1] == "w4a8"
    assert worker[worker.index("--model") + 1] == str(DEFAULT_MODEL)
    assert gateway[gateway.index("--listen-http") + 1] == "0.0.0.0:30000"


def test_the_kernel_cache_reaches_the_worker(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for name, value in (("ENABLE_JIT", "0"), ("FORCE_RECOMPILE", "1"), ("CACHE_DIR", "/cache/kernels")):
        monkeypatch.setenv(f"DEEPGEMM_{name}", value)
    assert main(["serve", "--launcher", "print"]) == 0
    (worker,) = (shlex.split(row) for row in capsys.readouterr().out.splitlines() if "v4mesh worker" in row)
    assert worker[worker.index("--kernel-cache") + 1] == "/cache/kernels"
    assert "--no-jit" in worker and "--jit-recompile" in worker and "--no-autotune" not in worker
    monkeypatch.setenv("DEEPGEMM_ENABLE_JIT", "1")
    assert main(["serve", "--launcher", "print"]) == 0
    assert "jit " not in capsys.readouterr().out.replace("--jit-recompile", "")


def test_what_was_tuned_is_looked_for_where_the_guide_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FLASHINFER_AUTOTUNE", "0")
    monkeypatch.setenv("V4MESH_FLASHINFER_AUTOTUNE_CACHE_DIR", "/cache/tuned")
    assert main(["serve", "--launcher", "print"]) == 0
    (worker,) = (shlex.split(row) for row in capsys.readouterr().out.splitlines() if "v4mesh worker" in row)
    assert worker[worker.index("--autotune-cache") + 1] == "/cache/tuned" and "--no-autotune" in worker
    monkeypatch.setenv("FLASHINFER_AUTOTUNE", "1")
    assert main(["serve", "--launcher", "print"]) == 0
    assert "--no-autotune" not in capsys.readouterr().out


def test_torch_compile_and_its_mode_reach_the_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SGLANG_TORCH_COMPILE_MODE", "max-autotune")
    assert main(["serve", "--enable-torch-compile", "--launcher", "print"]) == 0
    out, err = capsys.readouterr()
    (worker,) = (shlex.split(row) for row in out.splitlines() if "v4mesh worker" in row)
    assert "--torch-compile" in worker and worker[worker.index("--torch-compile-mode") + 1] == "max-autotune"
    assert "on a GPU nothing changes: the GPU forward lies in kernels already" in err
    monkeypatch.delenv("SGLANG_TORCH_COMPILE_MODE")
    assert main(["serve", "--launcher", "print"]) == 0
    assert "torch-compile" not in capsys.readouterr().out


def test_compiled_and_deterministic_is_refused_where_it_would_compile(capsys: pytest.CaptureFixture[str]):
    line = ["serve", "--enable-torch-compile", "--deterministic", "--launcher", "print"]
    assert main(line) == Exit.CONFIG
    assert "FLAG  --enable-torch-compile with --deterministic: " in capsys.readouterr().err
    assert main([*line, "--device", "cuda"]) == 0


@pytest.mark.parametrize("command", ["up", "serve"])
def test_the_gpu_and_pins_reach_the_worker(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--device", "cuda", "--kernel", "experts=torch,sample=torch", "--launcher", "print"]) == 0
    (worker,) = (shlex.split(row) for row in capsys.readouterr().out.splitlines() if "v4mesh worker" in row)
    assert worker[worker.index("--device") + 1] == "cuda"
    assert worker[worker.index("--kernel") + 1] == "experts=torch,sample=torch"
    assert main([command, "--device", "tpu", "--launcher", "print"]) == Exit.CONFIG
    assert "must be cpu, cuda or auto" in capsys.readouterr().err


def test_the_grammar_service_and_its_standby_serve_scheduler_and_worker(capsys: pytest.CaptureFixture[str]):
    line = ["--grammar-backend", "xgrammar", "--constrained-json-disable-any-whitespace"]
    assert main(["serve", *line, "--launcher", "print"]) == 0
    scheduler, grammar, standby, worker, gateway = (shlex.split(row) for row in capsys.readouterr().out.splitlines())
    socket = grammar[grammar.index("--listen") + 1]
    assert grammar == standby and grammar[grammar.index("--json-whitespace") + 1] == "0"
    assert scheduler[scheduler.index("--grammar") + 1] == worker[worker.index("--grammar") + 1] == socket
    assert "--grammar" not in gateway
    assert main(["up", "--grammar", "off", "--launcher", "print"]) == 0
    assert "grammar" not in capsys.readouterr().out


def test_the_guides_launch_command_is_understood_whole(capsys: pytest.CaptureFixture[str]):
    args = shlex.split(LAUNCH.format(model=DEFAULT_MODEL).replace("\n", " "))
    assert main([*args, "--launcher", "print"]) == 0
    out, err = capsys.readouterr()
    services = ["scheduler", "grammar", "grammar", "worker", "gateway"]
    assert [row.split()[1] for row in out.splitlines()] == services
    given = [e.name for e in FLAGS if e.name in args]
    said = {name: [n for n in given if (n in IN_EFFECT) == (name == "applied")] for name in ("applied", "recognised")}
    assert len(given) == sum(a.startswith("--") for a in args)
    for kind, names in said.items():
        assert [line.split()[1] for line in err.splitlines() if line.startswith(f"{kind}: ")] == names
    assert len(err.splitlines()) == len(given)
    assert err.count("runs nothing") == 1


def test_all_refusals_come_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_MOE_BACKEND", "magic")
    assert main(["serve", "--tp", "0", "--kv-cache-dtype", "int4", "--launcher", "print"]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "FLAG  --tp 0: must be a whole number from 1 to 1024" in err
    assert "FLAG  --kv-cache-dtype int4: must be one of auto, fp32" in err
    assert "FLAG  SGLANG_MOE_BACKEND=magic: must be one of deep_gemm" in err


def test_a_checkpoint_in_another_format_refuses_the_scheme(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--quantization", "compressed-tensors", "--launcher", "print"]) == Exit.CONFIG
    assert "this checkpoint's format is fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        ({"tp": "4", "attention_dp_size": "2", "ep_size": "8", "moe_dp_size": "4"}, True),
        ({"tp": "4", "attention_cp_size": "2", "ep_size": "4"}, True),
        ({"tp": "4", "ep_size": "3"}, False),
        ({"tp": "4", "moe_dp_size": "8"}, False),
        ({"ep_size": "8"}, False),
        ({}, True),
    ],
)
def test_the_world_size_rule(flags: dict[str, str], fits: bool):
    answers, problems = read_flags(flags)
    assert not problems
    found = check_layout({a.entry.field: a.value for a in answers})
    assert (not found) == fits
    if found:
        assert found[0].exit == Exit.CONFIG
        assert found[0].fix.startswith("one of 1")


def test_a_variable_set_twice_is_read_once():
    answers, problems = read_variables({"SGLANG_MOE_BACKEND": "deep_gemm", "V4MESH_MOE_BACKEND": "deep_gemm"})
    assert (len(answers), problems) == (1, [])


def test_an_unknown_flag_is_not_swallowed(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--enable-deep-ep", "--launcher", "print"]) == Exit.USAGE
    assert "--enable-deepep" in capsys.readouterr().err
