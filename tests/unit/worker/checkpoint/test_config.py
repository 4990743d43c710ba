"""config.json: what is accepted, and that each refusal names the key, the value and a remedy."""

import json

import pytest

from worker_svc.checkpoint.census import PRESETS, preset
from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.errors import ConfigError, UnreadableError, UnsupportedModelError


def flash(**changes):
    content = preset("flash").to_dict() | changes
    return {key: value for key, value in content.items() if value is not ...}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name):
    config = preset(name)
    assert V4Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_flash_pattern():
    config = preset("flash")
    ratios = config.layer_ratios
    assert [ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert config.nope_head_dim == 448 and config.hc_rows == 24
    assert [config.is_hash_layer(layer) for layer in (0, 2, 3, 43)] == [True, True, False, False]
    cut = config.with_layers(8)
    assert cut.compress_ratios == (0, 0, 4, 128, 4, 128, 4, 128, 0)
    assert preset("pro").layer_ratios.count(128) == 31


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"hidden_size": ...}, "hidden_size", "missing"),
        ({"hidden_size": "4096"}, "hidden_size", "integer"),
        ({"hidden_size": True}, "hidden_size", "integer"),
        ({"hidden_size": 0}, "hidden_size", "1.."),
        ({"hidden_size": 4100}, "hidden_size", "multiple of 32"),
        ({"vocab_size": -1}, "vocab_size", "1.."),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "greater than 0"),
        ({"swiglu_limit": "ten"}, "swiglu_limit", "finite number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob", "true or false"),
        ({"norm_topk_prob": False}, "norm_topk_prob", "only True"),
        ({"scoring_func": "softmax"}, "scoring_func", "sqrtsoftplus"),
        ({"num_key_value_heads": 8}, "num_key_value_heads", "only 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "only False"),
        ({"compress_ratios": ...}, "compress_ratios", "missing"),
        ({"compress_ratios": [0, 4]}, "compress_ratios", "43 + num_nextn_predict_layers 1"),
        ({"compress_ratios": [0] * 43 + [4]}, "compress_ratios", "MTP layer must be 0"),
        ({"compress_ratios": [0] * 43 + [64]}, "compress_ratios", "(0, 4, 128)"),
        ({"compress_ratios": "0,4"}, "compress_ratios", "list of integers"),
        ({"o_groups": 7}, "o_groups", "divide num_attention_heads 64"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim", "below head_dim"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim", "even"),
        ({"index_head_dim": 96}, "index_head_dim", "power of two"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok", "n_routed_experts 256"),
        ({"num_hash_layers": 44}, "num_hash_layers", "num_hidden_layers 43"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers", "at most one"),
        ({"eos_token_id": 129280}, "eos_token_id", "vocab_size"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type", "yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "rope_scaling.original_max_position", "integer"),
        ({"rope_scaling": 4}, "rope_scaling", "object or null"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quant_method", "original checkpoint"),
    ],
)
def test_each_wrong_value_is_named(changes, key, says):
    with pytest.raises(ConfigError) as caught:
        V4Config.from_dict(flash(**changes), source="folder/config.json")
    text = str(caught.value)
    assert text.startswith("folder/config.json: ") and key in text and says in text
    assert (caught.value.code, caught.value.exit_code) == ("MODEL_DIR", 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "deepseek_v4_1"}, "V4.1"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "V4.1"),
        ({"engram_layers": [1]}, "V4.1"),
        ({"compress_ratios": [1, 2] * 22}, "V4.1"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}}, "V4.1"),
        ({"dspark_block_size": 5}, "DSpark"),
        ({"model_type": "deepseek_v3"}, "only deepseek_v4"),
    ],
)
def test_relatives_are_recognised_and_refused(changes, says):
    with pytest.raises(UnsupportedModelError, match=says):
        V4Config.from_dict(flash(**changes))


def test_the_inference_codes_own_names_are_read():
    content = {
        key: value
        for key, value in preset("flash").to_dict().items()
        if key not in ("architectures", "model_type", "rope_scaling", "max_position_embeddings")
    }
    renames = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "moe_intermediate_size": "moe_inter_dim",
        "num_hash_layers": "n_hash_layers",
        "num_nextn_predict_layers": "n_mtp_layers",
        "num_experts_per_tok": "n_activated_experts",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "sliding_window": "window_size",
        "qk_rope_head_dim": "rope_head_dim",
    }
    renamed = {renames.get(key, key): value for key, value in content.items()}
    renamed |= {"original_seq_len": 65536, "rope_factor": 16}
    assert V4Config.from_dict(renamed) == preset("flash")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "models--deepseek-ai--DeepSeek-V4-Flash").mkdir()
    with pytest.raises(ConfigError, match="holds: models--deepseek-ai--DeepSeek-V4-Flash/"):
        V4Config.load(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        V4Config.load(tmp_path / "absent")
    path = tmp_path / "config.json"
    for text in ("{", "[1]", "[" * 100_000, "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            V4Config.load(tmp_path)
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ConfigError, match="not a config"):
        V4Config.load(tmp_path)


def test_a_forbidden_file_says_whose_it_is(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(UnreadableError, match=r"cannot read .*config\.json: owner \d+ mode 0\d{3}, we are uid"):
        V4Config.load(tmp_path)


def test_expert_dtype_may_sit_in_the_quantization_config():
    quantization = preset("flash").to_dict()["quantization_config"] | {"expert_dtype": "fp4"}
    config = V4Config.from_dict(flash(expert_dtype=..., quantization_config=quantization))
    assert config.expert_dtype == "fp4"
    assert V4Config.from_dict(flash(expert_dtype=...)).expert_dtype is None
