"""Deterministic mode on a GPU, at Flash's width: every operation and the whole forward repeat their bits."""

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(600)
def test_every_operation_and_the_forward_repeat_their_bits():
    from benchmarks import gpu_ops

    metrics = gpu_ops.run(["--parts", "invariance", "--rows", "130"])
    assert metrics["deterministic_fails"] == "none"
    assert metrics["deterministic_forward"] == "passes"
