"""Mixture of experts of one layer: the router (by token id or learned), routed experts and the shared expert."""

import torch
from torch import Tensor

from worker_svc.model.glue import Glue
from worker_svc.model.linear import round_fp8
from worker_svc.ops.matmul import matmul
from worker_svc.ops.swiglu_experts import swiglu_experts


class Router:
    """Experts and weights of each token. `table` [V, K] routes by id (hash layers), `bias` [E] the learned choice."""

    def __init__(self, weight: Tensor, bias: Tensor | None, table: Tensor | None, glue: Glue) -> None:
        assert (bias is None) != (table is None), "a router has a table or a bias"
        self.weight_t, self.bias, self.table = weight.t().contiguous(), bias, table
        self.k, self.glue = glue.shapes.top_k, glue

    def __call__(self, x: Tensor, ids: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
        """x [S, D], ids [S] -> experts [S, K] int64, weights [S, K]."""
        logits = matmul(x, self.weight_t, deterministic=deterministic)
        if self.table is not None:
            experts = self.table[ids]
            return experts, self.glue.weigh(logits, experts)
        assert self.bias is not None
        return self.glue.route(logits, self.bias)


class MoE:
    """w13_t [E+1, D, 2I] and w2_t [E+1, I, D]: routed experts, then the shared one."""

    def __init__(
        self,
        router: Router,
        w13_t: Tensor,
        w2_t: Tensor,
        glue: Glue,
        *,
        fp8_input: bool,
        deterministic: bool,
    ) -> None:
        self.router, self.w13_t, self.w2_t, self.glue = router, w13_t, w2_t, glue
        self.limit, self.deterministic = glue.shapes.limit, deterministic
        self.round_input = round_fp8 if fp8_input else None

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [S, D] normed, ids [S] -> [S, D]."""
        experts, weights = self.router(x, ids, self.deterministic)
        return swiglu_experts(
            x,
            self.w13_t,
            self.w2_t,
            experts,
            weights,
            limit=self.limit,
            deterministic=self.deterministic,
            round_input=self.round_input,
            activate=self.glue.activate,
        )


def stack_experts(routed: Tensor, shared: Tensor) -> Tensor:
    """Routed [E, out, in] and shared [out, in] -> [E+1, in, out] contiguous."""
    stacked = routed.new_empty(routed.shape[0] + 1, routed.shape[2], routed.shape[1])
    stacked[:-1] = routed.transpose(1, 2)
    stacked[-1] = shared.t()
    return stacked


def stack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """w1 (gate) and w3 (up) side by side: [..., I, D] twice -> [..., 2I, D]."""
    return torch.cat([gate, up], dim=-2)
