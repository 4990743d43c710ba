"""FP4 experts in plain torch: exact dequantisation, FP32 products, the kernels' roundings in between.

The oracle, and the CPU's path. On a GPU it works too, but asks the device which experts were hit, so no graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from worker_svc.ops import invariant, quant_fp4
from worker_svc.ops.fp4_experts import Activation, ExpertPlan, PackedExperts
from worker_svc.ops.matmul import matmul
from worker_svc.ops.swiglu_experts import Hidden, middle, middle_bf16


class TorchExperts:
    """See `Fp4Experts`."""

    name = "torch"

    def __init__(self, packed: PackedExperts, limit: float, activation: Activation) -> None:
        self.packed, self.limit, self.activation = packed, limit, activation

    def plan(self, tokens: int, k: int) -> ExpertPlan:
        """Nothing to choose."""
        return ExpertPlan(tokens, 1)

    def prepare(self, steps: Iterable[int], k: int) -> int:
        """Nothing to compile."""
        return 0

    def run(
        self,
        plan: ExpertPlan,
        x: Tensor,
        scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        shared: Hidden | None = None,
    ) -> Tensor:
        """See the door."""
        tokens, k = ids.shape
        assert x.shape[0] == tokens == plan.tokens, (x.shape, tokens, plan.tokens)
        p = self.packed
        slots = ids.flatten().long()
        source = torch.arange(tokens, device=x.device).repeat_interleave(k)
        hidden = x.new_zeros(tokens * k, 2 * p.inner, dtype=torch.bfloat16)
        self._product(_exact(x, scale), source, slots, p.w13, p.w13_scale, hidden)
        out = torch.zeros(tokens * k, p.hidden, dtype=torch.bfloat16, device=x.device)
        rows = torch.arange(tokens * k, device=x.device)
        if self.activation == "fp8":
            codes = torch.empty(tokens * k, p.inner, dtype=torch.float8_e4m3fn, device=x.device)
            inner_scale = torch.empty(tokens * k, p.inner // 128, device=x.device)
            middle(Hidden(hidden, codes, inner_scale, weights.flatten()), shared, self.limit)
            inner = _exact(codes, inner_scale)
        else:
            rounded = torch.empty(tokens * k, p.inner, dtype=torch.bfloat16, device=x.device)
            middle_bf16(hidden, weights.flatten(), rounded, self.limit)
            inner = rounded.float()
        self._product(inner, rows, slots, p.w2, p.w2_scale, out)
        return out

    def _product(
        self, x: Tensor, source: Tensor, slots: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor
    ) -> None:
        """out[slot] = W_expert(slot) x[source(slot)], expert by expert."""
        for expert in sorted(set(slots[slots >= 0].tolist())):
            mine = (slots == expert).nonzero().flatten()
            w = quant_fp4.dequantise(weight[expert], weight_scale[expert])
            out[mine] = matmul(x[source[mine]], w.t(), deterministic=invariant.on()).bfloat16()


def _exact(x: Tensor, scale: Tensor | None) -> Tensor:
    """FP32 values of quantised or BF16 rows."""
    return x.float() if scale is None else x.float() * scale.repeat_interleave(128, 1)
