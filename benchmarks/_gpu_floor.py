"""The least time a step can take on one H200: bytes over bandwidth or operations over rate, component by component.

Components run one after another, so a floor is their sum. Experts count as they were really met, not as expected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from worker_svc.checkpoint.config import V4Config

BANDWIDTH: Final = 4.3e12
FP8: Final = 1.58e15
BF16: Final = 7.9e14
TF32: Final = 3.95e14
ACT_BYTES: Final = 0.60e6
"""Activations that even ideally fused kernels move per token and layer of Flash."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one component moves and computes."""

    bytes: float
    flops: float
    rate: float

    @property
    def seconds(self) -> float:
        """The larger of the two times."""
        return max(self.bytes / BANDWIDTH, self.flops / self.rate)


def expert_bytes(config: V4Config) -> float:
    """FP4 codes and scales of one routed expert."""
    weights = 3 * config.hidden_size * config.moe_intermediate_size
    return weights / 2 + weights / 32


def layer_parts(
    config: V4Config, ratio: int, tokens: int, keys: float, entries: float, experts: float
) -> dict[str, Part]:
    """One layer on `tokens` tokens: `keys` attended and `entries` scored per token, `experts` distinct ones met."""
    c = config
    width, heads_dim = c.hidden_size, c.num_attention_heads * c.head_dim
    dense = width * (c.q_lora_rank + c.head_dim) + heads_dim * c.q_lora_rank
    dense += heads_dim * c.o_lora_rank + c.o_groups * c.o_lora_rank * width
    states = {0: 0, 4: 4 * c.head_dim + 4 * c.index_head_dim + c.index_n_heads, 128: 2 * c.head_dim}[ratio] * width
    index = c.index_n_heads * c.index_head_dim * c.q_lora_rank if ratio == 4 else 0
    one = 3 * width * c.moe_intermediate_size
    row, index_row = 584, c.index_head_dim + 4
    parts = {
        "proj": Part(dense, 2 * dense * tokens, FP8),
        "comp": Part(2 * states + index, 2 * (states + index) * tokens, BF16),
        "attn": Part(tokens * keys * row, tokens * c.num_attention_heads * keys * c.head_dim * 4, BF16),
        "hc": Part(2 * c.hc_rows * c.hc_mult * width * 4, 2 * tokens * 2 * c.hc_rows * c.hc_mult * width, TF32),
        "gate": Part(2 * c.n_routed_experts * width, 2 * c.n_routed_experts * width * tokens, BF16),
        "moe": Part(experts * expert_bytes(c), 2 * tokens * c.num_experts_per_tok * one, FP8),
        "shared": Part(one, 2 * tokens * one, FP8),
        "act": Part(tokens * ACT_BYTES, 0, FP8),
    }
    if ratio == 4:
        flops = tokens * entries * c.index_n_heads * c.index_head_dim * 2
        parts["idx"] = Part(tokens * entries * index_row, flops, FP8)
    return parts


def decode_parts(config: V4Config, ratio: int, batch: int, context: int, experts: float) -> dict[str, Part]:
    """A decode step of `batch` rows at `context` tokens."""
    window, entries = min(config.sliding_window, context), context // 4
    keys = window + {0: 0, 4: min(config.index_topk, entries), 128: context // 128}[ratio]
    return layer_parts(config, ratio, batch, keys, entries, experts)


def prefill_parts(config: V4Config, ratio: int, tokens: int, experts: float) -> dict[str, Part]:
    """A prompt of `tokens` from an empty context. Rows are read once, not once per query: keys count as operations."""
    window = config.sliding_window
    mean_window = sum(min(window, p + 1) for p in range(min(tokens, window))) + max(0, tokens - window) * window
    total = {0: 0.0, 4: 0.0, 128: 0.0}
    if ratio == 4:
        full = 4 * config.index_topk
        total[4] = sum(min(config.index_topk, (p + 1) // 4) for p in range(min(tokens, full)))
        total[4] += max(0, tokens - full) * config.index_topk
    if ratio == 128:
        total[128] = float(sum((p + 1) // 128 for p in range(tokens)))
    keys = (mean_window + total[ratio]) / tokens
    parts = layer_parts(config, ratio, tokens, keys, tokens / 8, experts)
    parts["attn"] = Part(tokens * 584, parts["attn"].flops, BF16)
    if "idx" in parts:
        parts["idx"] = Part(tokens / 4 * (config.index_head_dim + 4), parts["idx"].flops, FP8)
    return parts


def head_part(config: V4Config, rows: int) -> Part:
    """The output head on `rows` sampled rows."""
    weights = config.vocab_size * config.hidden_size
    return Part(2 * weights, 2 * weights * rows, BF16)


def seconds(parts: Mapping[str, Part]) -> float:
    """The floor of some components."""
    return sum(part.seconds for part in parts.values())
