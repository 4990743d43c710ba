"""Checkpoint to model: every weight by its name in the file, dequantised to FP32 and laid out as the forward wants it.

Reads through `Checkpoint` only; does not open files. The draft layer's weights are built like any layer's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.checkpoint.loader import Checkpoint
from worker_svc.checkpoint.names import layer_prefix
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.kv.layout import KvLayout
from worker_svc.kv.pools import KvPools
from worker_svc.model.attention import Attention
from worker_svc.model.compressor import Compressor
from worker_svc.model.glue import Glue, GlueShapes
from worker_svc.model.hyper import HyperConnection, HyperHead
from worker_svc.model.indexer import Indexer
from worker_svc.model.linear import GroupedLinear, Linear
from worker_svc.model.moe import MoE, Router, stack_experts, stack_gate_up
from worker_svc.model.mtp import DraftLayer
from worker_svc.model.norm import RMSNorm
from worker_svc.model.rope import RopeTable, frequencies
from worker_svc.model.transformer import Block, V4Transformer

Progress = Callable[[int, int], None]


class ModelBuilder:
    """Builds the trunk and the draft layer of one checkpoint for one choice of numerics; `glue` None: plain torch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: KvLayout,
        *,
        max_context: int,
        deterministic: bool,
        glue: Glue | None = None,
    ) -> None:
        self.checkpoint, self.layout, self.deterministic = checkpoint, layout, deterministic
        self.config: V4Config = checkpoint.config
        self.numerics: Numerics = layout.numerics
        c = self.config
        self.glue = glue or Glue(GlueShapes.of(c), deterministic=deterministic)
        assert self.glue.shapes == GlueShapes.of(c) and self.glue.deterministic == deterministic
        self.ropes = {
            compressed: RopeTable(frequencies(c, compressed=compressed), max_context) for compressed in (False, True)
        }

    def transformer(self, pools: KvPools, progress: Progress | None = None) -> V4Transformer:
        """The trunk over `pools`; progress(layers done, layers in all)."""
        blocks = []
        for layer in range(self.config.num_hidden_layers):
            blocks.append(self.block(layer))
            if progress is not None:
                progress(layer + 1, self.config.num_hidden_layers)
        return V4Transformer(
            embed=self._float("embed"),
            blocks=blocks,
            hyper_head=self._hyper_head(""),
            norm=self._norm("norm"),
            head=self._linear("head", quantised=False),
            streams=self.config.hc_mult,
            ropes=tuple(self.ropes.values()),
            pools=pools,
            deterministic=self.deterministic,
        )

    def draft_layer(self, trunk: V4Transformer) -> DraftLayer | None:
        """The MTP block, sharing the trunk's embedding and head; None if the checkpoint has none."""
        c = self.config
        if c.num_nextn_predict_layers == 0:
            return None
        prefix = layer_prefix(c, c.num_hidden_layers)
        return DraftLayer(
            embed=trunk.embed,
            embed_norm=self._norm(f"{prefix}.enorm"),
            hidden_norm=self._norm(f"{prefix}.hnorm"),
            embed_proj=self._linear(f"{prefix}.e_proj"),
            hidden_proj=self._linear(f"{prefix}.h_proj"),
            block=self.block(c.num_hidden_layers),
            hyper_head=self._hyper_head(f"{prefix}."),
            norm=self._norm(f"{prefix}.norm"),
            head=trunk.head,
        )

    def block(self, layer: int) -> Block:
        """Layer `layer`, counting on through the draft layer."""
        prefix = layer_prefix(self.config, layer)
        return Block(
            attn_hyper=self._hyper(f"{prefix}.hc_attn"),
            attn_norm=self._norm(f"{prefix}.attn_norm"),
            attn=self._attention(f"{prefix}.attn", self.config.compress_ratios[layer]),
            ffn_hyper=self._hyper(f"{prefix}.hc_ffn"),
            ffn_norm=self._norm(f"{prefix}.ffn_norm"),
            ffn=self._moe(layer),
        )

    # Parts

    def _attention(self, prefix: str, ratio: int) -> Attention:
        c = self.config
        compressor = self._compressor(f"{prefix}.compressor", ratio) if ratio else None
        indexer, index_queries = None, []
        if ratio == 4:
            inner = self._compressor(f"{prefix}.indexer.compressor", ratio)
            indexer = Indexer(
                c.index_n_heads, c.index_topk, inner, self.layout.index_format(), deterministic=self.deterministic
            )
            index_queries = [self._float(f"{prefix}.indexer.wq_b")]
        return Attention(
            inputs=self._input_stacks(prefix, ratio),
            q_norm=self._norm(f"{prefix}.q_norm"),
            wq_b=self._stack([self._float(f"{prefix}.wq_b"), *index_queries]),
            kv_norm=self._norm(f"{prefix}.kv_norm"),
            sink=self._float(f"{prefix}.attn_sink"),
            wo_a=GroupedLinear(self._float(f"{prefix}.wo_a"), c.o_groups, deterministic=self.deterministic),
            wo_b=self._linear(f"{prefix}.wo_b"),
            rope=self.ropes[ratio != 0],
            head_dim=c.head_dim,
            glue=self.glue,
            compressor=compressor,
            indexer=indexer,
            deterministic=self.deterministic,
        )

    def _input_stacks(self, prefix: str, ratio: int) -> tuple[Linear, ...]:
        """All products of the layer input; split in two only where FP8 rounds the input of some of them."""
        quantised = [self._float(f"{prefix}.wq_a"), self._float(f"{prefix}.wkv")]
        plain = []
        if ratio:
            owners = [f"{prefix}.compressor"] + ([f"{prefix}.indexer.compressor"] if ratio == 4 else [])
            plain.append(torch.cat([self._float(f"{owner}.{part}") for owner in owners for part in ("wkv", "wgate")]))
        if ratio == 4:
            plain.append(self._float(f"{prefix}.indexer.weights_proj"))
        if self.numerics.activations == "none":
            return (self._stack(quantised + plain, quantised=False),)
        return (self._stack(quantised), *([self._stack(plain, quantised=False)] if plain else []))

    def _compressor(self, prefix: str, ratio: int) -> Compressor:
        return Compressor(ratio, self._float(f"{prefix}.ape"), self._norm(f"{prefix}.norm"), self.glue)

    def _moe(self, layer: int) -> MoE:
        prefix = f"{layer_prefix(self.config, layer)}.ffn"
        hashed = self.config.is_hash_layer(layer)
        router = Router(
            self._float(f"{prefix}.gate"),
            None if hashed else self._float(f"{prefix}.gate.bias"),
            self.checkpoint.dense(f"{prefix}.gate.tid2eid").clone() if hashed else None,
            self.glue,
        )
        w1, w2, w3 = (self.checkpoint.experts(layer, name).dequantise() for name in ("w1", "w2", "w3"))
        s1, s2, s3 = (self._float(f"{prefix}.shared_experts.{name}") for name in ("w1", "w2", "w3"))
        return MoE(
            router,
            stack_experts(stack_gate_up(w1, w3), stack_gate_up(s1, s3)),
            stack_experts(w2, s2),
            self.glue,
            fp8_input=self.numerics.activations == "fp8",
            deterministic=self.deterministic,
        )

    def _hyper(self, prefix: str) -> HyperConnection:
        fn, base, scale = (self._float(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        return HyperConnection(fn, base, scale, self.glue)

    def _hyper_head(self, prefix: str) -> HyperHead:
        fn, base, scale = (self._float(f"{prefix}hc_head_{part}") for part in ("fn", "base", "scale"))
        return HyperHead(fn, base, scale, self.glue)

    # Leaves

    def _float(self, name: str) -> Tensor:
        return self.checkpoint.float32(name)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._float(name), self.config.rms_norm_eps)

    def _linear(self, name: str, *, quantised: bool = True) -> Linear:
        return self._stack([self._float(name)], quantised=quantised)

    def _stack(self, weights: list[Tensor], *, quantised: bool = True) -> Linear:
        """`quantised` weights take FP8 inputs when the numerics say so."""
        fp8_input = quantised and self.numerics.activations == "fp8"
        return Linear(weights, fp8_input=fp8_input, deterministic=self.deterministic)
