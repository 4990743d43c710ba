"""Indexer scoring and selection in plain torch, FP32.

An entry for which every head's product is negative scores exactly 0, so ties are common, and torch.topk does not say
which of them it returns; the threshold form below does.
"""

import torch
from torch import Tensor

QUERIES = 8
KEYS = 64
QUERY_TILE = 128


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """See the door; QUERY_TILE queries at a time, because the products take heads times the memory of the scores."""
    parts = []
    for first in range(0, q.shape[0], QUERY_TILE):
        products = torch.matmul(q[first : first + QUERY_TILE], keys.t()).relu_()  # [t, h, n]
        parts.append(torch.bmm(weights[first : first + QUERY_TILE].unsqueeze(1), products).squeeze(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def blocked_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The same in products of fixed shape, QUERIES queries by KEYS keys: a score's bits depend on its query and key."""
    num_queries, heads, width = q.shape
    padded_q = q.new_zeros(-(-num_queries // QUERIES) * QUERIES, heads, width)
    padded_q[:num_queries] = q
    padded_w = weights.new_zeros(padded_q.shape[0], heads, 1)
    padded_w[:num_queries, :, 0] = weights
    padded_k = keys.new_zeros(-(-keys.shape[0] // KEYS) * KEYS, width)
    padded_k[: keys.shape[0]] = keys
    out = q.new_empty(padded_q.shape[0], padded_k.shape[0])
    for row in range(0, padded_q.shape[0], QUERIES):
        queries = padded_q[row : row + QUERIES].reshape(-1, width)
        for column in range(0, padded_k.shape[0], KEYS):
            products = torch.mm(queries, padded_k[column : column + KEYS].t()).relu_()
            part = products.view(QUERIES, heads, KEYS).mul_(padded_w[row : row + QUERIES])
            out[row : row + QUERIES, column : column + KEYS] = part.sum(1)
    return out[:num_queries, : keys.shape[0]]


def select_entries(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Everything above the k-th value, then as many of those equal to it as still fit, from the lowest index up."""
    in_sight = torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(1)
    if k >= scores.shape[1]:
        return in_sight
    masked = scores.masked_fill(~in_sight, -torch.inf)
    threshold = masked.topk(k, dim=1).values[:, -1:]
    above = masked > threshold
    equal = masked == threshold
    room = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))) & in_sight
