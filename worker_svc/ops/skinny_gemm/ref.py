"""The skinny products in plain torch: exact dequantisation, FP32 sums, one rounding."""

import torch
from torch import Tensor


def fp8_grouped(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    """See the door; the parts here are equal slices of K."""
    x = codes.float() * scale.repeat_interleave(128, 2)
    tiles = weight_scale.repeat_interleave(128, 1)[:, : weight.shape[1]].repeat_interleave(128, 2)
    slices = out.unsqueeze(0) if out.dim() == 3 else out
    for part, columns in zip(slices, torch.arange(x.shape[2]).chunk(len(slices))):
        part.copy_(torch.einsum("mgk,gnk->mgn", x[..., columns], (weight.float() * tiles)[..., columns]))


def bf16(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """See the door; the parts likewise."""
    if out.dim() == 2:
        out.copy_(x.float() @ weight.float().t())
        return
    for part, columns in enumerate(torch.arange(x.shape[1]).chunk(out.shape[0])):
        out[part] = x[:, columns].float() @ weight[:, columns].float().t()
