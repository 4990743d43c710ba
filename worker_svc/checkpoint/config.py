"""config.json of a DeepSeek-V4 checkpoint, as a frozen value whose field names are the file's keys.

Everything the forward and the loader divide by, index with or allocate from is checked here, once, so that no
later code has to. Keys that this engine does not read are ignored; keys that name another model are refused.
Reads one small JSON file and nothing else; `expert_dtype` is kept as written, never trusted (the loader probes).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from worker_svc.checkpoint.errors import ConfigError, UnreadableError, UnsupportedModelError

MAX_CONFIG_BYTES = 1 << 20
RATIOS = (0, 4, 128)
"""Compression ratios of a layer: window only, C4 (overlapping, with indexer), C128."""

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "expert_dtype": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
# The names used by the inference code that DeepSeek publishes beside the weights.
_RENAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "moe_inter_dim": "moe_intermediate_size",
    "n_hash_layers": "num_hash_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "window_size": "sliding_window",
    "rope_head_dim": "qk_rope_head_dim",
}
_WEIGHT_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN, applied at every position of the layers that use `compress_rope_theta`; there is no mscale."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """Hyper-parameters of one checkpoint. Build with `load` or `from_dict`, which check."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one per trunk layer, then one per MTP layer (0)
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    num_nextn_predict_layers: int
    hidden_act: str
    attention_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_id: int
    expert_dtype: str | None = None

    @property
    def nope_head_dim(self) -> int:
        """Leading dims of a head vector that carry no position: head_dim - qk_rope_head_dim."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each trunk layer."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def hc_rows(self) -> int:
        """Rows of hc_attn_fn and hc_ffn_fn: pre, post and comb of one mixer."""
        return (2 + self.hc_mult) * self.hc_mult

    def is_hash_layer(self, layer: int) -> bool:
        """True if layer `layer` routes by token id. MTP layers (layer >= num_hidden_layers) never do."""
        return layer < self.num_hash_layers

    def with_layers(self, layers: int) -> V4Config:
        """The same model cut to its first `layers` trunk layers; the MTP entries stay at the end."""
        if not 1 <= layers <= self.num_hidden_layers:
            raise ConfigError("config", "layers", layers, f"choose 1..{self.num_hidden_layers}")
        return replace(
            self,
            num_hidden_layers=layers,
            compress_ratios=self.layer_ratios[:layers] + self.compress_ratios[self.num_hidden_layers :],
            num_hash_layers=min(self.num_hash_layers, layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that `from_dict` reads back to an equal value."""
        content: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        content |= asdict(self)
        content["compress_ratios"] = list(self.compress_ratios)
        if self.rope_scaling is not None:
            content["rope_scaling"] = {"type": "yarn", **asdict(self.rope_scaling)}
        content["torch_dtype"] = "bfloat16"
        content["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": list(_WEIGHT_BLOCK),
            "activation_scheme": "dynamic",
        }
        return content

    @staticmethod
    def load(folder: str | Path) -> V4Config:
        """Read and check `folder`/config.json; raises ConfigError or UnsupportedModelError."""
        path = Path(folder) / "config.json"
        try:
            size = path.stat().st_size
            if size > MAX_CONFIG_BYTES:
                raise ConfigError(str(path), "", None, f"{size} bytes are not a config")
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            held = _listing(Path(folder))
            raise ConfigError(str(path), "", None, f"not found; the folder holds: {held}") from None
        except OSError as error:
            raise UnreadableError(path, error) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(path), "", None, f"not valid JSON: {error}") from None
        return V4Config.from_dict(content, source=str(path))

    @staticmethod
    def from_dict(content: object, *, source: str = "config.json") -> V4Config:
        """Check a parsed config.json; `source` is the file named in errors."""
        if not isinstance(content, dict):
            raise ConfigError(source, "", None, "a JSON object is required")
        _refuse_other_models(content, source)
        _check_quantization(content.get("quantization_config"), source)
        values = _Reader(_with_original_names(content), source).read()
        _check_relations(values, source)
        return values


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "nothing (no such folder)"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def _refuse_other_models(content: Mapping[str, Any], source: str) -> None:
    """Recognise relatives by what only they have, so that the message can name them."""
    model_type = content.get("model_type", "deepseek_v4")
    architectures = content.get("architectures") or []
    names = [str(model_type).lower(), *(str(name).lower() for name in architectures if name)]
    plain = [name.replace("_", "").replace("-", "").replace(".", "") for name in names]
    ratios = content.get("compress_ratios")
    quantization = content.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    v41_sign = (
        next((name for name, short in zip(names, plain) if "deepseekv41" in short), None)
        or next((key for key in content if "engram" in key.lower()), None)
        or (
            f"compress_ratios {ratios[:4]}..."
            if isinstance(ratios, list) and any(r in (1, 2) for r in ratios if type(r) is int)
            else None
        )
        or (f"weight_block_size {block}" if isinstance(block, list) and 32 in block else None)
    )
    if v41_sign:
        raise UnsupportedModelError(
            source, "model", v41_sign, "this is DeepSeek-V4.1, another architecture; it is not supported"
        )
    dspark = sorted(key for key in content if key.startswith("dspark"))
    if dspark:
        raise UnsupportedModelError(
            source,
            dspark[0],
            content[dspark[0]],
            "this checkpoint carries the DSpark drafter, which is not supported; "
            "use the revision with one MTP block (DeepSeek-V4-Flash or -Pro without a date)",
        )
    if "model_type" in content and model_type != "deepseek_v4":
        raise UnsupportedModelError(source, "model_type", model_type, "only deepseek_v4 is supported")


