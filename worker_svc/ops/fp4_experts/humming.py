"""FP4 experts through humming's indexed grouped products, FP8 or BF16 activations, our sort and middle around them.

Its weights are repacked at load (lossless exponent folding, ranges chosen by the data); tiles come from its own
heuristics for the GPU, with the exceptions measured in `_Product.tile`. Kernels compile once per tile, with NVRTC.
Steps of many tokens run our own product (`wgmma`) on the same packed weights (`--kernel large_experts=humming`: not).
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker_svc import tuning
from worker_svc.ops import invariant, quant_fp4, registry
from worker_svc.ops.expert_sort import Sorted, allocate, sort_slots
from worker_svc.ops.fp4_experts import Activation, ExpertPlan, PackedExperts, row_scales, wgmma
from worker_svc.ops.swiglu_experts import Hidden, middle, middle_bf16

INDEXED = json.dumps({"gemm_type": "indexed"})
INVARIANT = json.dumps({"gemm_type": "indexed", "use_batch_invariant": True})
LARGE = "wgmma"
MANY_ROWS = 32
"""Rows of an expert, on average, from which our own product runs. On an H200 it is 0.94 x as fast at 24, 1.3 x at 48.
`tuning` measures it anew."""
LAYOUT_ERROR = 2e-3

log = logging.getLogger(__name__)

_INPUTS: dict[Activation, dict[str, Any]] = {
    "fp8": {"dtype": "float8e4m3", "group_size": 128},
    "bf16": {"dtype": "bfloat16"},
}


@cache
def package() -> Any:
    """(layer class, heuristics, product, kernel class) of humming; ImportError names the package to install."""
    try:
        from humming import ops  # type: ignore[import-not-found, unused-ignore]
        from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found, unused-ignore]
        from humming.layer import HummingLayer  # type: ignore[import-not-found, unused-ignore]
        from humming.tune import get_heuristics_config  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise ImportError(f"FP4 experts need humming-kernels==0.1.20: {error}") from error
    return HummingLayer, get_heuristics_config, ops.humming_gemm, HummingKernel


class HummingExperts:
    """See `Fp4Experts`."""

    name = "humming"

    def __init__(self, packed: PackedExperts, limit: float, activation: Activation) -> None:
        assert packed.w13.is_cuda, "humming runs on a GPU"
        self.limit, self.activation = limit, activation
        self.hidden, self.inner, self.experts = packed.hidden, packed.inner, packed.w13.shape[0]
        self._up = _Product(packed.w13, packed.w13_scale, activation)
        self._down = _Product(packed.w2, packed.w2_scale, activation)
        self._plans: dict[tuple[int, int, bool], ExpertPlan] = {}
        self._large = self._up.readable and self._down.readable and registry.backend("large_experts") == "nvrtc"
        self.own_from: int | None = None  # average rows of an expert; None: as measured

    def plan(self, tokens: int, k: int) -> ExpertPlan:
        """See the door. Both products share the sort, so they must share its block size."""
        exact = invariant.on()
        if self._large and not exact and tokens * k >= self._many_rows() * self.experts:
            return ExpertPlan(tokens, wgmma.SORT_BLOCK, LARGE, LARGE)
        if (tokens, k, exact) not in self._plans:
            up, down = (product.tile(tokens, k, self.activation, exact) for product in (self._up, self._down))
            if up["block_shape"][0] != down["block_shape"][0]:
                down = up
            tiles = up["block_shape"][0], json.dumps(up), json.dumps(down)
            self._plans[tokens, k, exact] = ExpertPlan(tokens, *tiles, exact)
        return self._plans[tokens, k, exact]

    def _many_rows(self) -> int:
        return tuning.value("fp4_experts.many_rows", MANY_ROWS) if self.own_from is None else self.own_from

    def prepare(self, steps: Iterable[int], k: int) -> int:
        """Compile what steps of these many tokens need, on all cores; how many kernels those are."""
        plans = [self.plan(t, k) for t in set(steps)]
        kernels = {kernel for plan in plans for kernel in self._kernels(plan)}
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16), thread_name_prefix="compile") as pool:
            for done in [pool.submit(product.prepare, tile, compute) for product, tile, compute in kernels]:
                done.result()
        return len(kernels)

    def _kernels(self, plan: ExpertPlan) -> tuple[tuple[_Product, str, str], tuple[_Product, str, str]]:
        compute = _compute(plan)
        return (self._up, plan.up, compute), (self._down, plan.down, compute)

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
        assert x.shape == (tokens, self.hidden) and tokens == plan.tokens, (x.shape, plan.tokens)
        assert (scale is not None) == (self.activation == "fp8") and (shared is None or scale is not None)
        order = allocate(tokens, k, self.experts, plan.block, x.device)
        sort_slots(ids, order)
        hidden = torch.empty(tokens * k, 2 * self.inner, dtype=torch.bfloat16, device=x.device)
        if plan.up == LARGE:
            assert scale is not None
            return self._run_large(x, scale, order, weights, shared, hidden)
        compute = _compute(plan)
        self._up(x, scale, order, k, plan.up, hidden, compute)
        out = torch.empty(tokens * k, self.hidden, dtype=torch.bfloat16, device=x.device)
        if scale is not None:
            codes = torch.empty(tokens * k, self.inner, dtype=torch.float8_e4m3fn, device=x.device)
            inner_scale = torch.empty(tokens * k, self.inner // 128, device=x.device)
            middle(Hidden(hidden, codes, inner_scale, weights.view(-1)), shared, self.limit)
            self._down(codes, inner_scale, order, 1, plan.down, out, compute)
        else:
            rounded = torch.empty(tokens * k, self.inner, dtype=torch.bfloat16, device=x.device)
            middle_bf16(hidden, weights.view(-1), rounded, self.limit)
            self._down(rounded, None, order, 1, plan.down, out, compute)
        return out

    def _run_large(
        self, x: Tensor, scale: Tensor, order: Sorted, weights: Tensor, shared: Hidden | None, hidden: Tensor
    ) -> Tensor:
        """The same by our own product: rows get one scale each first."""
        tokens, slots = x.shape[0], hidden.shape[0]
        rows, row_scale = torch.empty_like(x), torch.empty(tokens, device=x.device)
        row_scales.fold(x, scale, rows, row_scale)
        self._up.many(rows, row_scale, order, slots // tokens, hidden)
        codes = torch.empty(slots, self.inner, dtype=torch.float8_e4m3fn, device=x.device)
        code_scale = torch.empty(slots, device=x.device)
        row_scales.folded_middle(hidden, weights.view(-1), self.limit, codes, code_scale)
        if shared is not None:
            middle(shared, None, self.limit)
        out = torch.empty(slots, self.hidden, dtype=torch.bfloat16, device=x.device)
        self._down.many(codes, code_scale, order, 1, out)
        return out


def _compute(plan: ExpertPlan) -> str:
    return INVARIANT if plan.invariant else INDEXED


class _Product:
    """One grouped weight [E, N, K] in humming's layout."""

    def __init__(self, packed: Tensor, scale: Tensor, activation: Activation) -> None:
        layer_class, self._heuristics, self._gemm, self._kernel = package()
        experts, rows, half = packed.shape
        with torch.device(packed.device):
            layer = layer_class(
                shape_n=rows,
                shape_k=half * 2,
                weight_config={"quant_method": "mxfp4"},
                input_config=dict(_INPUTS[activation]),
                num_experts=experts,
                torch_dtype=torch.bfloat16,
            )
        sample = packed[0, :64].clone(), scale[0, :64].clone()
        layer.load_from_tensors({"weight": packed, "weight_scale": scale})
        layer.transform()
        self.layer, self._config = layer, layer.humming_config.to_str()
        self.readable = activation == "fp8" and self._known_layout(*sample)

    def _known_layout(self, packed: Tensor, scale: Tensor) -> bool:
        """True if our own product can read these weights: right shapes, and the first rows packed as it expects."""
        layer, rows = self.layer, packed.shape[0]
        experts, steps, words = layer.weight.shape
        if not (layer.humming_config.use_packed_k_layout and wgmma.fits(steps * 64, words // 8, experts)):
            return False
        tiles = layer.weight[0, :, : rows * 8], layer.weight_scale.view(torch.uint8)[0, :, :rows]
        got = wgmma.unpacked(*tiles, layer.weight_scale_2[0])
        truth = quant_fp4.dequantise(packed, scale)
        error = float((got - truth).norm() / truth.norm().clamp(min=1e-30))
        if error > LAYOUT_ERROR:
            log.warning("packed experts are not laid out as known (error %.3g): large steps run on humming", error)
        return error <= LAYOUT_ERROR

    def many(self, x: Tensor, scale: Tensor, order: Sorted, k: int, out: Tensor) -> None:
        """out[slot] of every slot in `order`, from row slot // k of x, by our own product."""
        layer = self.layer
        wgmma.product(x, scale, layer.weight, layer.weight_scale, layer.weight_scale_2, order, k, out)

    def tile(self, tokens: int, k: int, activation: Activation, exact: bool = False) -> dict[str, Any]:
        """Tile of a step: plain values, as the product takes them. exact: sums as at all other sizes."""

        def heuristic(slots: int) -> dict[str, Any]:
            config = self.layer.humming_config
            found = self._heuristics(config, shape_m=slots, gemm_type="indexed", use_batch_invariant=exact)
            return {name: getattr(value, "value", value) for name, value in found.items()}

        if exact:
            return heuristic(tokens * k)
        if activation == "fp8":
            if tokens == 1:  # without stream-K: it adds partial sums in BF16
                return heuristic(8 * k) | {"num_stages": 6, "use_stream_k": False}
            if 192 < tokens <= 384:
                return heuristic(512 * k)
        return heuristic(tokens * k)

    def prepare(self, tile: str, compute: str = INDEXED) -> None:
        """Compile one tile, if it is not in the cache on disk."""
        if tile == LARGE:
            weight = self.layer.weight
            wgmma.load(weight.shape[1] * 64, weight.shape[2] // 8, weight.device)
            return
        self._kernel.prepare_kernels(self._config, compute, tile, self.layer.weight.device)

    def __call__(
        self, x: Tensor, scale: Tensor | None, order: Any, k: int, tile: str, out: Tensor, compute: str = INDEXED
    ) -> None:
        """out[slot] of every slot in `order`, from row slot // k of x."""
        layer = self.layer
        self._gemm(
            layer_config=self._config,
            compute_config=compute,
            tuning_config=tile,
            inputs=x,
            weight=layer.weight,
            weight_scale=getattr(layer, "weight_scale", None),
            weight_scale_2=getattr(layer, "weight_scale_2", None),
            outputs=out,
            input_scale=scale,
            sorted_ids=order.slots,
            expert_ids=order.experts,
            num_tokens_padded=order.num_padded,
            locks=layer.locks,
            top_k=k,
        )
