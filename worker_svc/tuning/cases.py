"""The operations whose choices are tuned, at a model's own shapes: calls to time, and a result to compare.

Calls go through the operations' doors, as a forward's do, and ask for the values in use. Weights come from a hollow
model of one layer of each kind; `whole` says how often a step meets each. Inputs are random, and so many calls read
weights or keys of their own that none is left in the L2 cache from the round before, as in a forward.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.gpu.step import joined
from worker_svc.gpu.weights import AttentionWeights, BlockWeights, ModelWeights
from worker_svc.ops import kv_rows
from worker_svc.ops.attention_output import attention_output
from worker_svc.ops.bf16_gemm import DEEP_WIDTH, bf16_gemm, bf16_gemm_parts
from worker_svc.ops.fp4_experts import Fp4Experts
from worker_svc.ops.fp8_gemm import Fp8Matrix, Fp8Rows, empty_groups, fp8_gemm, fp8_gemm_parts, fp8_grouped_parts
from worker_svc.ops.hyper_boundary import STREAMS, BoundaryRules, Mixer, Workspace, post_mix, pre_norm
from worker_svc.ops.kv_rows import HEAD_DIM, KERNEL_PAGE
from worker_svc.ops.paged_attention import paged_attention
from worker_svc.ops.partial_sums import added
from worker_svc.ops.sparse_attention import decode_attention, decode_plans
from worker_svc.ops.step_lists import WINDOW
from worker_svc.ops.topk_gate import select
from worker_svc.tuning.chooser import Point
from worker_svc.tuning.timing import Call

MOST_COPIES, MOST_CALLS = 64, 256
CONTEXT = 16_384
"""Tokens behind a decode row whose attention is timed."""
POOL_BYTES = 96 << 20
BLOCK = 128
CUT, WHOLE = ("inputs", "wo_a", "wo_b"), ("wq_b", "shared_w13", "shared_w2")
"""FP8 weights of a layer whose products come in parts where rows are few, and the others."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size: calls that a step could make one after the other, and what one of them comes to."""

    point: Point
    calls: Sequence[Call]
    result: Callable[[], Tensor]


