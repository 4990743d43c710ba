"""Tokens from logits on the device that holds them: the sampler of `worker_svc.sampling`, without its host parts.

Temperature, top-k, top-p, min-p, then the argmax of logits + Philox-Gumbel noise keyed by (seed, choice, position);
greedy rows take the highest logit; the lowest id wins every tie. Penalties, biases and log-probabilities stay with
the host's sampler. Rows never look at each other. CPU tensors run that sampler's own functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.ops import registry
from worker_svc.ops.sample import ref

FAULT_NONE, FAULT_NAN, FAULT_NOTHING_ALLOWED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Params:
    """One number per row. temperature, top_p, min_p FP32 and top_k int32 [n] as in the API (off: 1, 0, <= 0).

    Temperatures below 1e-5 are greedy. seed_low, seed_high, choice and position are 32-bit patterns in int32 [n].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_low: Tensor
    seed_high: Tensor
    choice: Tensor
    position: Tensor


def sample(
    logits: Tensor,
    params: Params,
    tokens: Tensor,
    faults: Tensor,
    *,
    end: int = 0,
    never: Tensor | None = None,
    masks: Tensor | None = None,
) -> None:
    """logits FP32 [n, V] -> tokens int32 [n]; faults int32 [n]: 0, 1 (NaN or infinite logits), 2 (nothing allowed).

    A row with a fault gets the token `end`. never int32 [ceil(V / 32)]: bits of ids that are never sampled; masks int32
    [n, ceil(V / 32)]: a grammar's bits, 1 = allowed. logits stay as they are.
    """
    rows, vocab = logits.shape
    words = -(-vocab // 32)
    assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.shape)
    assert tokens.shape == faults.shape == (rows,) and 0 <= end < vocab, (tokens.shape, faults.shape, end)
    assert never is None or never.shape == (words,), (words, vocab)
    assert masks is None or (masks.shape == (rows, words) and masks.is_contiguous()), (rows, words)
    if registry.on_kernel("sample", logits.is_cuda):
        from worker_svc.ops.sample import triton

        triton.sample(logits, params, tokens, faults, end, never, masks)
    else:
        ref.sample(logits, params, tokens, faults, end, never, masks)
