"""Mixture of experts of one layer on the device: router, FP4 experts, and the shared FP8 expert beside them."""

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.gpu.overlap import Overlap
from worker_svc.gpu.step import ChunkStep, DecodeStep
from worker_svc.gpu.weights import MoeWeights
from worker_svc.ops.bf16_gemm import bf16_gemm_parts
from worker_svc.ops.fp8_gemm import Fp8Rows, fp8_gemm
from worker_svc.ops.swiglu_experts import Hidden, middle
from worker_svc.ops.topk_gate import select, select_hash


class MoE:
    """One layer."""

    def __init__(self, weights: MoeWeights, config: V4Config, overlap: Overlap) -> None:
        self.weights, self.config, self.overlap = weights, config, overlap

    def __call__(self, y: Tensor, x: Fp8Rows, row_scale: Tensor, step: DecodeStep | ChunkStep) -> tuple[Tensor, Tensor]:
        """y BF16 [T, D] normed, x the same in FP8, row_scale its scales row-major.

        -> routed rows BF16 [T * K, D], weighted, a token's K one after the other, and the shared expert's BF16 [T, D].
        """
        w = self.weights
        with self.overlap.beside():
            shared = self._shared(x)
        ids, weights = self._route(y, step)
        plan = w.experts.plan(y.shape[0], self.config.num_experts_per_tok)
        quantised = w.experts.activation == "fp8"
        source, scale = (x.codes, row_scale) if quantised else (y, None)
        routed = w.experts.run(plan, source, scale, ids, weights)
        self.overlap.join()
        return routed, shared

    def _route(self, y: Tensor, step: DecodeStep | ChunkStep) -> tuple[Tensor, Tensor]:
        """Experts int32 [T, K] and weights FP32 [T, K]."""
        w, k, factor = self.weights, self.config.num_experts_per_tok, self.config.routed_scaling_factor
        logits = bf16_gemm_parts(y, w.gate)
        ids = torch.empty(y.shape[0], k, dtype=torch.int32, device=y.device)
        weights = torch.empty(y.shape[0], k, device=y.device)
        if w.table is not None:
            select_hash(logits, w.table, step.ids, ids, weights, factor, positions=step.positions)
        else:
            assert w.bias is not None
            select(logits, w.bias, ids, weights, factor, positions=step.positions)
        return ids, weights

    def _shared(self, x: Fp8Rows) -> Tensor:
        w = self.weights
        hidden = fp8_gemm(x, w.shared_w13)
        inner = Fp8Rows.empty(hidden.shape[0], hidden.shape[1] // 2, hidden.device)
        middle(Hidden(hidden, inner.codes, inner.scale), None, self.config.swiglu_limit)
        return fp8_gemm(inner, w.shared_w2)
