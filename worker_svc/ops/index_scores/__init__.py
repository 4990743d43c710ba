"""The lightning indexer's scores and its selection: which compressed entries each query reads."""

import torch
from torch import Tensor

from worker_svc.ops.index_scores import ref


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, deterministic: bool = False) -> Tensor:
    """q [T, h, e], keys [n, e], weights [T, h] (scaled) -> [T, n]: sum_h w_h relu(q_h . k_i)."""
    assert q.shape[:2] == weights.shape and q.shape[2] == keys.shape[1], (q.shape, keys.shape, weights.shape)
    return ref.blocked_scores(q, keys, weights) if deterministic else ref.index_scores(q, keys, weights)


def select_entries(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """[T, n] scores, [T] int64 count of visible entries -> [T, n] bool: the k highest visible ones.

    Among equal scores the lowest index wins, on every backend. Entries at or beyond the visible count are never chosen.
    """
    assert visible.dtype == torch.int64 and visible.shape == scores.shape[:1]
    return ref.select_entries(scores, visible, k)
