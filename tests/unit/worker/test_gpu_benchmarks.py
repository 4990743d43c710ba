"""Bookkeeping of the GPU benchmarks that needs no GPU: choices that differed, whose a launch is, bits that repeat."""

import pytest
import torch

from benchmarks import (
    _gpu_attention_cases,
    _gpu_attention_checks,
    _gpu_checks,
    _gpu_diverge,
    _gpu_op_invariance,
    gpu_ops,
    rounding,
)
from benchmarks._gpu_choices import Choices
from benchmarks._gpu_profile import attention_kernels
from benchmarks.gpu_forward import Report
from worker_svc.ops.fp8_gemm import ref as fp8_products
from worker_svc.ops.index_scores import rows_ref as scores_ref
from worker_svc.ops.sparse_attention import rows_ref as attention_ref


def test_experts_differ_by_token_whatever_their_order_and_the_widest_margin_is_kept():
    choices = Choices()
    choices.experts[0] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    choices.margins[0] = torch.tensor([0.5, 0.25, 0.125])
    choices.saw_experts(0, torch.tensor([[2, 1], [3, 7], [5, 9], [0, 0]], dtype=torch.int32))  # the last is padding
    assert choices.summary() == {"experts_differing": 2 / 3, "widest_margin": 0.25, "entries_differing": 0.0}


def test_entries_differ_by_what_the_gpu_left_out_and_counts_outlive_a_forward():
    choices, other = Choices(), Choices()
    other.entries[2] = [[0, 1, 2], [4]]
    choices.take(other)
    choices.saw_entries(2, [{0, 1, 9}, {4}])
    choices.forget()
    assert choices.entries == {} and choices.summary()["entries_differing"] == 1 / 4


def test_attention_launches_are_those_between_two_norms_without_the_mixers():
    layer = ["collapse_norm", "gemm", "scores", "attend", "mix_few", "collapse_norm", "router", "experts", "mix_few"]
    other = ["collapse_norm", "gemm", "attend", "mix_many", "collapse_norm", "experts", "mix_many"]
    first = ["collapse_norm", "once", *layer[1:]]
    names = ["_begin_step", *first, *other, *layer, "collapse_norm", "head"]
    assert attention_kernels(names, (4, 128, 4)) == {4: 3, 128: 2}


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_invariance_is_measured_in_both_modes_without_a_gpu(monkeypatch, capsys):
    """Three operations of v4-nano, on torch's references: one follows the batch by default, one differs in a chunk."""

    class Some(_gpu_op_invariance.Cases):
        def __iter__(self):
            return (case for case in super().__iter__() if case.op in ("bf16_gemm", "index_scores", "topk_gate"))

    monkeypatch.setattr(_gpu_op_invariance, "Cases", Some)
    monkeypatch.setattr(
        _gpu_op_invariance, "_forward", lambda *args, deterministic: "passes" if deterministic else "differs"
    )
    metrics = gpu_ops.run(["--parts", "invariance", "--rows", "12"])
    for mode in ("default", "deterministic"):
        assert metrics[f"{mode}_topk_gate_torch_repeats"] == metrics[f"{mode}_topk_gate_torch_invariant"] == 1
        assert metrics[f"{mode}_bf16_gemm_torch_b1_us"] > 0
    assert metrics["deterministic_bf16_gemm_torch_invariant"] == metrics["deterministic_index_scores_torch_chunk"] == 1
    assert 0 <= metrics["default_index_scores_torch_difference"] < 1e-5
    assert metrics["deterministic_fails"] == "none" and metrics["deterministic_forward"] == "passes"
    assert metrics["default_forward"] == "differs"
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:3] == ["mode", "operation", "backend"]
    assert "deterministic bf16_gemm        torch      states" in table


def test_divergence_counts_whole_answers_and_says_where_the_first_parts():
    report = Report()
    alone = [([5, 6, 7], [0.5, 0.25, 0.125]), ([1, 2, 3], [0.5, 0.5, 0.5])]
    others = [([5, 6, 7], [0.5, 0.25, 0.1251]), ([1, 9, 3], [0.5, 0.25, 0.5])]
    _gpu_diverge._compare("default", "batch_2", alone, others, report)
    (row,) = report.tables["diverge"]
    assert (row["equal"], row["bits_equal"], row["first_token"], row["first_bit"]) == (0.5, 0.0, 1, 1)
    _gpu_diverge._compare("deterministic", "batch_2", alone, alone, report)
    assert report.metrics["deterministic_batch_2_bits_equal"] == 1.0
    assert (
        report.metrics["deterministic_batch_2_first_token"] == report.metrics["deterministic_batch_2_first_bit"] == -1
    )


