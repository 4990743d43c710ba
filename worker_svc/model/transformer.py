"""DeepSeek-V4, top to bottom: embedding, blocks of attention and experts between hyper-connections, head.

One forward for every kind of row: a decode row is a chunk of one token, a verify row a chunk of a few, a prefill
chunk any number, and a batch is any mix of them. Reads and writes the KV pools it was built with.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from worker_svc.kv.pools import KvPools, LayerPools
from worker_svc.model.attention import Attention
from worker_svc.model.hyper import HyperConnection, HyperHead
from worker_svc.model.linear import Linear
from worker_svc.model.moe import MoE
from worker_svc.model.norm import RMSNorm
from worker_svc.model.rope import RopeTable
from worker_svc.model.step import ForwardInputs, Step, plan_step


class Block:
    """One layer: attention and experts, each between a collapse of the streams and their expansion."""

    def __init__(
        self,
        attn_hyper: HyperConnection,
        attn_norm: RMSNorm,
        attn: Attention,
        ffn_hyper: HyperConnection,
        ffn_norm: RMSNorm,
        ffn: MoE,
    ) -> None:
        self.attn_hyper, self.attn_norm, self.attn = attn_hyper, attn_norm, attn
        self.ffn_hyper, self.ffn_norm, self.ffn = ffn_hyper, ffn_norm, ffn

    def __call__(self, x: Tensor, step: Step, pools: LayerPools) -> Tensor:
        """Streams x [S, N, D] -> [S, N, D]."""
        y, post, comb = self.attn_hyper.collapse(x, self.attn_norm)
        x = self.attn_hyper.expand(self.attn(y, step, pools), x, post, comb)
        y, post, comb = self.ffn_hyper.collapse(x, self.ffn_norm)
        return self.ffn_hyper.expand(self.ffn(y, step.ids), x, post, comb)


class V4Transformer:
    """The trunk and its head over one set of KV pools."""

    def __init__(
        self,
        *,
        embed: Tensor,
        blocks: list[Block],
        hyper_head: HyperHead,
        norm: RMSNorm,
        head: Linear,
        streams: int,
        ropes: Sequence[RopeTable],
        pools: KvPools,
        deterministic: bool,
    ) -> None:
        assert len(blocks) == len(pools.layers)
        self.embed, self.blocks, self.hyper_head, self.norm, self.head = embed, blocks, hyper_head, norm, head
        self.streams, self.ropes, self.pools, self.deterministic = streams, ropes, pools, deterministic

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Logits [n, V] of the sampled positions, rows in order. Moves every row's KV state on."""
        step = plan_step(inputs, self.pools, self.ropes, deterministic=self.deterministic)
        x = self.embed[step.ids].unsqueeze(1).repeat(1, self.streams, 1)  # [S, N, D]
        for block, layer_pools in zip(self.blocks, self.pools.layers):
            x = block(x, step, layer_pools)
        self._keep_streams(x, step)
        return self.head(self.hyper_head(x[step.sampled], self.norm))

    def matrices(self) -> Iterator[Tensor]:
        """Every weight that a product reads, input-major [K, N]; one expert stands for all of its layer."""
        yield self.head.weight_t
        yield self.hyper_head.fn_t
        for block in self.blocks:
            yield from (stack.weight_t for stack in (*block.attn.inputs, block.attn.wq_b, block.attn.wo_b))
            yield from (block.attn.wo_a.weight_t[0], block.ffn.router.weight_t)
            yield from (block.ffn.w13_t[0], block.ffn.w2_t[0], block.attn_hyper.fn_t, block.ffn_hyper.fn_t)

    def _keep_streams(self, x: Tensor, step: Step) -> None:
        """The draft layer resumes from the streams before a page boundary."""
        for row in step.rows:
            for save in row.boundaries:
                self.pools.streams[save.number] = x[save.last_token]
