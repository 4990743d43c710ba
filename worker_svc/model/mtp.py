"""The draft layer (multi-token prediction): from a token's streams and the next token, logits for the one after.

It is an ordinary window-only layer over its own pools, fed with e_proj(norm(embed(next))) + h_proj(norm(stream)) per
stream. Several draft steps feed its streams back. Drafting and verification policy are not here.
"""

from torch import Tensor

from worker_svc.kv.pools import LayerPools
from worker_svc.model.hyper import HyperHead
from worker_svc.model.linear import Linear
from worker_svc.model.norm import RMSNorm
from worker_svc.model.step import Step
from worker_svc.model.transformer import Block


class DraftLayer:
    """Embedding and head are the trunk's; everything else is its own."""

    def __init__(
        self,
        *,
        embed: Tensor,
        embed_norm: RMSNorm,
        hidden_norm: RMSNorm,
        embed_proj: Linear,
        hidden_proj: Linear,
        block: Block,
        hyper_head: HyperHead,
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.embed, self.embed_norm, self.hidden_norm = embed, embed_norm, hidden_norm
        self.embed_proj, self.hidden_proj, self.block = embed_proj, hidden_proj, block
        self.hyper_head, self.norm, self.head = hyper_head, norm, head

    def forward(self, streams: Tensor, step: Step, pools: LayerPools) -> tuple[Tensor, Tensor]:
        """streams [S, N, D] of the trunk at step.positions, step.ids the token after each -> logits [S, V], streams."""
        embedded = self.embed_proj(self.embed_norm(self.embed[step.ids]))
        num_tokens, num_streams, width = streams.shape
        hidden = self.hidden_proj(self.hidden_norm(streams).view(-1, width))
        x = hidden.view(num_tokens, num_streams, width) + embedded.unsqueeze(1)
        x = self.block(x, step, pools)
        return self.head(self.hyper_head(x, self.norm)), x
