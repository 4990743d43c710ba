"""Checkpoint to device: every weight in the form its kernel reads, nothing dequantised on the way.

FP8 weights keep their codes; their E8M0 scales become FP32. What reads the same input is stacked along the outputs:
wq_a with wkv, wq_b with the indexer's, the compressor projections with weights_proj. Experts stay FP4.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Fp4Weight, Fp8Weight, Weight
from worker_svc.checkpoint.names import ExpertFormat, layer_prefix
from worker_svc.ops.fp4_experts import Activation, Fp4Experts, PackedExperts, load_experts
from worker_svc.ops.fp8_gemm import Fp8Matrix
from worker_svc.ops.hyper_boundary import Mixer, prepare_mixer
from worker_svc.ops.quant_fp8 import scale_value

Progress = Callable[[int, int], None]


class WeightSource(Protocol):
    """What `Checkpoint` offers: weights by name, the experts of a layer stacked."""

    config: V4Config
    expert_format: ExpertFormat

    def __getitem__(self, name: str) -> Weight:
        """Fp8Weight, Fp4Weight or a plain tensor."""
        ...

    def experts(self, layer: int, name: str) -> Fp8Weight | Fp4Weight:
        """[E, out, in] of w1, w2 or w3."""
        ...


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """ape FP32 [m, state width] with zeros in the kv columns; entry norms FP32, the indexer's in C4 layers only."""

    ape: Tensor
    norm: Tensor
    index_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One layer's attention. Compressed layers have `states` BF16 [state width (+ index heads), D] and a compressor."""

    ratio: int
    inputs: Fp8Matrix  # wq_a, wkv: [q_lora + 512, D]
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Fp8Matrix  # [H * 512 (+ index heads * 128), q_lora]
    sink: Tensor
    wo_a: Fp8Matrix  # [G, R, H * 512 / G]
    wo_b: Fp8Matrix
    states: Tensor | None = None
    compressor: CompressorWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """Router (a bias, or a table of expert ids by token), routed experts in FP4, the shared one in FP8."""

    gate: Tensor  # BF16 [E, D]
    bias: Tensor | None
    table: Tensor | None  # int32 [V, K]
    experts: Fp4Experts
    shared_w13: Fp8Matrix  # gate rows, then up
    shared_w2: Fp8Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """One layer: mixer and norm before each of its two sublayers."""

    attn_mixer: Mixer
    attn_norm: Tensor
    attn: AttentionWeights
    ffn_mixer: Mixer
    ffn_norm: Tensor
    ffn: MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The trunk and its head."""

    embed: Tensor  # BF16 [V, D]
    blocks: tuple[BlockWeights, ...]
    head_mixer: Mixer
    norm: Tensor
    head: Tensor  # BF16 [V, D]


class WeightLoader:
    """Reads one source onto one device. `expert_backend` pins the experts' kernels."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        *,
        expert_backend: str | None = None,
        expert_activation: Activation = "fp8",
    ) -> None:
        self.source, self.device, self.config = source, device, source.config
        self.expert_backend, self.expert_activation = expert_backend, expert_activation

    def model(self, progress: Progress | None = None) -> ModelWeights:
        """Everything; progress(layers done, layers in all)."""
        blocks = []
        for layer in range(self.config.num_hidden_layers):
            blocks.append(self.block(layer))
            if progress is not None:
                progress(layer + 1, self.config.num_hidden_layers)
        return ModelWeights(
            embed=self._plain("embed"),
            blocks=tuple(blocks),
            head_mixer=self._mixer("hc_head"),
            norm=self._float("norm"),
            head=self._plain("head"),
        )

    def block(self, layer: int) -> BlockWeights:
        """Layer `layer` of the trunk."""
        prefix = layer_prefix(self.config, layer)
        return BlockWeights(
            attn_mixer=self._mixer(f"{prefix}.hc_attn"),
            attn_norm=self._float(f"{prefix}.attn_norm"),
            attn=self._attention(f"{prefix}.attn", self.config.compress_ratios[layer]),
            ffn_mixer=self._mixer(f"{prefix}.hc_ffn"),
            ffn_norm=self._float(f"{prefix}.ffn_norm"),
            ffn=self._moe(layer, f"{prefix}.ffn"),
        )

    def _attention(self, prefix: str, ratio: int) -> AttentionWeights:
        c = self.config
        queries, wo_a = [f"{prefix}.wq_b"], self._fp8(f"{prefix}.wo_a")
        if ratio == 4:
            queries.append(f"{prefix}.indexer.wq_b")
        return AttentionWeights(
            ratio=ratio,
            inputs=self._fp8(f"{prefix}.wq_a", f"{prefix}.wkv"),
            q_norm=self._float(f"{prefix}.q_norm"),
            kv_norm=self._float(f"{prefix}.kv_norm"),
            wq_b=self._fp8(*queries),
            sink=self._float(f"{prefix}.attn_sink"),
            wo_a=Fp8Matrix(*(part.unflatten(0, (c.o_groups, -1)) for part in (wo_a.codes, wo_a.scale))),
            wo_b=self._fp8(f"{prefix}.wo_b"),
            states=self._states(prefix, ratio) if ratio else None,
            compressor=self._compressor(prefix, ratio) if ratio else None,
        )

    def _states(self, prefix: str, ratio: int) -> Tensor:
        """The columns of one token's compressor states, then the indexer's head weights."""
        names = [f"{prefix}.compressor.wkv", f"{prefix}.compressor.wgate"]
        if ratio == 4:
            names += [f"{prefix}.indexer.compressor.wkv", f"{prefix}.indexer.compressor.wgate"]
            names.append(f"{prefix}.indexer.weights_proj")
        return torch.cat([self._plain(name) for name in names])

    def _compressor(self, prefix: str, ratio: int) -> CompressorWeights:
        owners = [f"{prefix}.compressor"] + ([f"{prefix}.indexer.compressor"] if ratio == 4 else [])
        apes = [self._float(f"{owner}.ape") for owner in owners]
        columns = [part for ape in apes for part in (torch.zeros_like(ape), ape)]  # a state is kv, then z
        norms = [self._float(f"{owner}.norm") for owner in owners]
        return CompressorWeights(torch.cat(columns, dim=1), norms[0], norms[1] if ratio == 4 else None)

    def _moe(self, layer: int, prefix: str) -> MoeWeights:
        hashed = self.config.is_hash_layer(layer)
        return MoeWeights(
            gate=self._plain(f"{prefix}.gate"),
            bias=None if hashed else self._float(f"{prefix}.gate.bias"),
            table=self._plain(f"{prefix}.gate.tid2eid").to(torch.int32) if hashed else None,
            experts=self._experts(layer),
            shared_w13=self._fp8(f"{prefix}.shared_experts.w1", f"{prefix}.shared_experts.w3"),
            shared_w2=self._fp8(f"{prefix}.shared_experts.w2"),
        )

    def _experts(self, layer: int) -> Fp4Experts:
        parts: Mapping[str, Fp4Weight] = {name: self._fp4(layer, name) for name in ("w1", "w2", "w3")}
        packed = PackedExperts(
            w13=torch.cat([parts["w1"].packed, parts["w3"].packed], dim=1),
            w13_scale=torch.cat([parts["w1"].scale, parts["w3"].scale], dim=1),
            w2=parts["w2"].packed,
            w2_scale=parts["w2"].scale,
        )
        limit, backend = self.config.swiglu_limit, self.expert_backend
        return load_experts(packed, limit=limit, backend=backend, activation=self.expert_activation)

    def _mixer(self, prefix: str) -> Mixer:
        fn, scale, base = (self._float(f"{prefix}_{part}") for part in ("fn", "scale", "base"))
        return prepare_mixer(fn, scale, base)

    # Leaves

    def _plain(self, name: str) -> Tensor:
        weight = self.source[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return weight.to(self.device)

    def _float(self, name: str) -> Tensor:
        return self._plain(name).float()

    def _fp8(self, *names: str) -> Fp8Matrix:
        """FP8 weights stacked along their outputs; all but the last must fill whole tiles."""
        codes, scales = [], []
        for name in names:
            weight = self.source[name]
            assert isinstance(weight, Fp8Weight), f"{name} is not FP8"
            codes.append(weight.data.to(self.device).view(torch.uint8))
            scales.append(scale_value(weight.scale.to(self.device)))
        return Fp8Matrix(torch.cat(codes).view(torch.float8_e4m3fn), torch.cat(scales))

    def _fp4(self, layer: int, name: str) -> Fp4Weight:
        weight = self.source.experts(layer, name)
        assert isinstance(weight, Fp4Weight), "FP4 experts are checked before loading"
        return Fp4Weight(weight.packed.to(self.device), weight.scale.to(self.device))
