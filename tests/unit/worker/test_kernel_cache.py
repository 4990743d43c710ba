"""The kernel cache: keys, manifests, the watch on compiles, archives; and precache over hollow weights on the CPU."""

import dataclasses
import functools
import io
import json
import os
import tarfile

import pytest
import torch

from meshkit import kernel_cache as files
from meshkit.errors import GpuError, MemoryShort
from meshkit.kernel_cache import CacheFileError
from meshkit.models import DEFAULT_MODEL
from worker_svc import kernel_cache, tuning
from worker_svc.checkpoint.config import V4Config
from worker_svc.config import WorkerConfig
from worker_svc.gpu import ahead, loading, self_check
from worker_svc.kernel_cache import CompileWatch, Machine, Manifest
from worker_svc.ops import invariant, registry
from worker_svc.precache import __main__ as command
from worker_svc.precache.hollow import HollowSource, one_of_each
from worker_svc.tuning import timing, tuner
from worker_svc.tuning.file import TunedChoice, read_tuned

H200 = Machine("NVIDIA H200", 90, "13.0", "3.12.3", {"torch": "2.11.0+cu130", "triton": "3.6.0"})


def _manifest(**changes):
    values = {"machine": H200, "model": "m", "decode": (1, 2), "chunks": (16,), "seconds": 1.0, "kernels": 5}
    return Manifest(**(values | changes))


def test_the_key_is_readable_and_changes_with_every_version():
    other = dataclasses.replace(H200, packages=H200.packages | {"triton": "3.7.0"})
    assert H200.key.startswith("h200-sm90-cu13.0-torch2.11.0-")
    assert other.key != H200.key


def test_a_manifest_survives_its_file(tmp_path):
    _manifest().write(tmp_path)
    assert kernel_cache.read_manifest(tmp_path) == _manifest()
    (tmp_path / files.MANIFEST).write_text("{}")
    assert kernel_cache.read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (None, "no manifest"),
        (_manifest(machine=dataclasses.replace(H200, cuda="12.9")), r"\(cuda differ\)"),
        (_manifest(machine=dataclasses.replace(H200, packages={"torch": "2.11.0+cu130"})), "triton differ"),
        (_manifest(model="other"), "other shapes"),
        (_manifest(failures=("decode: RuntimeError",)), "1 steps failed"),
        (_manifest(), "^$"),
    ],
)
def test_a_mismatch_is_named(manifest, says):
    import re

    assert re.search(says, kernel_cache.mismatch(manifest, H200, "m"))


def test_a_deterministic_worker_wants_its_kernels_too():
    assert "precache --deterministic" in kernel_cache.mismatch(_manifest(), H200, "m", deterministic=True)
    assert not kernel_cache.mismatch(_manifest(deterministic=True), H200, "m", deterministic=True)


def test_compiles_after_ready_are_counted_once(tmp_path, caplog):
    for name in ("triton", "deep_gemm/cache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "triton" / "old").mkdir()
    watch = CompileWatch({"TRITON_CACHE_DIR": tmp_path / "triton", "DG_JIT_CACHE_DIR": tmp_path / "deep_gemm"})
    assert watch.ready() == 2  # the kernel, and DeepGEMM's own folder
    assert watch.new() == 0
    (tmp_path / "deep_gemm" / "cache" / "kernel.gemm").mkdir()
    assert watch.new() == 1 and watch.new() == 0
    assert "compiled while serving: DG_JIT_CACHE_DIR:kernel.gemm" in caplog.text
    caplog.clear()
    (tmp_path / "triton" / "ahead").mkdir()
    assert watch.new(expected=True) == 1 and not caplog.text, "what precache is for is no fault"


def test_variables_that_are_set_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    for name in files.VARIABLES:
        if name != "TRITON_CACHE_DIR":
            monkeypatch.setenv(name, "x")
            monkeypatch.delenv(name)
    root = kernel_cache.open_cache(str(tmp_path), H200)
    assert root == tmp_path / H200.key and root.is_dir()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert os.environ["HUMMING_CACHE_DIR"] == str(root / "humming")


def test_a_cache_survives_its_archive(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "triton" / "x").mkdir(parents=True)
    (source / "triton" / "x" / "kernel.cubin").write_bytes(b"code")
    with pytest.raises(CacheFileError, match="run `v4mesh precache` first"):
        files.pack(source, tmp_path / "c.tar.gz")
    _manifest().write(source)
    assert files.pack(source, tmp_path / "c.tar.gz") == 2
    assert files.unpack(tmp_path / "c.tar.gz", target) == 2
    assert (target / "triton" / "x" / "kernel.cubin").read_bytes() == b"code"


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "link"])
def test_archives_that_reach_outside_are_refused(name, tmp_path):
    archive = tmp_path / "bad.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        else:
            member.size = 4
        out.addfile(member, io.BytesIO(b"code"))
    with pytest.raises(CacheFileError):
        files.unpack(archive, tmp_path / "root")
    assert not (tmp_path / "outside").exists()


