"""Rotary frequencies at the real sizes against transformers, and which layers use which."""

import math

import pytest
import torch

from tests.model.conftest import NANO
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.checkpoint.to_transformers import transformers_config
from worker_svc.kv.layout import KvLayout
from worker_svc.model.rope import RopeTable, frequencies
from worker_svc.model.weights import ModelBuilder


@pytest.mark.parametrize("model", ["flash", "pro", "tiny"])
def test_frequencies_equal_transformers(model):
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    config = preset(model)
    theirs = DeepseekV4RotaryEmbedding(DeepseekV4Config(**transformers_config(config)))
    for compressed, name in ((False, "main"), (True, "compress")):
        wanted = getattr(theirs, f"{name}_inv_freq")
        torch.testing.assert_close(frequencies(config, compressed=compressed), wanted, rtol=3e-7, atol=0)
        assert getattr(theirs, f"{name}_attention_scaling") == 1.0, "nothing is multiplied into cos and sin"


def test_flash_blends_between_pairs_15_and_25():
    config = preset("flash")
    plain = 160000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    ratio = frequencies(config, compressed=True).double() / plain
    assert torch.allclose(ratio[:16], torch.ones(16, dtype=torch.float64), rtol=1e-6)
    assert torch.allclose(ratio[25:], torch.full((7,), 1 / 16, dtype=torch.float64), rtol=1e-6)
    assert bool((ratio[16:25].diff() < 0).all())


def test_a_turn_is_the_angle_of_position_times_frequency():
    table = RopeTable(torch.tensor([1.0, 0.01]), 300)
    turns = table.at(torch.tensor([0, 299]))
    assert turns.forward[0].tolist() == [1, 1]
    assert complex(turns.forward[1, 1]) == pytest.approx(complex(math.cos(2.99), math.sin(2.99)), abs=1e-6)
    assert torch.equal(turns.inverse, turns.forward.conj().resolve_conj())


def test_window_layers_turn_by_the_plain_base_and_the_draft_layer_too():
    checkpoint = load_checkpoint(NANO)
    layout = KvLayout(config=checkpoint.config, numerics=Numerics())
    builder = ModelBuilder(checkpoint, layout, max_context=256, deterministic=False)
    ratios = checkpoint.config.compress_ratios
    for layer, ratio in enumerate(ratios):
        assert builder.block(layer).attn.rope is builder.ropes[ratio != 0]
    assert ratios[-1] == 0 and {0, 4, 128} == set(ratios)
