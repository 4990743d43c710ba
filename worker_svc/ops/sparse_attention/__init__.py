"""Attention of one sequence's queries over gathered keys that are also the values, with a sink per head."""

from torch import Tensor

from worker_svc.ops.sparse_attention import ref

KEY_BLOCK = ref.KEY_BLOCK


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
