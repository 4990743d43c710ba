"""The tuner: which times are worth a change, what a file may say, where values come from and where they never go."""

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.kernel_cache import TUNED
from meshkit.models import DEFAULT_MODEL
from worker_svc import tuning
from worker_svc.checkpoint.config import V4Config
from worker_svc.config import WorkerConfig
from worker_svc.gpu import loading
from worker_svc.gpu.step import JOINED_ROWS, joined
from worker_svc.gpu.weights import WeightLoader
from worker_svc.ops import bf16_gemm, fp8_gemm, invariant, registry
from worker_svc.precache.hollow import HollowSource, one_of_each
from worker_svc.tuning import timing, tuner
from worker_svc.tuning.cases import Case, Cases
from worker_svc.tuning.choices import CHOICES, Cut, Options
from worker_svc.tuning.chooser import LOST, Point, Verdict, by_cut, choose
from worker_svc.tuning.file import Tuned, TunedChoice, TunedFileError, read_tuned, usable

ROWS = Cut(what="rows", ops=(), few=99, many=0, candidates=(0, 4, 8, 16), highest=16)
FROM = Cut(what="from", ops=(), few=99, many=1, candidates=(8, 16, 32), lowest=1, highest=99, from_there=True)


@pytest.fixture(autouse=True)
def nothing_in_use():
    yield
    tuning.use({})


# The chooser


def _times(*micros, what="x"):
    return {Point(size, what): time for size, time in zip((1, 2, 4), micros)}


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ((90.0, 90.0, 90.0), Verdict("b", 100 / 90)),
        ((98.0, 90.0, 90.0), Verdict("a")),  # 2 % at one size is noise
        ((50.0, 50.0, 101.0), Verdict("a")),
        ((100.0, 100.0, 100.0), Verdict("a")),
        ((50.0, 50.0, LOST), Verdict("a")),
        ((100 / 1.03, 100 / 1.03, 100 / 1.03), Verdict("b", 1.03)),
    ],
)
def test_a_candidate_has_to_win_at_every_size(own, verdict):
    found = choose("a", {"a": _times(100.0, 100.0, 100.0), "b": _times(*own)})
    assert found.value == verdict.value and math.isclose(found.gain, verdict.gain)


def test_sizes_count_as_wholes_and_no_point_may_lose():
    base = {Point(1, "much", 40): 100.0, Point(1, "little"): 100.0}
    assert choose("a", {"a": base, "b": {Point(1, "much", 40): 90.0, Point(1, "little"): 100.9}}).value == "b"
    assert choose("a", {"a": base, "b": {Point(1, "much", 40): 90.0, Point(1, "little"): 101.1}}).value == "a"
    assert choose("a", {"a": base, "b": {Point(1, "much", 40): 99.0, Point(1, "little"): 50.0}}).value == "a"


def test_the_greatest_saving_wins_and_of_equals_the_first():
    base = _times(100.0, 100.0, 100.0)
    times = {"a": base, "b": _times(90.0, 90.0, 90.0), "c": _times(80.0, 90.0, 90.0), "d": _times(80.0, 90.0, 90.0)}
    assert choose("a", times).value == "c"
    wide = {"a": base, "one": {Point(1, "x"): 80.0}, "all": _times(85.0, 85.0, 85.0)}
    assert choose("a", wide).value == "all", "three sizes save more than one"


def test_a_builtin_value_that_failed_is_kept():
    assert choose("a", {"a": _times(LOST, 100.0, 100.0), "b": _times(50.0, 50.0, 50.0)}) == Verdict("a")


def test_noise_changes_nothing():
    draw = random.Random(3)
    for _ in range(200):
        times = {name: _times(*(100 * draw.uniform(0.99, 1.01) for _ in range(3))) for name in "abcdef"}
        assert choose("a", times) == Verdict("a")


def test_a_cut_is_timed_at_the_ends_of_its_stretches():
    assert ROWS.sizes() == [1, 4, 5, 8, 9, 16]
    assert FROM.sizes() == [7, 8, 15, 16, 31, 32]
    assert dataclasses.replace(ROWS, above=4).sizes() == [5, 8, 9, 16]


def _programs(sizes, few, many):
    return {Point(s, "x"): few(s) for s in sizes}, {Point(s, "x"): many(s) for s in sizes}


