"""What lies between the products of the CPU forward: mixing, norms, rope, activation, routing, softmax.

One object per model decides how it is computed. `Glue` is plain torch and numpy, the default and the oracle;
`worker_svc.compiled_glue` has the same calls fused by torch's compiler. Products, KV pools and whatever is only
gathered or scattered are not glue.
"""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.ops.compress_kv import compress_kv
from worker_svc.ops.hyper_mix import collapse, expand, mix_weights
from worker_svc.ops.rms_norm import inverse_rms, rms_norm
from worker_svc.ops.rope import rotate_
from worker_svc.ops.sparse_attention import sparse_attention
from worker_svc.ops.swiglu_experts import Activation
from worker_svc.ops.topk_gate import expert_weights, gate_scores, pick_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueShapes:
    """Sizes and constants of one model that its glue is made for."""

    hidden: int
    streams: int  # hc_mult
    iterations: int  # of the Sinkhorn loop
    hc_eps: float
    norm_eps: float
    heads: int
    head_dim: int
    rope_dim: int
    latent: int  # q_lora_rank
    intermediate: int  # of one expert
    experts: int
    top_k: int  # experts per token
    factor: float  # routed_scaling_factor
    limit: float  # swiglu_limit

    @staticmethod
    def of(config: V4Config) -> "GlueShapes":
        """Those of a checkpoint."""
        c = config
        return GlueShapes(
            hidden=c.hidden_size,
            streams=c.hc_mult,
            iterations=c.hc_sinkhorn_iters,
            hc_eps=c.hc_eps,
            norm_eps=c.rms_norm_eps,
            heads=c.num_attention_heads,
            head_dim=c.head_dim,
            rope_dim=c.qk_rope_head_dim,
            latent=c.q_lora_rank,
            intermediate=c.moe_intermediate_size,
            experts=c.n_routed_experts,
            top_k=c.num_experts_per_tok,
            factor=c.routed_scaling_factor,
            limit=c.swiglu_limit,
        )


class Glue:
    """The plain path. `deterministic` asks for sums in an order that the batch cannot change."""

    activate: Activation | None = None
    """The experts' activation; None: `ops.swiglu_experts` computes its own."""

    def __init__(self, shapes: GlueShapes, *, deterministic: bool = False) -> None:
        self.shapes, self.deterministic = shapes, deterministic

    def boundary(self, mixes: Tensor, x: Tensor, base: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raw mixes [S, (2+N)N] (overwritten), streams x [S, N, D], base [(2+N)N], the norm's weight [D] ->
        the sublayer's normed input [S, D], post [S, N], comb [S, N, N]."""
        s = self.shapes
        mixes = mixes.mul_(inverse_rms(x.flatten(1), s.norm_eps)).add_(base)
        pre, post, comb = mix_weights(mixes, s.streams, s.iterations, s.hc_eps)
        return rms_norm(collapse(x, pre), weight, s.norm_eps), post, comb

    def expand(self, out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """out [S, D] of the sublayer, x [S, N, D] -> post[k] out + sum_j comb[j, k] x[j], [S, N, D]."""
        return expand(out, x, post, comb, deterministic=self.deterministic)

    def head(self, mixes: Tensor, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        """Raw mixes [S, N] (overwritten), x [S, N, D], base [N], weight [D] -> the last collapse, normed [S, D]."""
        s = self.shapes
        gates = mixes.mul_(inverse_rms(x.flatten(1), s.norm_eps)).add_(base)
        # 1 / (1 + exp(-v)): torch's sigmoid rounds the last elements of an array differently.
        gates = gates.neg().exp_().add_(1).reciprocal_().add_(s.hc_eps)
        return rms_norm(collapse(x, gates), weight, s.norm_eps)

    def latents(self, stack: Tensor, q_weight: Tensor, kv_weight: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """stack [S, W]: latent queries, then the shared KV, then whatever; turns [S, r/2] complex ->
        normed latent queries [S, latent], normed and turned KV [S, d]."""
        s = self.shapes
        latent, kv = stack[:, : s.latent], stack[:, s.latent : s.latent + s.head_dim]
        return rms_norm(latent, q_weight, s.norm_eps), rotate_(rms_norm(kv, kv_weight, s.norm_eps), turns)

    def queries(self, stack: Tensor, turns: Tensor) -> Tensor:
        """stack [S, W]: the heads' queries, then whatever -> [S, H, d], each head normed and turned."""
        s = self.shapes
        q = stack[:, : s.heads * s.head_dim].reshape(-1, s.heads, s.head_dim)
        return rotate_(rms_norm(q, None, s.norm_eps), turns.unsqueeze(1))

    def states(self, product: Tensor, at: int, bias: Tensor, positions: Tensor) -> Tensor:
        """product [S, at + width], bias [m, width], positions [S] int64 -> its last columns [S, width], the bias
        added by absolute position: a compressor's (kv, z), then what the bias leaves alone."""
        return product[:, at:] + bias[positions % bias.shape[0]]

    def compress(self, values: Tensor, scores: Tensor, weight: Tensor, turns: Tensor) -> Tensor:
        """values, scores [E, slots, e], the norm's weight [e], turns [E, r/2] complex -> entries [E, e]."""
        entries = compress_kv(values, scores, deterministic=self.deterministic)
        return rotate_(rms_norm(entries, weight, self.shapes.norm_eps), turns)

    def attend(self, q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
        """One query [1, H, d] over keys [J, d], all of which it sees -> [1, H, d]."""
        return sparse_attention(q, keys, None, sink, scale)

    def attend_allowed(self, q: Tensor, keys: Tensor, allowed: Tensor, sink: Tensor, scale: float) -> Tensor:
        """q [T, H, d] over keys [J, d], of which each query sees those that allowed [T, J] says -> [T, H, d]."""
        return sparse_attention(q, keys, allowed, sink, scale, deterministic=self.deterministic)

    def route(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Router logits [S, E], bias [E] -> experts [S, K] int64, weights [S, K]."""
        scores = gate_scores(logits)
        experts = pick_experts(scores, bias, self.shapes.top_k)
        return experts, expert_weights(scores, experts, self.shapes.factor)

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights [S, K] of experts [S, K] that were chosen by token id."""
        return expert_weights(gate_scores(logits), experts, self.shapes.factor)
