"""The whole forward on a real GPU against the CPU model; skipped where there is none."""

import os

import pytest
import torch

from benchmarks import _gpu_checks as checks
from benchmarks.gpu_forward import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def every_core():
    """The CPU's side is minutes of plain torch on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


def test_nano_text_scores_as_on_the_cpu_in_chunks_and_as_replayed_graphs():
    report = Report()
    checks.check_nano(torch.device("cuda"), report)
    for kind in ("chunk", "decode"):
        assert report.metrics[f"nano_{kind}_agreement"] > 0.95  # choices that rounding decides differ
        for reference in ("nano", "nano_mirror"):
            assert report.metrics[f"{reference}_forced_{kind}_cosine"] > 0.997
            assert report.metrics[f"{reference}_forced_{kind}_agreement"] >= 0.985


def test_layers_of_flash_width_score_as_on_the_cpu():
    report = Report()
    checks.check_flash(torch.device("cuda"), report, tokens=80)
    for kind in ("chunk", "decode"):  # plain torch with the GPU's BF16 roundings is at 0.9935 of the CPU model here
        for reference in ("flash4", "flash4_mirror"):
            assert report.metrics[f"{reference}_forced_{kind}_cosine"] > 0.99


def test_every_operation_agrees_with_its_reference():
    report = Report()
    checks.check_ops(torch.device("cuda"), report)
    failed = [name for name in report.metrics if name.endswith("_failed")]
    assert failed == [] and report.metrics["ops_worst_error"] < 3e-3
    assert all(not row.get("mismatches") for row in report.tables["ops"])