def test_no_archive_at_all_is_refused(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    with pytest.raises(CacheFileError, match=r"x\.tar\.gz"):
        files.unpack(tmp_path / "x.tar.gz", tmp_path / "root")


def test_hollow_weights_have_one_layer_of_each_kind():
    whole = V4Config.load(DEFAULT_MODEL)
    cut = one_of_each(whole)
    assert cut.layer_ratios == (0, 4, 128) and cut.is_hash_layer(0) and not cut.is_hash_layer(1)
    source = HollowSource(cut, torch.device("cpu"))
    experts = source.experts(1, "w1")
    assert experts.packed.shape == (whole.n_routed_experts, whole.moe_intermediate_size, whole.hidden_size // 2)


def test_precache_runs_what_a_worker_runs_and_writes_its_manifest(tmp_path, monkeypatch, capsys, request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two would wait for each other most of the time
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    monkeypatch.setattr(loading, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(ahead, "WARM_SIZES", (16,))
    for name in files.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    line = ["--model", str(DEFAULT_MODEL), "--cache", str(tmp_path), "--slots", "2", "--step-tokens", "16"]
    line += ["--context", "512"]
    assert command.main([*line, "--where"]) == 9
    assert command.main(line) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    manifest = kernel_cache.read_manifest(tmp_path / report["machine"])
    assert manifest is not None and manifest.decode == (1, 2) and manifest.chunks == (16,)
    assert manifest.failures == () and "problem" not in report and not manifest.deterministic
    monkeypatch.setattr(self_check, "CHECKED_ROWS", 5)
    assert command.main([*line, "--deterministic", "--where"]) == 9
    assert command.main([*line, "--deterministic"]) == 0
    assert command.main(line) == 0 and not invariant.on()
    kept = kernel_cache.read_manifest(tmp_path / report["machine"])
    assert kept is not None and kept.deterministic and kept.failures == ()


def test_tuning_keeps_what_wins_and_a_worker_takes_it(tmp_path, monkeypatch, capsys, request):
    """A clock that says when our FP8 product of few rows runs: twice as fast. Everything else takes equally long."""
    pytest.importorskip("triton")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    request.addfinalizer(lambda: tuning.use({}))
    compiled_with = []

    def clock(calls):
        calls[0]()
        micros = 10.0 if tuning.value("fp8_gemm.skinny_rows", 8) == 64 else 20.0
        return lambda: micros

    monkeypatch.setattr(timing, "cuda_timer", clock)
    monkeypatch.setattr(loading, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(registry, "backend", functools.cache(lambda op: registry.OPS[op][0]))
    monkeypatch.setattr(command, "_run_all", lambda *args, **kw: compiled_with.append(tuning.in_use()) or [])
    for name in files.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    line = ["--model", str(DEFAULT_MODEL), "--cache", str(tmp_path), "--slots", "20", "--step-tokens", "20"]
    line += ["--context", "512"]
    assert command.main(line) == 0
    assert "run `v4mesh precache MODEL --tune`" in json.loads(capsys.readouterr().out.splitlines()[-1])["tuned"]
    assert command.main([*line, "--tune"]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["choices"] == said and report["tuned"].startswith("1 of 10 choices tuned, 20")
    (won,) = [one for one in said if one.startswith("fp8_gemm.skinny_rows: 8 ")]
    assert won.endswith(" us -> 16 (2.00 x as fast)"), "24 rows are more than a step of this model has"
    assert "hyper_boundary.split_1024: not timed, no step of this model has such a size" in said
    tuned = read_tuned(tmp_path / report["machine"])
    assert tuned is not None and tuned.changed == {"fp8_gemm.skinny_rows": 16}
    micros = tuned.choices["fp8_gemm.skinny_rows"].micros
    assert set(micros["few"].values()) == {10.0} and set(micros["many"].values()) == {20.0}
    assert compiled_with == [{}, {}, tuned.changed] and tuning.in_use() == {}
    assert command.main([*line, "--where"]) == 0 and command.main(line) == 0
    assert compiled_with[3] == tuned.changed, "what is compiled later is what a worker will run"
    monkeypatch.undo()
    for name in files.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    capsys.readouterr()
    loading.prepare_kernels(WorkerConfig(kernel_cache=str(tmp_path)), DEFAULT_MODEL)
    assert "; 1 of 10 choices tuned" in capsys.readouterr().err and tuning.in_use() == tuned.changed
    loading.prepare_kernels(WorkerConfig(kernel_cache=str(tmp_path), jit_recompile=True), DEFAULT_MODEL)
    assert tuning.in_use() == {}


def test_values_whose_kernels_do_not_run_are_dropped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "tune", lambda *args: {"fp8_gemm.skinny_rows": TunedChoice(64, 8, 1.2)})
    monkeypatch.setattr(loading, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(command, "_run_all", lambda *args, **kw: ["decode: it broke"] if tuning.in_use() else [])
    for name in files.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    line = ["--model", str(DEFAULT_MODEL), "--cache", str(tmp_path), "--slots", "2", "--step-tokens", "16"]
    assert command.main([*line, "--context", "512", "--tune"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    root = tmp_path / report["machine"]
    assert read_tuned(root) is None and report["tuned"].startswith("nothing")
    manifest = kernel_cache.read_manifest(root)
    assert manifest is not None and manifest.failures == ()
    monkeypatch.setattr(command, "_run_all", lambda *args, **kw: ["products: broken"])
    monkeypatch.setattr(tuner, "tune", lambda *args: pytest.fail("timed what does not compile"))
    assert command.main([*line, "--context", "512", "--tune"]) == 9


@pytest.mark.parametrize("drawn", [False, True])
def test_hollow_numbers_are_zeros_or_drawn_and_never_nan(drawn):
    source = HollowSource(one_of_each(V4Config.load(DEFAULT_MODEL)), torch.device("cpu"), drawn=drawn)
    codes = source["layers.0.attn.wq_a"].data.float()
    assert codes.isfinite().all() and bool(codes.any()) == drawn
    assert bool(source.experts(1, "w1").packed.any()) == drawn and bool(source["head"].any()) == drawn


def test_a_worker_prepares_its_cache_and_refuses_what_it_cannot_keep(tmp_path, monkeypatch):
    for name in files.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    config = WorkerConfig(kernel_cache=str(tmp_path), kernel="sample=torch")
    loading.prepare_kernels(config, DEFAULT_MODEL)
    assert registry.backend("sample") == "torch"
    with pytest.raises(GpuError, match="no manifest"):
        loading.prepare_kernels(dataclasses.replace(config, jit=False), DEFAULT_MODEL)
    with pytest.raises(GpuError, match="no operation 'gemm'"):
        loading.prepare_kernels(dataclasses.replace(config, kernel="gemm=torch"), DEFAULT_MODEL)
    registry.pin(())


def test_what_does_not_fit_is_refused_before_it_is_read():
    loading.check_memory(WorkerConfig(), DEFAULT_MODEL, 140_000_000_000)
    with pytest.raises(MemoryShort, match=r"experts +0\.004 GB(?s:.*)v4mesh plan"):
        loading.check_memory(WorkerConfig(), DEFAULT_MODEL, 2_000_000_000)


def test_a_pinned_library_is_there_before_anything_is_loaded_or_says_what_it_lacks(monkeypatch):
    from worker_svc.ops.top_entries import flashinfer

    monkeypatch.setattr(registry, "obstacle", lambda name: "")
    monkeypatch.setattr(registry, "_pins", {})
    asked = list[str]()
    monkeypatch.setattr(flashinfer, "library", lambda: asked.append("loaded"))
    try:
        loading.pin_backends("fp8_gemm=triton")
        assert asked == []
        loading.pin_backends("fp8_gemm=triton, top_entries=flashinfer")
        assert asked == ["loaded"] and registry.backend("top_entries") == "flashinfer"

        def fails() -> None:
            raise RuntimeError("it needs nvcc and ninja")

        monkeypatch.setattr(flashinfer, "library", fails)
        with pytest.raises(GpuError, match="it needs nvcc and ninja"):
            loading.pin_backends("top_entries=flashinfer")
    finally:
        registry.backend.cache_clear()