class Cases:
    """Of one model on one device. `most`: tokens of the largest step; `slots`: rows of the largest decode step."""

    def __init__(
        self,
        weights: ModelWeights,
        cut: V4Config,
        whole: V4Config,
        device: torch.device,
        *,
        most: int,
        slots: int,
        context: int,
        seed: int = 0,
    ) -> None:
        self.weights, self.config, self.device = weights, cut, device
        self.most, self.slots, self.context = most, slots, context
        self.layers = Counter(whole.layer_ratios)
        self._draw = torch.Generator(device).manual_seed(seed)
        self._blocks = {block.attn.ratio: block for block in weights.blocks}
        cuda = device.type == "cuda"
        self._room = 2 * torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0

    def of(self, name: str, sizes: Sequence[int]) -> Iterator[Case]:
        """Cases of a choice at those of its sizes that this model's steps have.

        Our products of few rows only up to the largest decode step: above, nothing compiles them before they are met.
        """
        op, _, what = name.partition(".")
        few = self.slots if what in ("skinny_rows", "parts_rows") else self.most
        if op == "hyper_boundary":
            yield from self._boundaries([size for size in sizes if size <= self.most])
        elif op == "fp8_gemm":
            yield from self._fp8([size for size in sizes if size <= few], cut=what == "parts_rows")
        elif op == "bf16_gemm":
            yield from self._bf16([size for size in sizes if size <= few], wide=what == "deep_rows")
        elif op == "fp4_experts":
            yield from self._experts(sizes)
        else:
            yield from self._attention([size for size in sizes if size <= self.slots])

    # Draws

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw, device=self.device)

    def _bf16_rows(self, *shape: int) -> Tensor:
        return self._normal(*shape).bfloat16()

    def _codes(self, *shape: int) -> Tensor:
        return (self._normal(*shape) * 40).to(torch.float8_e4m3fn)

    def _ints(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self._draw, device=self.device, dtype=torch.int32)

    def _rounds(self, size: int, most: int) -> int:
        """Calls on `size` bytes of their own each that do not fit into the L2 cache together."""
        return max(1, min(most, -(-self._room // max(1, size))))

    # Hyper-connections

    def _boundaries(self, sizes: Sequence[int]) -> Iterator[Case]:
        """Both passes, behind attention and behind experts: a layer has one of each."""
        block, layers = self.weights.blocks[0], sum(self.layers.values())
        copies = self._rounds(block.ffn_mixer.both.nbytes, MOST_COPIES)
        mixers = [replace(block.ffn_mixer, both=block.ffn_mixer.both.clone()) for _ in range(copies)]
        for size in sizes:
            some = mixers if size <= 1024 else mixers[:4]  # above, the streams alone fill the cache
            for experts in (False, True):
                yield self._boundary(size, some, block.ffn_norm, layers, experts=experts)

    def _boundary(self, size: int, mixers: Sequence[Mixer], norm: Tensor, layers: int, *, experts: bool) -> Case:
        c = self.config
        width, rules = c.hidden_size, BoundaryRules(c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
        space = Workspace(max(64, size), width, self.device)
        streams, mixed = self._bf16_rows(size, STREAMS, width), self._bf16_rows(size, STREAMS, width)
        post = torch.rand(size, STREAMS, generator=self._draw, device=self.device)
        comb = torch.rand(size, STREAMS * STREAMS, generator=self._draw, device=self.device) / STREAMS
        out = self._bf16_rows(size, width)
        routed = self._bf16_rows(size * c.num_experts_per_tok, width) if experts else None
        y, x = torch.empty_like(out), Fp8Rows.empty(size, width, self.device)
        twice = torch.empty(size, width // BLOCK, device=self.device)
        next_post, next_comb = torch.empty_like(post), torch.empty_like(comb)

        def call(mixer: Mixer) -> None:
            if routed is None:
                post_mix(streams, mixed, post, comb, mixer, space, out=out)
            else:
                post_mix(streams, mixed, post, comb, mixer, space, rows=routed, shared=out)
            after = (mixed, mixer, space, norm, rules)
            pre_norm(*after, y=y, post=next_post, comb=next_comb, q=x.codes, sf=x.scale, sf2=twice)

        def result() -> Tensor:
            call(mixers[0])
            return torch.cat([part.float().flatten() for part in (mixed, y, next_post, next_comb)])

        point = Point(size, "experts" if experts else "attention", layers)
        return Case(point, [partial(call, mixer) for mixer in mixers], result)

    # Products

    def _fp8(self, sizes: Sequence[int], *, cut: bool) -> Iterator[Case]:
        """cut: those that may come in parts, without the readers of these."""
        for name, (matrix, layers) in self._matrices(CUT if cut else WHOLE).items():
            copies = self._rounds(matrix.codes.nbytes, MOST_COPIES)
            matrices = [Fp8Matrix(matrix.codes.clone(), matrix.scale) for _ in range(copies)]
            for size in sizes:
                yield self._fp8_case(Point(size, name, layers), matrices, cut=cut)

    def _matrices(self, names: Sequence[str]) -> dict[str, tuple[Fp8Matrix, int]]:
        """Those FP8 weights by name, each shape once, with how many a step reads."""
        found: dict[torch.Size, tuple[str, Fp8Matrix, int]] = {}
        for ratio, block in self._blocks.items():
            for name in names:
                _count(found, name, getattr(block.ffn if "shared" in name else block.attn, name), self.layers[ratio])
        return {f"{name} {tuple(shape)}": (matrix, layers) for shape, (name, matrix, layers) in found.items()}

    def _fp8_case(self, point: Point, matrices: Sequence[Fp8Matrix], *, cut: bool) -> Case:
        *groups, _, width = matrices[0].codes.shape
        rows = point.size
        x = empty_groups(rows, groups[0], width, self.device) if groups else Fp8Rows.empty(rows, width, self.device)
        x.codes.copy_(self._codes(*x.codes.shape))
        x.scale.fill_(2.0**-6)
        product, dimensions = (fp8_grouped_parts, 3) if groups else (fp8_gemm_parts if cut else fp8_gemm, 2)
        calls = [partial(product, x, matrix) for matrix in matrices]
        return Case(point, calls, lambda: added(calls[0](), dimensions).float())

    def _bf16(self, sizes: Sequence[int], *, wide: bool) -> Iterator[Case]:
        """Head, compressors' projections and router; the head never meets more rows than sample together. wide: those
        that the library could multiply."""
        found: dict[str, tuple[Tensor, int, int]] = {"head": (self.weights.head, 1, self.slots)}
        for ratio, block in self._blocks.items():
            if block.attn.states is not None:
                found[f"states C{ratio}"] = (block.attn.states, self.layers[ratio], self.most)
        gate = next(iter(self._blocks.values())).ffn.gate
        found["router"] = (gate, sum(self.layers.values()), self.most)
        for name, (weight, layers, most) in found.items():
            if wide and weight.shape[0] < DEEP_WIDTH:
                continue
            weights = [weight.clone() for _ in range(self._rounds(weight.nbytes, MOST_COPIES))]
            for size in sizes:
                if size <= most:
                    yield self._bf16_case(Point(size, name, layers), weights)

    def _bf16_case(self, point: Point, weights: Sequence[Tensor]) -> Case:
        x, c = self._bf16_rows(point.size, weights[0].shape[1]), self.config
        if point.what != "router":
            return Case(point, [partial(bf16_gemm, x, weight) for weight in weights], lambda: bf16_gemm(x, weights[0]))
        ids = torch.empty(point.size, c.num_experts_per_tok, dtype=torch.int32, device=self.device)
        shares = torch.empty(point.size, c.num_experts_per_tok, device=self.device)
        bias = torch.zeros(len(weights[0]), device=self.device)

        def route(weight: Tensor) -> None:
            """With its reader, which adds up the parts that a product of few rows comes in."""
            select(bf16_gemm_parts(x, weight), bias, ids, shares, c.routed_scaling_factor)

        def logits() -> Tensor:
            return added(bf16_gemm_parts(x, weights[0]), 2)

        return Case(point, [partial(route, weight) for weight in weights], logits)

    # Experts

    def _experts(self, sizes: Sequence[int]) -> Iterator[Case]:
        """Steps in which an expert has so many rows on average, spread at random."""
        c, k, layers = self.config, self.config.num_experts_per_tok, sum(self.layers.values())
        experts = self.weights.blocks[-1].ffn.experts
        for size in sizes:
            tokens = -(-size * c.n_routed_experts // k)
            if tokens > self.most or experts.activation != "fp8":
                continue
            spread = torch.rand(tokens, c.n_routed_experts, generator=self._draw, device=self.device)
            ids = spread.topk(k, 1).indices.int().contiguous()
            shares = spread[:, :k].contiguous() + 0.1
            x = self._codes(tokens, c.hidden_size)
            scale = torch.full((tokens, c.hidden_size // BLOCK), 2.0**-6, device=self.device)
            run = partial(_routed, experts, x, scale, ids, shares)
            yield Case(Point(size, "experts", layers), [run], run)

    # Attention of decode steps

    def _attention(self, sizes: Sequence[int]) -> Iterator[Case]:
        if not sizes:
            return
        pools = [self._pool(), self._pool()]
        for ratio, block in self._blocks.items():
            for size in sizes:
                yield self._attended(Point(size, f"C{ratio}" if ratio else "window", self.layers[ratio]), block, pools)

    def _pool(self) -> Tensor:
        """Random FP8 rows."""
        rows = POOL_BYTES // kv_rows.ROW_BYTES // KERNEL_PAGE * KERNEL_PAGE if self._room else 16 * KERNEL_PAGE
        pool = kv_rows.allocate(rows, self.device)
        for first in range(0, rows, 1 << 14):
            some = torch.arange(first, min(rows, first + (1 << 14)), dtype=torch.int32, device=self.device)
            kv_rows.insert_rows(self._bf16_rows(len(some), HEAD_DIM), pool, some)
        return pool

    def _attended(self, point: Point, block: BlockWeights, pools: Sequence[Tensor]) -> Case:
        """What a layer does between its queries and its output projection; every call reads rows of its own."""
        attn, size, heads = block.attn, point.size, self.config.num_attention_heads
        groups, _, width = attn.wo_a.codes.shape
        wide, entries = self._listed(attn)
        calls = self._rounds(size * (WINDOW + entries) * kv_rows.ROW_BYTES, MOST_CALLS)
        rows = pools[0].shape[0] * KERNEL_PAGE
        near = [self._run(rows, size, WINDOW) for _ in range(calls)]
        far: list[Tensor | None] = [None] * calls
        if attn.ratio:
            listed = self._ints if attn.ratio == 4 else self._run  # what an indexer chose lies anywhere
            far = [_filled(listed(rows, size, entries), wide) for _ in range(calls)]
        near_len, far_len = (torch.full((size,), n, dtype=torch.int32, device=self.device) for n in (WINDOW, entries))
        none, q = torch.zeros_like(far_len), self._bf16_rows(size, heads, HEAD_DIM)
        lengths = {0: (none, none), 4: (far_len, none), 128: (none, far_len)}[attn.ratio]
        plan = decode_plans(near_len, *lengths, heads)[attn.ratio]
        turns, positions = self._normal(64, 32, 2), self._ints(64, size)
        out = empty_groups(size, groups, width, self.device)

        def call(near_rows: Tensor, far_rows: Tensor | None) -> None:
            pool, count = (None, None) if far_rows is None else (pools[1], far_len)
            keys = (q, pools[0], near_rows, near_len, pool, far_rows, count, attn.sink, HEAD_DIM**-0.5)
            if joined(size, on_gpu=q.is_cuda):
                paged_attention(*keys, turns, positions, out.codes, out.scale)
            else:
                attention_output(decode_attention(*keys, plan), turns, positions, out.codes, out.scale)

        def result() -> Tensor:
            call(near[0], far[0])
            return out.codes.float() * out.scale.repeat_interleave(BLOCK, 2)

        return Case(point, [partial(call, *lists) for lists in zip(near, far)], result)

    def _listed(self, attn: AttentionWeights) -> tuple[int, int]:
        """Width of a layer's list of entries, and how many of it count."""
        if attn.ratio == 4:
            return self.config.index_topk, min(self.config.index_topk, min(CONTEXT, self.context) // 4)
        wide = -(-max(1, self.context // 128) // KERNEL_PAGE) * KERNEL_PAGE if attn.ratio else 0
        return wide, min(CONTEXT, self.context) // 128 if attn.ratio else 0

    def _run(self, rows: int, size: int, count: int) -> Tensor:
        """Rows one behind the other from some page on, for each token."""
        first = self._ints(max(1, (rows - count) // KERNEL_PAGE), size, 1) * KERNEL_PAGE
        return (first + torch.arange(count, dtype=torch.int32, device=self.device)).contiguous()


def _filled(rows: Tensor, wide: int) -> Tensor:
    """A list of `wide` rows, -1 behind those that count."""
    return torch.nn.functional.pad(rows, (0, wide - rows.shape[1]), value=-1).contiguous()


def _routed(experts: Fp4Experts, x: Tensor, scale: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    return experts.run(experts.plan(*ids.shape), x, scale, ids, shares)


def _count(found: dict[torch.Size, tuple[str, Fp8Matrix, int]], name: str, matrix: Fp8Matrix, layers: int) -> None:
    shape = matrix.codes.shape
    first, kept, before = found.get(shape, (name, matrix, 0))
    found[shape] = (first, kept, before + layers)
