"""RMSNorm with a learned weight."""

from torch import Tensor

from worker_svc.ops.rms_norm import rms_norm


class RMSNorm:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, FP32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