def _check_quantization(value: object, source: str) -> None:
    """The weight format must be DeepSeek's own: FP8 in 128x128 blocks with E8M0 scales (experts perhaps FP4)."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise ConfigError(source, "quantization_config", value, "an object is required")
    for key, expected in (("quant_method", "fp8"), ("fmt", "e4m3"), ("weight_block_size", list(_WEIGHT_BLOCK))):
        found = value.get(key, expected)
        if found != expected:
            remedy = f"only {expected!r} is supported; use DeepSeek's original checkpoint"
            raise ConfigError(source, f"quantization_config.{key}", found, remedy)


def _with_original_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Accept the inference code's config.json too: rename keys, fold the YaRN fields into rope_scaling."""
    renamed = {_RENAMES.get(key, key): value for key, value in content.items()}
    if "dim" not in content:
        return renamed
    factor = renamed.get("rope_factor", 1)
    if isinstance(factor, int | float) and factor > 1 and "original_seq_len" in renamed:
        renamed.setdefault(
            "rope_scaling",
            {
                "type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": renamed["original_seq_len"],
                "beta_fast": renamed.get("beta_fast", 32),
                "beta_slow": renamed.get("beta_slow", 1),
            },
        )
    renamed.setdefault("max_position_embeddings", renamed.get("max_seq_len", 1 << 20))
    renamed.setdefault("num_nextn_predict_layers", 1)
    return renamed


