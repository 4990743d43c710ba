"""Linear layers: the weight as FP32, input-major, with the run-time rounding of the input where the numerics ask it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.ops import quant_fp8
from worker_svc.ops.matmul import matmul


def round_fp8(x: Tensor) -> Tensor:
    """The input of an FP8 or FP4 weight's product as FP8 hardware sees it: E4M3 per 128 values of a token."""
    return quant_fp8.fake_quant(x, quant_fp8.ACTIVATION_BLOCK)


class Linear:
    """y = x W^T. Several weights that read the same input may be stacked; `sizes` are their output widths."""

    def __init__(self, weights: Sequence[Tensor], *, fp8_input: bool, deterministic: bool) -> None:
        self.sizes = [weight.shape[0] for weight in weights]
        self.weight_t = torch.cat(list(weights)).t().contiguous()  # [in, out]
        self.fp8_input, self.deterministic = fp8_input, deterministic

    def __call__(self, x: Tensor) -> Tensor:
        """[S, in] -> [S, out]."""
        return matmul(round_fp8(x) if self.fp8_input else x, self.weight_t, deterministic=self.deterministic)

    def split(self, product: Tensor) -> tuple[Tensor, ...]:
        """Such a product [S, out] as one [S, size] view per stacked weight."""
        parts: tuple[Tensor, ...] = torch.split(product, self.sizes, dim=1)
        return parts


class GroupedLinear:
    """Block-diagonal product: group g's slice of the input meets rows g of the weight (wo_a). The input stays exact."""

    def __init__(self, weight: Tensor, groups: int, *, deterministic: bool) -> None:
        self.weight_t = weight.view(groups, -1, weight.shape[1]).transpose(1, 2).contiguous()  # [G, in, R]
        self.deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        """[S, G * in] -> [S, G * R]."""
        groups, width, _ = self.weight_t.shape
        parts = x.view(-1, groups, width).transpose(0, 1)
        if not self.deterministic:
            return torch.bmm(parts, self.weight_t).transpose(0, 1).flatten(1)
        return torch.cat([matmul(part, w, deterministic=True) for part, w in zip(parts, self.weight_t)], dim=1)
