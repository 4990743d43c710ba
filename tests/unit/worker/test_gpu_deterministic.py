"""Deterministic mode of the GPU forward on CPU tensors: what is chosen, what is found out, and who is named."""

from dataclasses import replace

import pytest
import torch

from meshkit.errors import GpuError
from meshkit.models import DEFAULT_MODEL
from meshkit.types import ModelInfo, SamplingParams
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.config import WorkerConfig
from worker_svc.core.work import RowWork, SlotInit, StepWork
from worker_svc.gpu import attention, loading, self_check
from worker_svc.gpu.executor import GpuExecutor
from worker_svc.gpu.invariance import Case, examine
from worker_svc.gpu.invariance_cases import Cases
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.self_check import check_forward, choose_backends
from worker_svc.gpu.transformer import Transformer
from worker_svc.gpu.weights import WeightLoader
from worker_svc.kv.layout import KvLayout
from worker_svc.ops import invariant, registry
from worker_svc.ops.registry import Capability, KernelError
from worker_svc.sampling import VocabRules

CPU = torch.device("cpu")
SIZES = (1, 2, 9, 16)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(registry, "_pins", {})
    yield
    invariant.switch(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def nano():
    checkpoint = load_checkpoint(DEFAULT_MODEL, check_values=False)
    return checkpoint.config, WeightLoader(checkpoint, CPU).model()


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper machine with the packages in the returned set."""
    there = {"triton", "deep_gemm", "humming", "flash_mla", "nvrtc"}

    def probe(name):
        return Capability(name, name in there, "1.0", "" if name in there else "not installed")

    monkeypatch.setattr(registry, "probe", probe)
    monkeypatch.setattr(registry, "chip", lambda: 90)
    registry.backend.cache_clear()
    yield there
    registry.backend.cache_clear()


@pytest.fixture
def executor(nano):
    """A C4 and a C128 layer: the rest adds time and no operation."""
    config, weights = nano
    config = replace(config, num_hidden_layers=2, compress_ratios=(4, 128), num_nextn_predict_layers=0)
    weights = replace(weights, blocks=weights.blocks[2:4])
    numerics = Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp8")
    layout = KvLayout(config=config, numerics=numerics, max_verify=1)
    pools = GpuPools(layout, slots=4, pages=6, tails=1, device=CPU)
    model = Transformer(weights, config, pools, max_context=768, max_tokens=400)
    info = ModelInfo(
        name="nano", revision="r", vocab_size=config.vocab_size, max_context=768, eos_ids=(1,), kv_layout_id="test"
    )
    rules = VocabRules(vocab_size=config.vocab_size, eos_ids=(1,))
    return GpuExecutor(model=model, pools=pools, info=info, rules=rules, max_rows=4)


# The table


def test_every_operation_has_a_recipe_with_a_reason_among_its_backends():
    assert list(invariant.RECIPES) == list(registry.OPS)
    for op, recipes in invariant.RECIPES.items():
        assert recipes and all(recipe.reason for recipe in recipes), op
        assert {recipe.backend for recipe in recipes} <= set(registry.OPS[op]), op


def test_the_mode_chooses_recipes_and_gives_the_table_back(hopper):
    assert registry.backend("sparse_attention") == "flash_mla" and registry.backend("large_experts") == "nvrtc"
    with invariant.switched(True):
        assert invariant.on()
        assert registry.backend("sparse_attention") == "triton" and registry.backend("large_experts") == "humming"
    assert not invariant.on() and registry.backend("sparse_attention") == "flash_mla"
    hopper.discard("deep_gemm")
    invariant.switch(True)
    assert registry.backend("fp8_gemm") == registry.backend("bf16_gemm") == "triton"


def test_a_pin_is_kept_or_refused_naming_what_there_is(hopper, monkeypatch):
    monkeypatch.setattr(registry, "_pins", {"fp8_gemm": "triton"})
    invariant.switch(True)
    assert registry.backend("fp8_gemm") == "triton"
    monkeypatch.setattr(registry, "_pins", {"sparse_attention": "flash_mla"})
    with pytest.raises(KernelError, match=r"sparse_attention=flash_mla with --deterministic.*there is: triton"):
        invariant.switch(True)


def test_an_operation_without_a_backend_is_named(hopper):
    hopper.discard("humming")
    with pytest.raises(GpuError, match=r"--deterministic: no backend of experts can run here \(humming: not installed"):
        loading.switch_mode(WorkerConfig(device="cuda", deterministic=True))
    assert not invariant.on()


# The check of operations


def plain_case(product, *, rows=24):
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(rows, 96, generator=draw), torch.randn(40, 96, generator=draw)
    return Case(op="bf16_gemm", name="head", rows=rows, make=lambda at: lambda: (product(x[at], weight),))


def by_columns(x, weight, parts=1):
    """K in so many parts, added up one after the other: a row at a time, so that nothing else shows."""
    pieces = zip(x.chunk(parts, 1), weight.chunk(parts, 1))
    return sum((a[:, None] * b).cumsum(2)[..., -1] for a, b in pieces)


def test_a_split_that_follows_the_batch_is_seen_and_a_fixed_one_is_not():
    found = examine(plain_case(lambda x, w: by_columns(x, w, 1 if len(x) < 9 else 3)), CPU, SIZES)
    assert found.repeats and not found.invariant and 0 < found.difference < 1e-5 and found.wrong.startswith("among ")
    assert examine(plain_case(lambda x, w: by_columns(x, w, 3)), CPU, SIZES).same


def test_sums_that_change_from_run_to_run_are_seen():
    runs = iter(range(1000))
    found = examine(plain_case(lambda x, w: by_columns(x, w, 1 + next(runs) % 2)), CPU, SIZES)
    assert not found.repeats and not found.same


def test_a_chunk_that_adds_up_otherwise_is_seen():
    one, other = plain_case(by_columns), plain_case(lambda x, w: by_columns(x, w, 3))
    found = examine(Case(op="a", name="b", rows=24, make=one.make, chunk=other.make), CPU, SIZES)
    assert found.repeats and found.invariant and found.chunk is False and not found.same


@pytest.mark.parametrize("form", ["chunk", "batch"])
def test_one_row_of_all_that_differs_is_seen(form):
    """Whichever it is, if it is run: last bits differ in few of them."""
    places = set()
    for row in range(24):

        def product(at, row=row):
            (found,) = plain_case(by_columns).make(at)()
            return torch.where((at == row).unsqueeze(1), found.nextafter(torch.tensor(9.0)), found)

        def make(at, product=product):
            return lambda: (product(at) if form == "batch" and len(at) == 16 else plain_case(by_columns).make(at)()[0],)

        chunk = (lambda at, product=product: lambda: (product(at),)) if form == "chunk" else None
        found = examine(Case(op="a", name="b", rows=24, make=make, chunk=chunk), CPU, (16, 23, 24), seed=row)
        assert found.repeats and found.chunk is (False if form == "chunk" else None)
        places.add((found.invariant, found.wrong))
    if form == "chunk":
        assert places <= {(True, "in a chunk of 24"), (True, "in a chunk of 3")}
    else:  # 8 of 24 are not among the 16
        assert places == {(False, "among 16 rows"), (True, "")}


def test_the_first_backend_that_passes_is_taken_and_the_reason_for_the_others_is_logged(hopper, caplog):
    """A library that splits K by the number of rows, and ours, which does not."""

    def product(x, weight):
        splits = 3 if registry.backend("bf16_gemm") == "deep_gemm" and len(x) > 8 else 1
        return by_columns(x, weight, splits)

    class Device:
        type = "cuda"

    case = plain_case(product)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "examine", lambda case, device, sizes: examine(case, CPU, sizes))
        chosen = choose_backends([case], Device(), SIZES)
    assert chosen == {"bf16_gemm": "triton"} and registry.backend("bf16_gemm") == "triton" and invariant.on()
    assert "bf16_gemm=deep_gemm: head: other bits among" in caplog.text


def test_an_operation_that_fails_is_named_with_the_way_out():
    case = plain_case(lambda x, w: by_columns(x, w, 1 if len(x) < 9 else 3))
    words = (
        r"--deterministic: bf16_gemm does not repeat.*head: other bits among.*gpu_ops --parts invariance.*--device cpu"
    )
    with pytest.raises(GpuError, match=words):
        choose_backends([case], CPU, SIZES)
    assert not invariant.on()


def test_a_backend_that_raises_is_a_backend_that_fails():
    def broken(x, weight):
        raise RuntimeError("no kernel image is available")

    with pytest.raises(GpuError, match="torch: head: RuntimeError: no kernel image"):
        choose_backends([plain_case(broken)], CPU, SIZES)


def test_every_operation_passes_in_the_mode_and_some_do_not_outside(nano):
    config, weights = nano
    chosen = choose_backends(Cases(weights, config, CPU, rows=12), CPU, (1, 2, 9))
    assert {"fp8_gemm", "bf16_gemm", "experts", "sparse_attention", "index_scores", "hyper_boundary"} <= set(chosen)
    covered = set(chosen) | set(self_check.NOT_RUN) | {"expert_sort", "large_experts"}
    assert covered == set(registry.OPS), "expert_sort has no rows, large_experts is experts"
    with invariant.switched(False):
        cases = [case for case in Cases(weights, config, CPU, rows=12) if case.op in ("bf16_gemm", "hyper_boundary")]
        assert not all(examine(case, CPU, (2, 9)).same for case in cases), "else the check proves nothing"


# The check of the whole


def test_the_forward_passes_in_the_mode(executor, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "ANSWER", 4)
    monkeypatch.setattr(self_check, "COMPANIONS", (0, 1, 3, 3))
    invariant.switch(True)
    with caplog.at_level("INFO"):
        check_forward(executor, 270)
    assert "prompt of 270 tokens" in caplog.text, "more than 256: long enough for the indexer to choose"


@pytest.mark.parametrize("on", [True, False])
def test_decode_and_chunks_ask_for_the_same_programs(executor, monkeypatch, on):
    """In the mode: keys beside the pool in both, scores from pages, and rows in the pools' format."""
    asked = {"latent_rows": set(), "scores": set(), "chunk_attention": set()}
    plain = {name: getattr(attention, name) for name in ("latent_rows", "ragged_scores", "chunk_attention")}

    def latent_rows(*args, workspace, **more):
        asked["latent_rows"].add(workspace is not None)
        plain["latent_rows"](*args, workspace=workspace, **more)

    def ragged_scores(*args):
        asked["scores"].add("gathered")
        return plain["ragged_scores"](*args)

    def chunk_attention(*args, fp8):
        asked["chunk_attention"].add(fp8)
        return plain["chunk_attention"](*args, fp8=fp8)

    for function in (latent_rows, ragged_scores, chunk_attention):
        monkeypatch.setattr(attention, function.__name__, function)
    prompt = tuple(range(5, 275))  # long enough for the indexer to choose
    invariant.switch(on)
    executor.run(
        StepWork(
            inits=(SlotInit(slot=0, params=SamplingParams(temperature=0.0), seed=0, choice=0, n_emitted=0),),
            rows=(RowWork(slot=0, ids=prompt, pages=range(2), sample_last=1),),
        )
    )
    executor.run(StepWork(rows=(RowWork(slot=0, pages=range(2)),)))
    assert asked["chunk_attention"] == {True}
    assert asked["latent_rows"] == ({True} if on else {True, False})
    assert asked["scores"] == (set() if on else {"gathered"})


def test_the_forward_without_the_mode_is_found_out(executor, monkeypatch):
    monkeypatch.setattr(self_check, "ANSWER", 3)
    with pytest.raises(GpuError, match=r"the whole forward does not repeat its bits.*log-probability"):
        check_forward(executor, 40)


def test_a_deterministic_worker_checks_both_before_it_is_ready(monkeypatch):
    """Loading on CPU tensors, the sizes of the checks cut down."""
    called = []
    monkeypatch.setattr(loading, "gpu", lambda: CPU)
    monkeypatch.setattr(loading, "prepare_kernels", lambda config, folder: True)
    monkeypatch.setattr(loading, "warm_up", lambda executor, step_tokens: called.append("warm-up"))
    monkeypatch.setattr(loading, "check_forward", lambda executor, tokens: called.append(("forward", tokens)))
    monkeypatch.setattr(self_check, "choose_backends", lambda cases, device: called.append(("cases", cases.rows)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a processor")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (10**11, 10**11))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    sizes = {"slots": 2, "pages": 4, "tails": 2, "max_step_tokens": 16}
    loading.load(WorkerConfig(device="cuda", deterministic=True, **sizes))
    assert called == [("cases", 256), "warm-up", ("forward", 16)] and invariant.on()
    called.clear()
    loading.load(WorkerConfig(device="cuda", **sizes))
    assert called == ["warm-up"] and not invariant.on()