@pytest.mark.usefixtures("one_thread")
def test_both_modes_are_compared_with_themselves_without_a_gpu(monkeypatch):
    """v4-nano on CPU tensors: deterministic mode keeps every bit; the check of single operations has its own test."""
    monkeypatch.setattr(_gpu_diverge, "choose_backends", lambda cases, device: _gpu_diverge.invariant.switch(True))
    monkeypatch.setattr(_gpu_diverge, "unseen", lambda tokenizer, count: [3 + 7 * n % 4000 for n in range(count)])
    monkeypatch.setattr(_gpu_diverge, "PROMPT", 6)
    monkeypatch.setattr(_gpu_diverge.batch_invariance, "random_prompt", lambda executor, number: [5, 77, 300, 9])
    report = Report()
    _gpu_diverge.measure(torch.device("cpu"), report, prompts=2, answer=2, batches=(2,), sampled=1, checked=4)
    shown = {(row["mode"], row["what"]): row for row in report.tables["diverge"]}
    whats = ["repeated", "restarted", "batch_2", "resumed"]
    assert list(shown) == [(name, what) for name in _gpu_diverge.MODES for what in whats] + [
        ("deterministic", "default mode")
    ]
    assert all(shown["deterministic", what]["bits_equal"] == 1.0 for what in whats)
    assert report.metrics["deterministic_nano_cost_b2"] > 0
    assert report.metrics["deterministic_requests_differ"] == 0 < report.metrics["deterministic_requests_compared"]
    assert not _gpu_diverge.invariant.on()


@pytest.mark.usefixtures("one_thread")
def test_the_checks_of_attention_run_through_and_find_nothing_in_the_references(monkeypatch):
    """On CPU tensors both sides are plain torch, so what differs would be the checks' own mistake."""
    scores = pytest.importorskip("worker_svc.ops.index_scores.triton")
    attention = pytest.importorskip("worker_svc.ops.sparse_attention.triton")
    monkeypatch.setattr(_gpu_attention_cases, "DEVICE", "cpu")
    monkeypatch.setattr(
        scores, "paged_scores", lambda *a: a[-1].copy_(scores_ref.paged_scores(*a[:-1], a[-1].shape[1]))
    )
    monkeypatch.setattr(
        scores, "ragged_scores", lambda *a: a[-1].copy_(scores_ref.ragged_scores(*a[:-1], a[-1].shape[1]))
    )
    monkeypatch.setattr(attention, "sparse_prefill", lambda *a: a[-1].copy_(attention_ref.chunk_attention(*a[:-1])))
    monkeypatch.setattr(attention, "attend", lambda *a: (a, None))
    monkeypatch.setattr(
        attention,
        "join",
        lambda args, lse, sink, out: out.copy_(attention_ref.decode_attention(*args[:7], sink, args[7])),
    )
    with torch.inference_mode():
        found = dict(_gpu_attention_checks.all_checks())
    assert len(found) == 30
    assert {name for name, error in found.items() if error} <= {"attend_f16_1", "attend_f16_10"}, "FP16 queries round"


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread")
def test_the_checks_of_operations_run_through(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    report = Report()
    _gpu_checks.check_ops(torch.device("cpu"), report)
    assert not [name for name in report.metrics if name.endswith("_failed")]
    assert report.metrics["ops_worst_error"] < 3e-3 and len(report.tables["ops"]) > 20


@pytest.mark.usefixtures("one_thread")
def test_rounding_is_told_by_what_is_rounded_and_leaves_the_products_as_they_were(monkeypatch, capsys):
    monkeypatch.delitem(rounding.CHANGES, "FP8 tensor core sums")  # the slowest
    products = fp8_products.matmul, attention_ref.chunk_attention
    found = rounding.run(["--tokens", "60", "--singles", "4"])
    assert (fp8_products.matmul, attention_ref.chunk_attention) == products
    order, weights, exact = (
        found[f"{name}_forced_chunk_cosine"]
        for name in ("order_of_FP32_sums", "attention_weights_BF16", "BF16_against_exact")
    )
    assert order > 0.9999 > weights > 0.99 and exact < order
    assert "of the worst token" in capsys.readouterr().out
