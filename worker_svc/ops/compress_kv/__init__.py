"""Compression of token windows to one entry each: a softmax over the window's slots, per channel."""

from torch import Tensor

from worker_svc.ops.compress_kv import ref


def compress_kv(values: Tensor, scores: Tensor, *, deterministic: bool = False) -> Tensor:
    """values, scores [windows, slots, e] -> [windows, e]; a slot with score -inf contributes nothing (value finite)."""
    assert values.shape == scores.shape and values.dim() == 3
    return ref.compress_each(values, scores) if deterministic else ref.compress_kv(values, scores)
