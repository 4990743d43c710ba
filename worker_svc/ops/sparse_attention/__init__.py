"""Attention of queries over gathered keys that are also the values, with a sink per head.

`sparse_attention` takes one sequence's keys as a matrix (the CPU model). `decode_attention` reads rows of the KV pools
by their numbers, `chunk_attention` rows of a BF16 workspace: FlashMLA where the number of heads is 64 or 128, else our
Triton kernels, plain torch on the CPU. In deterministic mode (`ops.invariant`) our kernels run in both, and read the
same keys in the same order: the window first, then entries.
"""

from typing import Any

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.kv_rows import FP8_PAGE_BYTES
from worker_svc.ops.sparse_attention import ref, rows_ref
from worker_svc.ops.split_plan import split_plans

KEY_BLOCK = ref.KEY_BLOCK
LIBRARY_HEADS = (64, 128)


def sparse_attention(
    q: Tensor, keys: Tensor, allowed: Tensor | None, sink: Tensor, scale: float, *, deterministic: bool = False
) -> Tensor:
    """q [T, H, d], keys [J, d], allowed [T, J] bool (None: all), sink [H] -> [T, H, d].

    Softmax over the allowed keys and the sink, which adds exp(sink) to the denominator, unscaled, and no value.
    Deterministic mode works on blocks of KEY_BLOCK keys in order; J must be a multiple of it, and a query's bits stay
    the same when blocks with none of its keys are added before, between or behind. Masked keys must be finite.
    """
    assert q.dim() == 3 and keys.shape[1] == q.shape[2] and sink.shape == q.shape[1:2]
    assert allowed is None or allowed.shape == (q.shape[0], keys.shape[0]), (q.shape, keys.shape, allowed)
    if not deterministic:
        return ref.sparse_attention(q, keys, allowed, sink, scale)
    assert allowed is not None and keys.shape[0] % KEY_BLOCK == 0
    return ref.blocked_attention(q, keys, allowed, sink, scale)


def _backend(q: Tensor, pool: Tensor | None) -> str:
    """Of attention with these queries: the library takes two numbers of heads, and pools of FP8 rows."""
    if not q.is_cuda:
        return "torch"
    chosen = registry.backend("sparse_attention")
    served = q.shape[1] in LIBRARY_HEADS and (pool is None or pool.shape[1] == FP8_PAGE_BYTES)
    return "triton" if chosen == "flash_mla" and not served else chosen


class DecodePlan:
    """What all layers of one kind share in one step: how the library splits the keys. Make a new one for each step.

    parts int32 [P, 8] and splits int32 [B + 1] as `ops.split_plan` makes them; without them the library plans by itself
    at the first call, with one thread.
    """

    def __init__(self, parts: Tensor | None = None, splits: Tensor | None = None) -> None:
        self.parts, self.splits = parts, splits
        self.split: Any = None


def decode_plans(near: Tensor, c4: Tensor, c128: Tensor, heads: int) -> dict[int, DecodePlan]:
    """The plans of a step by compression ratio (0: window alone); near, c4, c128 int32 [B]: keys that a token reads."""
    chosen = "torch" if not near.is_cuda else registry.backend("sparse_attention")
    if chosen != "flash_mla" or heads not in LIBRARY_HEADS:
        return {ratio: DecodePlan() for ratio in (0, 4, 128)}
    processors = torch.cuda.get_device_properties(near.device).multi_processor_count
    plans = split_plans(near, c4, c128, max(1, processors // (heads // 64)))
    return {ratio: DecodePlan(plans.parts[i], plans.splits[i]) for i, ratio in enumerate((0, 4, 128))}


def decode_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_len: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_len: Tensor | None,
    sink: Tensor,
    scale: float,
    plan: DecodePlan,
) -> Tensor:
    """q BF16 [T, H, 512]; window and entries pools of KV rows; window_rows int32 [T, 128] and entry_rows int32 [T, k],
    -1 = none; the first window_len / entry_len int32 [T] of each list count. sink FP32 [H]. -> BF16 [T, H, 512]."""
    assert q.dim() == 3 and q.dtype == torch.bfloat16 and sink.shape == q.shape[1:2], (q.shape, sink.shape)
    assert (entries is None) == (entry_rows is None) == (entry_len is None), "a pool comes with its lists"
    chosen = _backend(q, window)
    if chosen == "torch":
        return rows_ref.decode_attention(
            q, window, window_rows, window_len, entries, entry_rows, entry_len, sink, scale
        )
    if chosen == "flash_mla":
        from worker_svc.ops.sparse_attention import flash_mla

        return flash_mla.decode_attention(
            q, window, window_rows, window_len, entries, entry_rows, entry_len, sink, scale, plan
        )
    from worker_svc.ops.sparse_attention import triton

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    triton.sparse_decode(q, window, window_rows, window_len, entries, entry_rows, entry_len, sink, scale, out)
    return out


def chunk_attention(
    q: Tensor,
    keys: Tensor,
    index: Tensor,
    sink: Tensor,
    scale: float,
    reach: Tensor | None = None,
    *,
    fp8: bool = False,
) -> Tensor:
    """q BF16 [T, H, 512], keys BF16 [S, 512], index int32 [T, k] of rows of `keys`, -1 = none -> BF16 [T, H, 512].

    reach int32 [T]: from there on a list is -1 only; kernels that can skip the rest. fp8: the keys are what FP8 rows
    read back as, and decode reads FP8 rows; deterministic mode then does so here.
    """
    assert q.shape[0] == index.shape[0] and index.shape[1] % 128 == 0, (q.shape, index.shape)
    assert reach is None or (reach.dtype == torch.int32 and reach.shape == index.shape[:1]), "reach int32 [T]"
    chosen = _backend(q, None)
    if chosen == "torch":
        return rows_ref.chunk_attention(q, keys, index, sink, scale)
    if chosen == "flash_mla":
        from worker_svc.ops.sparse_attention import flash_mla

        return flash_mla.chunk_attention(q, keys, index, sink, scale, reach)
    from worker_svc.ops.sparse_attention import triton

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    triton.sparse_prefill(q, keys, index, sink, scale, out, reach, fp8=fp8)
    return out
