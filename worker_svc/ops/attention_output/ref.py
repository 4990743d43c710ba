"""Inverse rotation and FP8 quantisation in plain torch, FP32 in between."""

import torch
from torch import Tensor

from worker_svc.ops import quant_fp8
from worker_svc.ops.rope import rotate_


def attention_output(o: Tensor, turns: Tensor, positions: Tensor, codes: Tensor, scale: Tensor) -> None:
    """See the door."""
    back = torch.view_as_complex(turns[positions.clamp(min=0).long()]).conj().resolve_conj()
    turned = rotate_(o.float(), back.unsqueeze(1))
    quantised, exponent = quant_fp8.quantise(turned.view(codes.shape), quant_fp8.ACTIVATION_BLOCK)
    codes.copy_(quantised)
    scale.copy_(quant_fp8.scale_value(exponent))
