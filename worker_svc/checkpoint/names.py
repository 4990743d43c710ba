"""The one table of tensors that a DeepSeek-V4 checkpoint must hold, for any config.

`weights` lists logical weights (a quantised linear is one weight), `tensors` lists what is in the file: name,
shape and dtype of each. Loader, census, writer and generator all read this table, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.safetensors_file import DTYPES

ExpertFormat = Literal["fp4", "fp8"]
Kind = Literal["dense", "fp8", "fp4"]

FP8_BLOCK = 128
"""Rows and columns of a weight that share one E8M0 scale in FP8."""
FP4_BLOCK = 32
"""Consecutive inputs of one row that share one E8M0 scale in FP4."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the file; `dtype` is the file's spelling (BF16, F8_E4M3, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One logical weight. `name` has no `.weight` suffix; `shape` is [out, in] for a matrix, unpacked.

    `suffix` is what a dense weight's name carries in the file (".weight" or nothing).
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str = "BF16"
    suffix: str = ".weight"

    def tensors(self) -> tuple[TensorSpec, ...]:
        if self.kind == "dense":
            return (TensorSpec(self.name + self.suffix, self.shape, self.dtype),)
        rows, columns = self.shape
        if self.kind == "fp8":
            scale = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            data = TensorSpec(f"{self.name}.weight", self.shape, "F8_E4M3")
        else:
            scale = (rows, columns // FP4_BLOCK)
            data = TensorSpec(f"{self.name}.weight", (rows, columns // 2), "I8")
        return data, TensorSpec(f"{self.name}.scale", scale, "F8_E8M0")


def weights(config: V4Config, expert_format: ExpertFormat) -> Iterator[WeightSpec]:
    """Every logical weight, in the order of the forward."""
    c = config
    yield WeightSpec("embed", "dense", (c.vocab_size, c.hidden_size))
    yield WeightSpec("head", "dense", (c.vocab_size, c.hidden_size))
    yield WeightSpec("norm", "dense", (c.hidden_size,))
    yield from _hc_head(c, "")
    for layer in range(c.num_hidden_layers):
        yield from _block(c, f"layers.{layer}.", layer, expert_format)
    for stage in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{stage}."
        yield from _block(c, prefix, c.num_hidden_layers + stage, expert_format)
        for name in ("e_proj", "h_proj"):
            yield WeightSpec(prefix + name, "fp8", (c.hidden_size, c.hidden_size))
        for name in ("enorm", "hnorm", "norm"):
            yield WeightSpec(prefix + name, "dense", (c.hidden_size,))
        yield from _hc_head(c, prefix)


def tensors(config: V4Config, expert_format: ExpertFormat) -> Iterator[TensorSpec]:
    """Every tensor of the file."""
    for weight in weights(config, expert_format):
        yield from weight.tensors()


def expert_probe(config: V4Config) -> str:
    """The tensor whose dtype tells the experts' format: I8 = FP4, F8_E4M3 = FP8."""
    return "layers.0.ffn.experts.0.w1.weight"


def is_dropped_copy(name: str) -> bool:
    """True for the copies of the trunk's embedding and head that some files carry under `mtp.`."""
    return name.startswith("mtp.") and ("emb" in name or name.endswith("head.weight"))


def layer_prefix(config: V4Config, layer: int) -> str:
    """`layers.{l}` for the trunk, `mtp.{l - L}` for the logical layers behind it."""
    trunk = config.num_hidden_layers
    return f"layers.{layer}" if layer < trunk else f"mtp.{layer - trunk}"


def _f32(name: str, *shape: int) -> WeightSpec:
    return WeightSpec(name, "dense", shape, "F32", "")


def _hc_head(c: V4Config, prefix: str) -> Iterator[WeightSpec]:
    yield _f32(f"{prefix}hc_head_fn", c.hc_mult, c.hc_mult * c.hidden_size)
    yield _f32(f"{prefix}hc_head_base", c.hc_mult)
    yield _f32(f"{prefix}hc_head_scale", 1)


def _block(c: V4Config, prefix: str, layer: int, expert_format: ExpertFormat) -> Iterator[WeightSpec]:
    for side in ("attn", "ffn"):
        yield WeightSpec(f"{prefix}{side}_norm", "dense", (c.hidden_size,))
        yield _f32(f"{prefix}hc_{side}_fn", c.hc_rows, c.hc_mult * c.hidden_size)
        yield _f32(f"{prefix}hc_{side}_base", c.hc_rows)
        yield _f32(f"{prefix}hc_{side}_scale", 3)
    yield from _attention(c, f"{prefix}attn.", c.compress_ratios[layer])
    yield from _ffn(c, f"{prefix}ffn.", layer, expert_format)


def _attention(c: V4Config, prefix: str, ratio: int) -> Iterator[WeightSpec]:
    heads_dim, group_rows = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    yield WeightSpec(f"{prefix}wq_a", "fp8", (c.q_lora_rank, c.hidden_size))
    yield WeightSpec(f"{prefix}q_norm", "dense", (c.q_lora_rank,))
    yield WeightSpec(f"{prefix}wq_b", "fp8", (heads_dim, c.q_lora_rank))
    yield WeightSpec(f"{prefix}wkv", "fp8", (c.head_dim, c.hidden_size))
    yield WeightSpec(f"{prefix}kv_norm", "dense", (c.head_dim,))
    yield _f32(f"{prefix}attn_sink", c.num_attention_heads)
    yield WeightSpec(f"{prefix}wo_a", "fp8", (group_rows, heads_dim // c.o_groups))
    yield WeightSpec(f"{prefix}wo_b", "fp8", (c.hidden_size, group_rows))
    if ratio:
        yield from _compressor(c, f"{prefix}compressor.", ratio, c.head_dim)
    if ratio == 4:
        index_rows = c.index_n_heads * c.index_head_dim
        yield WeightSpec(f"{prefix}indexer.wq_b", "fp8", (index_rows, c.q_lora_rank))
        yield WeightSpec(f"{prefix}indexer.weights_proj", "dense", (c.index_n_heads, c.hidden_size))
        yield from _compressor(c, f"{prefix}indexer.compressor.", ratio, c.index_head_dim)


def _compressor(c: V4Config, prefix: str, ratio: int, head_dim: int) -> Iterator[WeightSpec]:
    width = (2 if ratio == 4 else 1) * head_dim  # C4 has an a half and a b half
    yield WeightSpec(f"{prefix}wkv", "dense", (width, c.hidden_size))
    yield WeightSpec(f"{prefix}wgate", "dense", (width, c.hidden_size))
    yield _f32(f"{prefix}ape", ratio, width)
    yield WeightSpec(f"{prefix}norm", "dense", (head_dim,))


def _ffn(c: V4Config, prefix: str, layer: int, expert_format: ExpertFormat) -> Iterator[WeightSpec]:
    yield WeightSpec(f"{prefix}gate", "dense", (c.n_routed_experts, c.hidden_size))
    if c.is_hash_layer(layer):
        table = (c.vocab_size, c.num_experts_per_tok)
        yield WeightSpec(f"{prefix}gate.tid2eid", "dense", table, "I64", "")
    else:
        yield _f32(f"{prefix}gate.bias", c.n_routed_experts)
    inner, outer = c.moe_intermediate_size, c.hidden_size
    shapes = (("w1", (inner, outer)), ("w2", (outer, inner)), ("w3", (inner, outer)))
    for expert in range(c.n_routed_experts):
        for name, shape in shapes:
            yield WeightSpec(f"{prefix}experts.{expert}.{name}", expert_format, shape)
    for name, shape in shapes:
        yield WeightSpec(f"{prefix}shared_experts.{name}", "fp8", shape)
