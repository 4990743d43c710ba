"""DeepSeek-V4 on the device, top to bottom: embedding, attention and experts between hyper-connections, head.

The streams X [T, 4, D] change in place. Between two sublayers one pair of launches writes the output back into the
streams and makes the next sublayer's input from them.
"""

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.gpu.attention import Attention
from worker_svc.gpu.moe import MoE
from worker_svc.gpu.overlap import Overlap
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.step import ChunkStep, DecodeStep
from worker_svc.gpu.weights import BlockWeights, ModelWeights
from worker_svc.model.rope import RopeTable, frequencies
from worker_svc.ops.bf16_gemm import bf16_gemm
from worker_svc.ops.fp8_gemm import Fp8Rows
from worker_svc.ops.hyper_boundary import (
    BoundaryRules,
    Mixer,
    Workspace,
    embed_mix,
    head_norm,
    post_mix,
    pre_norm,
)


class Block:
    """One layer's two sublayers with the mixer and norm in front of each."""

    def __init__(self, weights: BlockWeights, attn: Attention, ffn: MoE) -> None:
        self.attn_mixer, self.attn_norm, self.attn = weights.attn_mixer, weights.attn_norm, attn
        self.ffn_mixer, self.ffn_norm, self.ffn = weights.ffn_mixer, weights.ffn_norm, ffn


class Boundary:
    """The streams on their way through one forward: what the next sublayer reads, and how its output comes back."""

    def __init__(
        self, tokens: int, width: int, rules: BoundaryRules, workspace: Workspace, device: torch.device
    ) -> None:
        self.streams = torch.empty(tokens, 4, width, dtype=torch.bfloat16, device=device)
        self.y = torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
        self.x = Fp8Rows.empty(tokens, width, device)
        self.row_scale = torch.empty(tokens, width // 128, device=device)
        self._post = torch.empty(tokens, 4, device=device)
        self._comb = torch.empty(tokens, 16, device=device)
        self._rules, self._workspace = rules, workspace

    def enter(self, ids: Tensor, embed: Tensor, mixer: Mixer) -> None:
        """All streams start as the embedding."""
        embed_mix(ids, embed, self.streams, mixer, self._workspace)

    def read(self, mixer: Mixer, norm: Tensor) -> None:
        """Fill y, x and row_scale with the next sublayer's input."""
        pre_norm(
            *(self.streams, mixer, self._workspace, norm, self._rules),
            y=self.y,
            post=self._post,
            comb=self._comb,
            q=self.x.codes,
            sf=self.x.scale,
            sf2=self.row_scale,
        )

    def write(
        self, following: Mixer, *, out: Tensor | None = None, experts: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Put a sublayer's output into the streams; `following` is the mixer that reads them next."""
        rows, shared = experts if experts is not None else (None, None)
        post_mix(
            *(self.streams, self.streams, self._post, self._comb, following, self._workspace),
            out=out,
            rows=rows,
            shared=shared,
        )

    def leave(self, mixer: Mixer, norm: Tensor, tokens: Tensor) -> Tensor:
        """The head's input BF16 [n, D] of the sampled tokens."""
        z = torch.empty(len(tokens), self.y.shape[1], dtype=torch.bfloat16, device=self.y.device)
        head_norm(self.streams, mixer, self._workspace, norm, self._rules, tokens, z)
        return z


class Transformer:
    """The trunk and its head over one set of pools."""

    def __init__(
        self,
        weights: ModelWeights,
        config: V4Config,
        pools: GpuPools,
        *,
        max_context: int,
        max_tokens: int,
        overlap: bool = True,
    ) -> None:
        self.weights, self.config, self.pools, device = weights, config, pools, pools.device
        side = Overlap(device, on=overlap)
        turns = {
            compressed: _turns(config, max_context, compressed=compressed).to(device) for compressed in (False, True)
        }
        self.blocks: list[Block] = []
        self.layer_pools = pools.layers
        for block in weights.blocks:
            ratio = block.attn.ratio
            ring = pools.layout.state_ring(ratio) if ratio else 0
            attention = Attention(block.attn, config, turns[ratio != 0], ring, side)
            self.blocks.append(Block(block, attention, MoE(block.ffn, config, side)))
        self.rules = BoundaryRules(config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
        self.workspace, self.max_tokens = Workspace(max_tokens, config.hidden_size, device), max_tokens

    def begin(self, ids: Tensor) -> Boundary:
        """Embedding and the first block's input of ids int32 [T]: what needs nothing else of a step.
        Other forwards may run before this one goes on."""
        edge = Boundary(len(ids), self.config.hidden_size, self.rules, self.workspace, self.pools.device)
        first = self.blocks[0]
        edge.enter(ids, self.weights.embed, first.attn_mixer)
        edge.read(first.attn_mixer, first.attn_norm)
        return edge

    def forward(self, step: DecodeStep | ChunkStep, begun: Boundary | None = None) -> tuple[Tensor, Tensor]:
        """Logits FP32 [n, V] of the sampled tokens and the streams BF16 [T, 4, D] behind the last layer. `begun`: what
        `begin` made of the step's ids."""
        w, edge = self.weights, self.begin(step.ids) if begun is None else begun
        following = [block.attn_mixer for block in self.blocks[1:]] + [w.head_mixer]
        for number, (block, mixer, pools) in enumerate(zip(self.blocks, following, self.layer_pools)):
            if number:
                edge.read(block.attn_mixer, block.attn_norm)
            edge.write(block.ffn_mixer, out=block.attn(edge.y, edge.x, step, pools))
            edge.read(block.ffn_mixer, block.ffn_norm)
            edge.write(mixer, experts=block.ffn(edge.y, edge.x, edge.row_scale, step))
        return bf16_gemm(edge.leave(w.head_mixer, w.norm, step.sampled), w.head), edge.streams


def _turns(config: V4Config, positions: int, *, compressed: bool) -> Tensor:
    """FP32 [positions, 32, 2]: cosine and sine of every position."""
    return torch.view_as_real(RopeTable(frequencies(config, compressed=compressed), positions).turns).contiguous()
