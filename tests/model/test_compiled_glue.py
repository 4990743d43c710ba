"""The compiled glue: each piece is what plain torch computes, is compiled once, and is refused where it cannot be."""

import logging
import random

import pytest
import torch

from meshkit.errors import ConfigError, GpuError
from meshkit.types import SamplingParams
from tests.model.conftest import NANO
from worker_svc import loading
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.compiled_glue import GlueError, glue, library, prepare
from worker_svc.compiled_glue.glue import CompiledGlue
from worker_svc.compiled_glue.pieces import PIECES
from worker_svc.config import WorkerConfig
from worker_svc.executor import CpuExecutor
from worker_svc.model.glue import Glue, GlueShapes
from worker_svc.solo import generate

SIZES = (1, 2, 3, 16, 130, 300)


def shapes_of(folder) -> GlueShapes:
    return GlueShapes.of(load_checkpoint(folder, check_values=False).config)


def uncompiled(shapes: GlueShapes) -> CompiledGlue:
    """The pieces' functions as they are: what the compiler is given."""

    def run(name):
        function = PIECES[name].function(shapes)
        return lambda inputs: list(library._several(function(*inputs)))

    return CompiledGlue(shapes, {name: run(name) for name in PIECES})


def assert_as_plain(name, run, shapes, sizes=SIZES):
    seed = random.randrange(1 << 30)
    draw = torch.Generator().manual_seed(seed)
    for tokens in sizes:
        inputs = PIECES[name].example(shapes, tokens, draw)
        ours, truth = run(*inputs), library._several(PIECES[name].plain(Glue(shapes), *inputs))
        assert len(ours) == len(truth)
        for mine, theirs in zip(ours, truth):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5, msg=lambda text: f"{text}\nseed {seed}")


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("model", ["nano", "tiny"])
def test_what_is_compiled_computes_what_the_plain_path_does(name, model, tiny_folder):
    shapes = shapes_of(NANO if model == "nano" else tiny_folder)
    assert_as_plain(name, lambda *inputs: uncompiled(shapes).run(name, *inputs), shapes)


@pytest.mark.parametrize(("activations", "tokens", "apart"), [("none", 290, 2e-4), ("fp8", 40, 0.05)])
def test_a_model_on_these_pieces_answers_as_the_plain_one(tiny_folder, activations, tokens, apart):
    """Both kinds of router, all kinds of layers, one token and many, a chunk that samples nothing. Activations in FP8
    have their states in a product of their own; over long texts they round last bits to other codes, and other experts
    follow, as between any two right forwards."""
    ids = torch.randint(2, 512, (tokens,), generator=torch.Generator().manual_seed(5)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=6, top_logprobs=3)
    sides = []
    for how in (None, uncompiled(shapes_of(tiny_folder))):
        numerics = Numerics(activations=activations)
        executor = CpuExecutor.load(tiny_folder, numerics=numerics, slots=1, pages=2, tails=0, threads=1, glue=how)
        sides.append(generate(executor, ids, params, 7, chunk=140))
    plain, pieced = sides
    assert pieced.drawn == plain.drawn
    for left, right in zip(pieced.logprobs, plain.logprobs, strict=True):
        assert left.values == pytest.approx(right.values, abs=apart)


def test_a_piece_is_compiled_once_found_again_and_not_taken_for_another(tmp_path, monkeypatch):
    """One small piece, by the real compiler; the others take seconds to a minute."""
    for module in (library, glue):
        monkeypatch.setattr(module, "PIECES", {"activate": PIECES["activate"]})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    shapes, told = shapes_of(NANO), []
    prepare(shapes, "max-autotune", tmp_path, progress=lambda *call: told.append(call))
    assert told == [("compile", 0, 1), ("compile", 1, 1)]
    made = [path.name for path in tmp_path.glob("glue-*/*")]
    assert made == ["activate.so"], "neither scratch nor logs are left"

    again = prepare(shapes, "max-autotune", tmp_path, compiling=False)
    with torch.inference_mode():
        assert_as_plain("activate", lambda *inputs: again.run("activate", *inputs), shapes, (*SIZES, 1100))
        assert again.activate(torch.randn(3, 256), torch.ones(3, 1)).shape == (3, 128)
    with pytest.raises(AssertionError, match="activate"):
        again.run("activate", torch.randn(256, 3).t(), torch.ones(3, 1))
    with pytest.raises(GlueError, match=r"--no-jit: .* lacks activate; compile them with --jit"):
        prepare(shapes, "default", tmp_path, compiling=False)  # another mode: other objects

    (folder,) = tmp_path.glob("glue-*")
    broken = tmp_path / "broken"
    (broken / folder.name).mkdir(parents=True)
    (broken / folder.name / "activate.so").write_bytes(b"no shared object")
    with pytest.raises(GlueError, match=r"activate\.so cannot be loaded: .*; delete it, or start without"):
        prepare(shapes, "max-autotune", broken)


def test_an_object_that_computes_something_else_is_refused(tiny_folder):
    made = uncompiled(shapes_of(tiny_folder))
    library.check(made)
    right = made._runs["expand"]
    made._runs["expand"] = lambda inputs: [right(inputs)[0] * (1 + 1e-3 * (len(inputs[0]) > 200))]
    with pytest.raises(GlueError, match=r"compiled piece expand computes something else .* at 256 tokens"):
        library.check(made)


def test_a_machine_without_a_compiler_is_told_what_to_install(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(GlueError, match=r"no C\+\+ compiler 'no-such-compiler' here. Install one .*apt install g\+\+"):
        prepare(shapes_of(tiny_folder), "default", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_told_of(tiny_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GlueError, match=r"keeps what it compiled in .*file.*; name another folder with --kernel-cache"):
        prepare(shapes_of(tiny_folder), "default", tmp_path / "file")


def test_what_a_killed_compile_left_is_cleared_away_and_a_running_one_is_not(tmp_path):
    gone, running = tmp_path / f"{library.SCRATCH}{1 << 30}", tmp_path / f"{library.SCRATCH}{library.os.getpid()}"
    for folder in (gone, running):
        folder.mkdir()
    library._tidy(tmp_path)
    assert list(tmp_path.iterdir()) == [running]


def test_a_compile_that_fails_says_why_and_where_the_rest_is(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr(library, "PIECES", {"no-such-piece": PIECES["expand"], "nor-this": PIECES["head"]})
    monkeypatch.setattr(library.os, "cpu_count", lambda: 1)
    with pytest.raises(GlueError, match=r"piece no-such-piece could not be compiled: .*KeyError.*\(all of it: .*\.log"):
        prepare(shapes_of(tiny_folder), "default", tmp_path)


def test_the_combination_with_deterministic_mode_is_refused_before_anything_is_read():
    config = WorkerConfig(model="/no/such/folder", torch_compile=True, deterministic=True)
    with pytest.raises(ConfigError, match=r"--torch-compile .*--enable-torch-compile.* with --deterministic: .*leave"):
        loading.load(config)


def test_on_a_gpu_one_line_says_that_there_is_nothing_to_compile(monkeypatch, caplog):
    from worker_svc.gpu import loading as on_gpu

    def stop(*_):
        raise GpuError("far enough")

    monkeypatch.setattr(on_gpu, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(on_gpu, "prepare_kernels", stop)
    caplog.set_level(logging.INFO)
    with pytest.raises(GpuError, match="far enough"):
        on_gpu.load(WorkerConfig(device="cuda", torch_compile=True, deterministic=True))
    assert "--torch-compile changes nothing on a GPU: the GPU forward lies in kernels already" in caplog.text
