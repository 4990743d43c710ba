"""Names of number formats: each means what it says for the checkpoint at hand, or is refused with the list."""

import pytest

from worker_svc.checkpoint.errors import NumericsError
from worker_svc.checkpoint.quant_choice import Numerics, choose_numerics


def test_default_is_exact():
    assert choose_numerics("fp4") == Numerics() == choose_numerics("fp8", quantization="auto", kv_cache_dtype="auto")
    assert Numerics().is_exact and Numerics().describe() == "exact FP32 on dequantised weights"


@pytest.mark.parametrize(
    ("experts", "name"), [("fp4", "fp4"), ("fp4", "mxfp4"), ("fp4", "w4a8"), ("fp4", "FP4"), ("fp8", "fp8")]
)
def test_native_formats_switch_on_what_the_model_was_trained_with(experts, name):
    numerics = choose_numerics(experts, quantization=name)
    assert numerics == Numerics(activations="fp8", kv="fp8_e4m3", indexer="fp4")
    assert numerics.describe() == "activations fp8, KV fp8_e4m3, indexer fp4"


@pytest.mark.parametrize(
    ("experts", "name"),
    [("fp4", "fp8"), ("fp8", "fp4"), ("fp8", "w4a8"), ("fp4", "compressed-tensors"), ("fp4", "awq")],
)
def test_formats_that_are_not_there_are_refused_with_the_list(experts, name):
    with pytest.raises(NumericsError) as caught:
        choose_numerics(experts, quantization=name)
    assert name in str(caught.value) and f"There is: auto, exact, {experts}" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "kv", "indexer"),
    [
        ("fp8", "fp8_e4m3", "fp4"),
        ("fp8_e4m3", "fp8_e4m3", "fp4"),
        ("fp8_e5m2", "fp8_e5m2", "fp4"),
        ("bf16", "bf16", "none"),
        ("bfloat16", "bf16", "none"),
        ("fp32", "fp32", "none"),
    ],
)
def test_kv_formats_stand_alone(name, kv, indexer):
    assert choose_numerics("fp4", kv_cache_dtype=name) == Numerics(kv=kv, indexer=indexer)


def test_options_combine():
    assert choose_numerics("fp4", quantization="w4a8", kv_cache_dtype="bf16", indexer_dtype="fp8") == Numerics(
        activations="fp8", kv="bf16", indexer="fp8"
    )


def test_unknown_kv_and_indexer_formats_are_refused():
    with pytest.raises(NumericsError, match="--kv-cache-dtype int8: no such KV format"):
        choose_numerics("fp4", kv_cache_dtype="int8")
    with pytest.raises(NumericsError, match="--indexer-dtype fp16"):
        choose_numerics("fp4", indexer_dtype="fp16")
