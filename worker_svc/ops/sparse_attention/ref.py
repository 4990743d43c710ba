"""Shared-KV attention with a sink in plain torch, FP32.

`blocked_attention` is the repeatable form: products of one fixed shape, exact maxima, and sums over blocks in a fixed
order. A block of masked keys adds exact zeros, so neither batch companions nor the chunk that a query came in show.
"""

import torch
from torch import Tensor

KEY_BLOCK = 64
QUERIES = 8


def sparse_attention(q: Tensor, keys: Tensor, allowed: Tensor | None, sink: Tensor, scale: float) -> Tensor:
    """See the door."""
    num_queries, heads, width = q.shape
    scores = torch.matmul(q.view(-1, width), keys.t()).mul_(scale).view(num_queries, heads, -1)
    if allowed is not None:
        scores.masked_fill_(~allowed.unsqueeze(1), -torch.inf)
    sinks = sink.view(1, heads, 1).expand(num_queries, heads, 1)
    probs = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(probs.reshape(num_queries * heads, -1), keys).view(num_queries, heads, width)


def blocked_attention(q: Tensor, keys: Tensor, allowed: Tensor, sink: Tensor, scale: float) -> Tensor:
    """See the door; queries go in groups of QUERIES, padded with queries that see nothing."""
    num_queries, heads, width = q.shape
    groups = -(-num_queries // QUERIES)
    padded_q = q.new_zeros(groups * QUERIES, heads, width)
    padded_q[:num_queries] = q
    padded_allowed = allowed.new_zeros(groups * QUERIES, allowed.shape[1])
    padded_allowed[:num_queries] = allowed
    key_blocks = keys.view(-1, KEY_BLOCK, width)
    sinks = sink.repeat(QUERIES).unsqueeze(1)
    out = q.new_empty(groups * QUERIES * heads, width)
    for group in range(groups):
        seen = padded_allowed[group * QUERIES : (group + 1) * QUERIES].view(QUERIES, -1, KEY_BLOCK)
        queries = padded_q[group * QUERIES : (group + 1) * QUERIES].view(-1, width)
        rows = slice(group * queries.shape[0], (group + 1) * queries.shape[0])
        out[rows] = _attend_group(queries, key_blocks, seen, sinks, scale)
    return out.view(-1, heads, width)[:num_queries]


def _attend_group(q: Tensor, key_blocks: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """q [Q*H, d], key_blocks [B, 64, d], seen [Q, B, 64] bool, sinks [Q*H, 1] -> [Q*H, d]."""
    used = seen.any(2).any(0).nonzero().flatten().tolist()
    heads = q.shape[0] // seen.shape[0]
    scores = q.new_empty(len(used), q.shape[0], KEY_BLOCK)
    for place, block in enumerate(used):
        torch.mm(q, key_blocks[block].t(), out=scores[place])
        hidden = ~seen[:, block].repeat_interleave(heads, dim=0)
        scores[place].mul_(scale).masked_fill_(hidden, -torch.inf)
    top = torch.maximum(scores.amax((0, 2)).unsqueeze(1), sinks) if used else sinks
    probs = (scores - top).exp_()
    total = (sinks - top).exp_()
    mixed = torch.zeros_like(q)
    for place, block in enumerate(used):
        total += probs[place].sum(1, keepdim=True)
        mixed += torch.mm(probs[place], key_blocks[block])
    return mixed.div_(total)