def test_a_cut_moves_to_where_the_programs_meet():
    few, many = _programs(ROWS.sizes(), lambda s: 10.0 + 2 * s, lambda s: 25.0)  # equal at 7.5
    assert choose(4, by_cut(ROWS, 4, few, many)).value == 4, "at 8 rows it would lose"
    few, many = _programs(ROWS.sizes(), lambda s: 10.0 + s, lambda s: 30.0)
    assert choose(4, by_cut(ROWS, 4, few, many)).value == 16
    few, many = _programs(ROWS.sizes(), lambda s: 10.0 + s, lambda s: 9.0)
    assert choose(4, by_cut(ROWS, 4, few, many)).value == 0
    own, library = _programs(FROM.sizes(), lambda s: 1000.0 / s, lambda s: 50.0)  # equal at 20
    assert choose(32, by_cut(FROM, 32, library, own)).value == 32, "16 rows are too few"
    own, library = _programs(FROM.sizes(), lambda s: 700.0 / s, lambda s: 50.0)
    assert choose(32, by_cut(FROM, 32, library, own)).value == 16


def test_no_cut_moves_over_sizes_that_were_not_timed():
    few, many = _programs([1, 4, 5, 8], lambda s: 1.0, lambda s: 30.0)
    times = by_cut(ROWS, 4, few, many)
    assert list(times) == [4, 0, 8] and choose(4, times).value == 8


# Timing


def test_candidates_take_turns_and_those_that_fail_lose():
    order = []

    def timer(calls):
        name = tuning.value("x", 0)
        if name == 2:
            raise RuntimeError("out of resources")
        assert [call() for call in calls] == [None]

        def run():
            order.append(name)
            if name == 3 and len(order) > 4:
                raise RuntimeError("launch failed")
            return 10.0 * name + len(order)

        return run

    variants = {name: {"x": number} for name, number in {"a": 1, "b": 2, "c": 3, "d": 4, "wrong": 5}.items()}

    def result():
        return torch.full((4,), 2.0 if tuning.value("x", 0) == 5 else 1.0)

    found = timing.race(variants, [lambda: None], result, timer, rounds=3)
    assert order[:6] == [1, 3, 4, 4, 3, 1] and found["b"] == found["c"] == found["wrong"] == LOST
    assert found["a"] == 16.0 and tuning.in_use() == {}


class _Cuda:
    """What `cuda_timer` asks of torch.cuda, written down; a replay of a graph of two calls takes 0.05 ms."""

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        return lambda *args, **more: self.done.append(name) or self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.done.append("left")

    def elapsed_time(self, end):
        return 0.05


def test_graphs_are_timed_between_events_and_compile_before_the_capture(monkeypatch):
    cuda = _Cuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    run = timing.cuda_timer([lambda: cuda.done.append("a"), lambda: cuda.done.append("b")])
    told = [word for word in cuda.done if word in ("a", "b", "graph", "left", "replay", "synchronize")]
    assert told == ["a", "a", "left", "synchronize", "graph", "a", "b", "left", "replay", "synchronize"]
    cuda.done.clear()
    assert run() == 25.0, "microseconds of one of two calls"
    assert [word for word in cuda.done if word != "Event"] == ["record", "replay", "record", "synchronize"]
    with pytest.raises(RuntimeError, match="no shared memory"):
        timing.cuda_timer([_fail])


def _fail():
    raise RuntimeError("no shared memory")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_larger_product_takes_longer_on_a_gpu():
    def clocked(size):
        x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        return timing.cuda_timer([lambda: x @ x] * 4)

    small, large = clocked(512), clocked(8192)
    assert 0 < small() < large()


# The file


def _tuned(**changes):
    choices = {
        "fp8_gemm.skinny_rows": TunedChoice(16, 8, 1.08, {"few": {"1 wq_b": 10.5, "16 wq_b": None}}),
        "hyper_boundary.split_16": TunedChoice((16, 128, 4), (16, 64, 4), 1.05),
        "attention.joined_rows": TunedChoice(8, 8),
    }
    return Tuned(**({"machine": "h200", "model": "m", "date": "2026-11-30", "choices": choices} | changes))


