"""RMS normalisation over the last dimension, FP32, with or without a weight."""

from torch import Tensor

from worker_svc.ops.rms_norm import ref


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """[..., K] -> [..., K]: x * rsqrt(mean(x^2) + eps) * weight; a new tensor."""
    assert weight is None or weight.shape == x.shape[-1:], (weight.shape, x.shape)
    return ref.rms_norm(x, weight, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[..., K] -> [..., 1]: the factor alone."""
    return ref.inverse_rms(x, eps)
