"""The attention-side kernels on a GPU, each against its torch reference, as `benchmarks gpu_attention` checks them."""

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(600)
def test_every_kernel_agrees_with_its_reference():
    from benchmarks import _gpu_attention_checks as checks

    with torch.inference_mode():
        errors = dict(checks.all_checks())
    wrong = {name: error for name, error in errors.items() if not error <= checks.LIMITS.get(name, 2e-3)}
    assert len(errors) > 25 and wrong == {}
