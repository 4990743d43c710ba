"""The +-1 matrix of the 128-wide Hadamard transform, as BF16 on a device, made once per device.

Kernels multiply by it on the tensor cores. The first call must come before a CUDA graph is captured.
"""

from functools import cache

import torch
from torch import Tensor

from worker_svc.ops.hadamard import hadamard

WIDTH = 128


@cache
def sign_matrix(device: torch.device) -> Tensor:
    """bf16 [128, 128], entry (-1)^popcount(a & b); symmetric."""
    with torch.inference_mode(False):
        signs: Tensor = (hadamard(torch.eye(WIDTH)) * WIDTH**0.5).round()
        return torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device=device).copy_(signs)