def test_a_file_survives_its_round_trip(tmp_path):
    assert read_tuned(tmp_path) is None
    _tuned().write(tmp_path)
    found = usable(tmp_path, "h200", "m")
    assert found == _tuned() and found.describe() == "2 of 3 choices tuned"
    assert found.changed == {"fp8_gemm.skinny_rows": 16, "hyper_boundary.split_16": (16, 128, 4)}
    assert found.without(["skinny_gemm"]) == {"hyper_boundary.split_16": (16, 128, 4)}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ((), [], "another version"),
        (("schema",), 2, "another version"),
        (("machine",), "b200", "another machine"),
        (("machine",), None, "machine is no text"),
        (("model",), "n", "other shapes"),
        (("choices",), [], "no object"),
        (("choices", "fp8_gemm.rows"), {"value": 1}, "no choice 'fp8_gemm.rows'"),
        (("choices", "fp8_gemm.skinny_rows"), 16, "no object"),
        (("choices", "fp8_gemm.skinny_rows", "value"), 65, "cannot be 65"),
        (("choices", "fp8_gemm.skinny_rows", "value"), -1, "cannot be -1"),
        (("choices", "fp8_gemm.skinny_rows", "value"), True, "no whole number"),
        (("choices", "fp8_gemm.skinny_rows", "value"), 8.0, "no whole number"),
        (("choices", "fp8_gemm.skinny_rows", "value"), [16, 64, 4], "cannot be"),
        (("choices", "hyper_boundary.split_16", "value"), [16, 96, 4], "cannot be"),
        (("choices", "hyper_boundary.split_16", "value"), 16, "cannot be 16"),
        (("choices", "fp8_gemm.skinny_rows", "builtin"), "8", "builtin is no"),
        (("choices", "fp8_gemm.skinny_rows", "gain"), "much", "another type"),
        (("choices", "fp8_gemm.skinny_rows", "micros"), {"few": {"1": math.nan}}, "numbers by point"),
    ],
)
def test_a_file_with_anything_unknown_is_refused_whole(tmp_path, caplog, path, value, says):
    _tuned().write(tmp_path)
    content = json.loads((tmp_path / TUNED).read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = value
    (tmp_path / TUNED).write_text(json.dumps(content if path else value))
    with pytest.raises(TunedFileError, match=says):
        usable(tmp_path, "h200", "m")
    with caplog.at_level("INFO"):
        assert loading.use_tuned(WorkerConfig(), tmp_path, "h200", "m") == "no choice tuned"
    assert says in caplog.text and "run `v4mesh precache MODEL --tune`" in caplog.text and tuning.in_use() == {}


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20), b"9" * 5000])
def test_a_file_that_is_no_json_is_refused(tmp_path, data):
    (tmp_path / TUNED).write_bytes(data)
    with pytest.raises(TunedFileError):
        read_tuned(tmp_path)
    assert loading.use_tuned(WorkerConfig(), tmp_path, "h200", "m") == "no choice tuned"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(list(CHOICES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(["value", "builtin", "gain", "micros"]), name=st.sampled_from(list(CHOICES)), found=JSON)
def test_no_content_of_a_choice_is_a_crash(tmp_path_factory, key, name, found):
    folder = tmp_path_factory.getbasetemp()
    content = {"value": 8, "builtin": 8, "gain": 1.0, "micros": {}} | {key: found}
    whole = {"schema": 1, "machine": "h200", "model": "m", "date": "", "choices": {name: content}}
    (folder / TUNED).write_text(json.dumps(whole))
    try:
        tuned = usable(folder, "h200", "m")
    except TunedFileError:
        return
    assert tuned is not None and all(CHOICES[name].accepts(choice.value) for name, choice in tuned.choices.items())


def test_a_worker_takes_what_neither_a_pin_nor_a_mode_decides(tmp_path):
    joint = TunedChoice(12, 8, 1.1)
    _tuned(choices=dict(_tuned().choices) | {"attention.joined_rows": joint}).write(tmp_path)
    assert loading.use_tuned(WorkerConfig(), tmp_path, "h200", "m") == "3 of 3 choices tuned"
    assert tuning.value("attention.joined_rows", 8) == 12
    assert loading.use_tuned(WorkerConfig(kv_cache_dtype="bf16"), tmp_path, "h200", "m") == "2 of 3 choices tuned"
    assert "--no-autotune; 3 of 3" in loading.use_tuned(WorkerConfig(autotune=False), tmp_path, "h200", "m")
    assert tuning.in_use() == {}
    assert "deterministic" in loading.use_tuned(WorkerConfig(deterministic=True), tmp_path, "h200", "m")
    assert tuning.in_use() == {}
    registry.pin(["fp8_gemm=torch"])
    try:
        assert loading.use_tuned(WorkerConfig(), tmp_path, "h200", "m") == "2 of 3 choices tuned"
    finally:
        registry.pin(())
    assert set(tuning.in_use()) == {"attention.joined_rows", "hyper_boundary.split_16"}


# What is tuned


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_has_bounds_and_candidates_that_hold_its_builtin_value(name):
    if name.startswith(("hyper_boundary", "sparse_attention")):
        pytest.importorskip("triton")
    choice, builtin = CHOICES[name], tuner.builtin_value(name)
    assert choice.accepts(builtin) and builtin in choice.candidates
    assert all(choice.accepts(value) for value in choice.candidates)
    assert set(choice.ops) <= set(registry.OPS) and choice.what and choice.sizes()
    assert set(tuner.NEEDS.get(name) or tuner.NEEDS[name.partition(".")[0]]) <= set(registry.OPS)
    if isinstance(choice, Cut):
        assert choice.accepts(choice.few) and choice.accepts(choice.many)
        assert all(choice.runs_few(choice.few, size) for size in choice.sizes())
        assert not any(choice.runs_few(choice.many, size) for size in choice.sizes())
        assert not choice.accepts(choice.highest + 1) and not choice.accepts((1,)) and not choice.accepts(True)
    else:
        assert isinstance(choice, Options) and all(len(value) == len(choice.fields) for value in choice.candidates)


def test_values_reach_the_products_and_deterministic_mode_asks_for_none(monkeypatch):
    monkeypatch.setattr(registry, "backend", lambda op: "deep_gemm")
    rows = SimpleNamespace(is_cuda=True, shape=(24, 4096))
    assert (fp8_gemm._backend(rows), bf16_gemm._backend(24, 256)) == ("deep_gemm", "torch")
    assert bf16_gemm._backend(96, 4096) == "torch" and joined(JOINED_ROWS, on_gpu=True)
    tuning.use({"fp8_gemm.skinny_rows": 24, "bf16_gemm.skinny_rows": 32, "bf16_gemm.deep_rows": 128})
    assert (fp8_gemm._backend(rows), bf16_gemm._backend(24, 256)) == ("triton", "skinny")
    assert bf16_gemm._backend(96, 4096) == "deep_gemm" and bf16_gemm.deep_rows() == 128
    monkeypatch.setattr(invariant, "_on", True)
    assert fp8_gemm._backend(rows) == "deep_gemm" and bf16_gemm._backend(24, 256) == "deep_gemm"


def test_joined_attention_follows_its_value_on_a_gpu_alone(monkeypatch):
    tuning.use({"attention.joined_rows": 24})
    assert joined(24, on_gpu=True) and not joined(25, on_gpu=True)
    assert not joined(24, on_gpu=False) and joined(JOINED_ROWS, on_gpu=False)
    monkeypatch.setattr(invariant, "_on", True)
    assert not joined(1, on_gpu=True)


def test_experts_take_their_own_product_from_the_value_on(monkeypatch):
    from worker_svc.ops.fp4_experts import humming

    experts = object.__new__(humming.HummingExperts)
    experts.own_from, experts.experts, experts._large, experts._plans = None, 8, True, {}
    tile = SimpleNamespace(tile=lambda *at: {"block_shape": (16, 1, 1)})
    experts._up = experts._down = tile
    experts.activation = "fp8"
    assert experts.plan(128, 2).up == humming.LARGE and experts.plan(127, 2).up != humming.LARGE
    tuning.use({"fp4_experts.many_rows": 48})
    assert experts.plan(128, 2).up != humming.LARGE and experts.plan(192, 2).up == humming.LARGE
    monkeypatch.setattr(invariant, "_on", True)
    assert experts.plan(192, 2).up != humming.LARGE
    monkeypatch.setattr(invariant, "_on", False)
    experts.own_from = 0
    assert experts.plan(1, 2).up == humming.LARGE, "a benchmark's word comes first"


@pytest.fixture(scope="module")
def cases():
    whole, device = V4Config.load(DEFAULT_MODEL), torch.device("cpu")
    cut = one_of_each(whole)
    weights = WeightLoader(HollowSource(cut, device, drawn=True), device).model()
    return Cases(weights, cut, whole, device, most=1100, slots=40, context=4096)


@pytest.mark.parametrize("name", CHOICES)
def test_cases_are_what_a_step_of_the_model_does(cases, name):
    """Every size that a step can have, counted as often as a layer of its kind comes; results are numbers."""
    layers = len(V4Config.load(DEFAULT_MODEL).layer_ratios)
    sizes, has = CHOICES[name].sizes()[-2:], {1024}
    if name.startswith(("sparse", "attention")) or name.endswith(("skinny_rows", "parts_rows")):
        sizes, has = [1, 3, 64], {1, 3}  # decode steps have 40 rows
    elif name == "fp4_experts.many_rows":
        sizes, has = [8, 1000], {8}  # 1000 rows of each expert are more than 1100 tokens bring
    elif name != "hyper_boundary.split_1024":
        has = {size for size in sizes if size <= 1100}
    with torch.inference_mode():
        found = list(cases.of(name, sizes))
        for case in found:
            case.calls[-1]()
            assert case.result().isfinite().all(), case.point
    assert has == {case.point.size for case in found} - {512}
    assert len({case.point for case in found}) == len(found)
    for size in has:
        weights = {case.point.what: case.point.weight for case in found if case.point.size == size}
        if name.startswith("fp8_gemm"):
            assert sum(weights.values()) == 3 * layers, "three of the six FP8 products in a layer"
        elif name == "hyper_boundary.split_16":
            assert weights == {"attention": layers, "experts": layers}
        elif name.startswith("attention"):
            assert sum(weights.values()) == layers


class _Cases:
    """Cases whose calls do nothing, for a clock that knows what is in force."""

    def of(self, name, sizes):
        for size in sizes:
            yield Case(Point(size, "x"), [lambda: None], lambda: torch.ones(1))


def _tuned_with(monkeypatch, name, micros):
    """What one choice comes to with `micros(values in force, runs so far)`."""
    monkeypatch.setattr(tuner, "CHOICES", {name: CHOICES[name]})
    monkeypatch.setattr(tuner, "NEEDS", {name: {}})
    runs, said = [0], []

    def clock(calls):
        forced = tuning.value(name, None)

        def run():
            runs[0] += 1
            return micros(forced, runs[0])

        return run

    return tuner.tune(_Cases(), clock, said.append), said


def test_what_won_once_has_to_win_again(monkeypatch):
    name = "fp8_gemm.skinny_rows"
    lucky = 2 * len(CHOICES[name].sizes()) * timing.ROUNDS
    found, said = _tuned_with(monkeypatch, name, lambda forced, n: 20.0 if forced == 0 or n > lucky else 10.0)
    assert not found[name].changed and said[0].endswith("-> 8 (built in)")
    found, said = _tuned_with(monkeypatch, name, lambda forced, n: 20.0 if forced == 0 else 10.0)
    assert found[name].value == 64 and said[0].endswith("-> 64 (2.00 x as fast)")
    assert tuning.in_use() == {}


def test_a_shape_that_wins_is_told_with_its_numbers_and_losers_have_none(monkeypatch):
    def micros(forced, _):
        if forced == (16, 64, 8):
            raise RuntimeError("too many registers")
        return 8.0 if forced == (16, 128, 4) else 10.0

    found, said = _tuned_with(monkeypatch, "hyper_boundary.split_16", micros)
    choice = found["hyper_boundary.split_16"]
    assert choice.value == (16, 128, 4) and choice.gain == 1.25
    assert choice.micros["16/64/8"] == {"1 x": None, "8 x": None, "16 x": None}
    assert said == [
        "hyper_boundary.split_16: 16/64/4 30, 16/64/2 30, 16/64/8 lost, 16/128/4 24, 16/128/8 30 us"
        " -> 16/128/4 (1.25 x as fast)"
    ]


def test_inputs_that_do_not_fit_cost_the_other_choices_nothing(monkeypatch, caplog):
    class Short(_Cases):
        def of(self, name, sizes):
            if name == "fp8_gemm.skinny_rows":
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            yield from super().of(name, sizes)

    names = ("fp8_gemm.skinny_rows", "bf16_gemm.skinny_rows")
    monkeypatch.setattr(tuner, "CHOICES", {name: CHOICES[name] for name in names})
    monkeypatch.setattr(tuner, "NEEDS", {name: {} for name in names})
    said = []
    found = tuner.tune(Short(), lambda calls: lambda: 10.0, said.append)
    assert list(found) == ["bf16_gemm.skinny_rows"] and len(said) == 2
    assert said[0].endswith("not timed, OutOfMemoryError: tried to allocate 20 GiB")


def test_what_is_not_there_is_not_timed(monkeypatch):
    said = []
    monkeypatch.setattr(tuner, "CHOICES", {"fp4_experts.many_rows": CHOICES["fp4_experts.many_rows"]})
    monkeypatch.setattr(registry, "backend", lambda op: "torch")
    assert tuner.tune(_Cases(), timing.cuda_timer, said.append) == {}
    assert said == ["fp4_experts.many_rows: not timed, experts runs on torch and large_experts runs on torch"]