class _Reader:
    """Typed look-ups in the parsed file, every failure naming its key."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        self._content, self._source = content, source

    def read(self) -> V4Config:
        values: dict[str, Any] = {}
        for field in fields(V4Config):
            kind = str(field.type)
            raw = self._raw(field.name)
            if field.name == "compress_ratios":
                values[field.name] = self._ratios(raw)
            elif field.name == "rope_scaling":
                values[field.name] = self._rope_scaling(raw)
            elif field.name == "eos_token_id" and isinstance(raw, list) and len(raw) == 1:
                values[field.name] = self._int(field.name, raw[0], low=0)
            elif kind == "int":
                low = 0 if field.name in _ZERO_ALLOWED else 1
                values[field.name] = self._int(field.name, raw, low=low)
            elif kind == "float":
                values[field.name] = self._float(field.name, raw)
            elif kind == "bool":
                values[field.name] = self._bool(field.name, raw)
            else:
                values[field.name] = self._str(field.name, raw)
            if field.name in _FIXED and values[field.name] != _FIXED[field.name]:
                raise self._error(field.name, raw, f"only {_FIXED[field.name]!r} is supported")
        return V4Config(**values)

    def _raw(self, key: str) -> object:
        if key == "expert_dtype" and key not in self._content:
            quantization = self._content.get("quantization_config")
            return quantization.get("expert_dtype") if isinstance(quantization, dict) else None
        if key in self._content:
            return self._content[key]
        if key in _DEFAULTS:
            return _DEFAULTS[key]
        raise self._error(key, None, "missing; use the config.json that came with the checkpoint")

    def _error(self, key: str, value: object, remedy: str) -> ConfigError:
        return ConfigError(self._source, key, value, remedy)

    def _int(self, key: str, value: object, *, low: int) -> int:
        if type(value) is not int:
            raise self._error(key, value, "an integer is required")
        if not low <= value <= 1 << 31:
            raise self._error(key, value, f"must be {low}..{1 << 31}")
        return value

    def _float(self, key: str, value: object) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self._error(key, value, "a finite number is required")
        if value <= 0:  # type: ignore[operator]
            raise self._error(key, value, "must be greater than 0")
        return float(value)  # type: ignore[arg-type]

    def _bool(self, key: str, value: object) -> bool:
        if type(value) is not bool:
            raise self._error(key, value, "true or false is required")
        return value

    def _str(self, key: str, value: object) -> str | None:
        if value is None and key == "expert_dtype":
            return None
        if type(value) is not str:
            raise self._error(key, value, "a string is required")
        return value

    def _ratios(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(ratio) is int for ratio in value):
            raise self._error("compress_ratios", value, "a list of integers is required")
        wrong = sorted({ratio for ratio in value if ratio not in RATIOS})
        if wrong:
            raise self._error("compress_ratios", wrong, f"only {RATIOS} exist in DeepSeek-V4")
        return tuple(value)

    def _rope_scaling(self, value: object) -> RopeScaling | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._error("rope_scaling", value, "an object or null is required")
        kind = value.get("type", value.get("rope_type"))
        if kind != "yarn":
            raise self._error("rope_scaling.type", kind, "only 'yarn' is supported")
        original = value.get("original_max_position_embeddings")
        return RopeScaling(
            factor=self._float("rope_scaling.factor", value.get("factor")),
            original_max_position_embeddings=self._int(
                "rope_scaling.original_max_position_embeddings", original, low=1
            ),
            beta_fast=self._float("rope_scaling.beta_fast", value.get("beta_fast", 32)),
            beta_slow=self._float("rope_scaling.beta_slow", value.get("beta_slow", 1)),
        )


_ZERO_ALLOWED = frozenset({"num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id"})


def _check_relations(c: V4Config, source: str) -> None:
    """Rules between keys: what divides what, what must fit into what."""
    layers, nextn = c.num_hidden_layers, c.num_nextn_predict_layers
    expected = f"num_hidden_layers {layers} + num_nextn_predict_layers {nextn} entries are required"
    fp4 = "must be a multiple of 32 (FP4 blocks)"
    rules: tuple[tuple[bool, str, str], ...] = (
        (nextn <= 1, "num_nextn_predict_layers", "at most one MTP layer is supported"),
        (len(c.compress_ratios) == layers + nextn, "compress_ratios", expected),
        (not any(c.compress_ratios[layers:]), "compress_ratios", "the entry of the MTP layer must be 0"),
        (
            c.num_attention_heads % c.o_groups == 0,
            "o_groups",
            f"must divide num_attention_heads {c.num_attention_heads}",
        ),
        (c.qk_rope_head_dim < c.head_dim, "qk_rope_head_dim", f"must be below head_dim {c.head_dim}"),
        (
            c.qk_rope_head_dim <= c.index_head_dim,
            "qk_rope_head_dim",
            f"must be at most index_head_dim {c.index_head_dim}",
        ),
        (c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "must be even"),
        (c.index_head_dim & (c.index_head_dim - 1) == 0, "index_head_dim", "must be a power of two (Hadamard)"),
        (
            c.num_experts_per_tok <= c.n_routed_experts,
            "num_experts_per_tok",
            f"must be at most n_routed_experts {c.n_routed_experts}",
        ),
        (c.num_hash_layers <= layers, "num_hash_layers", f"must be at most num_hidden_layers {layers}"),
        (c.hidden_size % 32 == 0, "hidden_size", fp4),
        (c.moe_intermediate_size % 32 == 0, "moe_intermediate_size", fp4),
        (c.bos_token_id < c.vocab_size, "bos_token_id", f"must be below vocab_size {c.vocab_size}"),
        (c.eos_token_id < c.vocab_size, "eos_token_id", f"must be below vocab_size {c.vocab_size}"),
    )
    for holds, key, remedy in rules:
        if not holds:
            raise ConfigError(source, key, getattr(c, key), remedy)
