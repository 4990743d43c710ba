"""Export to Hugging Face transformers' `deepseek_v4`: config arguments and an FP32 state dict.

Used to compare this engine with an independent implementation; serving never imports it, and it does not import
transformers. Quantised weights are dequantised exactly, so both sides see the same numbers. The MTP block has no
counterpart there and is left out.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Checkpoint

_PASSED_ON = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "num_hash_layers",
    "swiglu_limit",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "num_nextn_predict_layers",
    "hidden_act",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_bias",
)

# Whole names, then parts of names in the order in which they apply.
_TOP = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
_PARTS = (
    (r"^hc_head_(\w+)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.hc_attn_", ".attn_hc."),
    (r"\.hc_ffn_", ".ffn_hc."),
    (r"\.attn_norm$", ".input_layernorm.weight"),
    (r"\.ffn_norm$", ".post_attention_layernorm.weight"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.wq_b$", ".compressor.indexer.q_b_proj.weight"),
    (r"\.indexer\.weights_proj$", ".compressor.indexer.scorer.weights_proj.weight"),
    (r"\.(compressor(?:\.indexer)?)\.wkv$", r".\1.kv_proj.weight"),
    (r"\.(compressor(?:\.indexer)?)\.wgate$", r".\1.gate_proj.weight"),
    (r"\.(compressor(?:\.indexer)?)\.ape$", r".\1.position_bias"),
    (r"\.(compressor(?:\.indexer)?)\.norm$", r".\1.kv_norm.weight"),
    (r"\.wq_a$", ".q_a_proj.weight"),
    (r"\.wq_b$", ".q_b_proj.weight"),
    (r"\.wkv$", ".kv_proj.weight"),
    (r"\.wo_a$", ".o_a_proj.weight"),
    (r"\.wo_b$", ".o_b_proj.weight"),
    (r"\.q_norm$", ".q_a_norm.weight"),
    (r"\.kv_norm$", ".kv_norm.weight"),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.gate$", ".gate.weight"),
    (r"\.shared_experts\.w1$", ".shared_experts.gate_proj.weight"),
    (r"\.shared_experts\.w2$", ".shared_experts.down_proj.weight"),
    (r"\.shared_experts\.w3$", ".shared_experts.up_proj.weight"),
)


def transformers_name(name: str) -> str:
    """Name of a trunk weight (routed experts excepted) in transformers' state dict."""
    if name in _TOP:
        return _TOP[name]
    for pattern, replacement in _PARTS:
        name = re.sub(pattern, replacement, name)
    return name


def transformers_config(config: V4Config) -> dict[str, Any]:
    """Keyword arguments of `transformers.DeepseekV4Config`."""
    rotary = {"partial_rotary_factor": config.qk_rope_head_dim / config.head_dim}
    compress: dict[str, Any] = {"rope_type": "default", "rope_theta": config.compress_rope_theta, **rotary}
    if config.rope_scaling is not None:
        yarn = config.rope_scaling
        compress |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "attention_factor": 1.0,  # the model has no mscale; left out, transformers would multiply one in
        }
    main = {"rope_type": "default", "rope_theta": config.rope_theta, **rotary}
    return {
        **{key: getattr(config, key) for key in _PASSED_ON},
        "compress_ratios": list(config.layer_ratios),
        "rope_parameters": {"main": main, "compress": compress},
        "torch_dtype": "float32",
    }


def transformers_state_dict(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every trunk weight under its transformers name: float32, expert tables int64."""
    state: dict[str, torch.Tensor] = {}
    for name in checkpoint:
        if name.startswith("mtp.") or ".experts." in name:
            continue
        is_table = name.endswith(".tid2eid")
        state[transformers_name(name)] = checkpoint.dense(name) if is_table else checkpoint.float32(name)
    for layer in range(checkpoint.config.num_hidden_layers):
        gate, up = (checkpoint.experts(layer, part).dequantise() for part in ("w1", "w3"))
        prefix = f"model.layers.{layer}.mlp.experts."
        state[f"{prefix}gate_up_proj"] = torch.cat((gate, up), 1)
        state[f"{prefix}down_proj"] = checkpoint.experts(layer, "w2").dequantise()
    return state
