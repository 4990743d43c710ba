"""The operations of the forward as cases of `invariance`: random rows against a model's own weights and shapes.

What sorts or selects a whole batch (expert_sort) has no rows of its own and is seen through what uses it. Where decode
and chunks call an operation differently, so do a case's two forms: lists as wide, keys and states where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.gpu.attention import INDEX_HEADS
from worker_svc.gpu.invariance import Call, Case, Outputs
from worker_svc.gpu.step import JOINED_ROWS
from worker_svc.gpu.weights import AttentionWeights, BlockWeights, ModelWeights, MoeWeights
from worker_svc.model.rope import RopeTable, frequencies
from worker_svc.ops import invariant, kv_rows, skinny_gemm
from worker_svc.ops.attention_output import attention_output
from worker_svc.ops.bf16_gemm import bf16_gemm, bf16_gemm_parts
from worker_svc.ops.compress_step import IndexCompressor, compress_chunk, compress_step, state_width
from worker_svc.ops.fp8_gemm import Fp8Matrix, Fp8Rows, empty_groups, fp8_gemm, fp8_grouped
from worker_svc.ops.hyper_boundary import (
    BoundaryRules,
    Mixer,
    Workspace,
    embed_mix,
    head_norm,
    post_mix,
    pre_norm,
)
from worker_svc.ops.index_scores import paged_scores, ragged_scores
from worker_svc.ops.kv_rows import HEAD_DIM, INDEX_DIM, KERNEL_PAGE
from worker_svc.ops.latent_rows import latent_rows
from worker_svc.ops.paged_attention import paged_attention
from worker_svc.ops.partial_sums import added
from worker_svc.ops.quant_fp8 import quantise_rows
from worker_svc.ops.query_heads import IndexQuery, query_heads
from worker_svc.ops.sample import Params, sample
from worker_svc.ops.slot_step import FIELDS, Field, StepRows, begin_step
from worker_svc.ops.sparse_attention import chunk_attention, decode_attention, decode_plans
from worker_svc.ops.step_lists import WINDOW, DecodeLists, decode_lists
from worker_svc.ops.swiglu_experts import Hidden, middle
from worker_svc.ops.top_entries import top_entries, top_rows
from worker_svc.ops.topk_gate import select

POSITIONS = 4096
ENTRIES = 640
"""Index entries that a query may score: more than most models choose."""
WIDE = 8192
"""Columns of decode's scores, which a selection cuts into tiles; a chunk's are as many as its longest row sees."""
C128_ENTRIES = 320
"""Of a list: in decode in blocks of 64, in a chunk in blocks of 128."""


def _closings(ratio: int) -> tuple[int, ...]:
    """Positions that close an entry: a sequence's first, its second, and later ones."""
    return ratio - 1, 2 * ratio - 1, 255, 1023, POSITIONS - 1


class Cases:
    """All of them for one model; iterate."""

    def __init__(
        self, weights: ModelWeights, config: V4Config, device: torch.device, *, rows: int = 256, seed: int = 0
    ) -> None:
        self.weights, self.config, self.device, self.rows = weights, config, device, rows
        self._draw = torch.Generator(device).manual_seed(seed)
        self._host = torch.Generator().manual_seed(seed)
        compressed = torch.view_as_real(RopeTable(frequencies(config, compressed=True), POSITIONS).turns)
        self.turns = compressed.contiguous().to(device)

    def __iter__(self) -> Iterator[Case]:
        blocks: dict[int, BlockWeights] = {}
        for block in self.weights.blocks:
            blocks.setdefault(block.attn.ratio, block)
        widest = blocks.get(4) or next(iter(blocks.values()))
        yield from self._products(widest)
        yield from self._moe(next((b.ffn for b in self.weights.blocks if b.ffn.bias is not None), widest.ffn))
        yield from self._boundary(widest)
        yield from self._rows_of_attention(widest.attn)
        for ratio in sorted(blocks):
            yield from self._attention(ratio, blocks[ratio].attn)
            if ratio:
                yield self._compress(ratio, blocks[ratio].attn)
        yield from self._selection()
        yield from self._tokens()
        yield from self._bookkeeping()

    # Draws

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw, device=self.device)

    def _bf16(self, *shape: int) -> Tensor:
        return self._normal(*shape).bfloat16()

    def _ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._draw, device=self.device, dtype=torch.int32)

    def _case(self, op: str, name: str, make: object, **more: object) -> Case:
        return Case(op=op, name=name, make=make, **({"rows": self.rows} | more))  # type: ignore[arg-type]

    # Products

    def _products(self, block: BlockWeights) -> Iterator[Case]:
        attn, ffn = block.attn, block.ffn
        matrices = {
            "inputs": attn.inputs,
            "wq_b": attn.wq_b,
            "wo_b": attn.wo_b,
            "shared_w13": ffn.shared_w13,
            "shared_w2": ffn.shared_w2,
        }
        for name, matrix in matrices.items():
            yield self._case("fp8_gemm", name, partial(self._fp8, self._bf16(self.rows, matrix.codes.shape[1]), matrix))
        groups, _, width = attn.wo_a.codes.shape
        yield self._case("fp8_gemm", "wo_a", partial(self._fp8_groups, self._bf16(self.rows, groups, width), attn.wo_a))
        few = self._bf16(self.rows, attn.inputs.codes.shape[1])
        skinny = partial(self._skinny, few, attn.inputs)
        yield self._case("skinny_gemm", "inputs", skinny, most=skinny_gemm.MAX_ROWS)
        for name, weight in {"gate": ffn.gate, "states": attn.states, "head": self.weights.head}.items():
            if weight is not None:
                yield self._case("bf16_gemm", name, partial(self._bf16_product, name, weight, self._wide(weight)))

    def _wide(self, weight: Tensor) -> Tensor:
        return self._bf16(self.rows, weight.shape[1])

    def _quantised(self, source: Tensor) -> Fp8Rows:
        x = Fp8Rows.empty(len(source), source.shape[1], self.device)
        quantise_rows(source, x.codes, x.scale)
        return x

    def _fp8(self, source: Tensor, weight: Fp8Matrix, rows: Tensor) -> Call:
        x = self._quantised(source[rows])
        return lambda: (fp8_gemm(x, weight),)

    def _fp8_groups(self, source: Tensor, weight: Fp8Matrix, rows: Tensor) -> Call:
        some = source[rows]
        x = empty_groups(len(rows), some.shape[1], some.shape[2], self.device)
        flat = Fp8Rows.empty(some.shape[0] * some.shape[1], some.shape[2], self.device)
        quantise_rows(some.flatten(0, 1), flat.codes, flat.scale)
        x.codes.copy_(flat.codes.view(some.shape))
        x.scale.copy_(flat.scale.reshape(*some.shape[:2], -1))
        return lambda: (fp8_grouped(x, weight),)

    def _skinny(self, source: Tensor, weight: Fp8Matrix, rows: Tensor) -> Call:
        x = self._quantised(source[rows])

        def call() -> Outputs:
            out = torch.empty(len(rows), weight.codes.shape[0], dtype=torch.bfloat16, device=self.device)
            return (skinny_gemm.fp8(x.codes, x.scale, weight.codes, weight.scale, out),)

        return call

    def _bf16_product(self, name: str, weight: Tensor, source: Tensor, rows: Tensor) -> Call:
        x = source[rows]
        if name != "gate":
            return lambda: (bf16_gemm(x, weight),)

        def routed() -> Outputs:
            logits = bf16_gemm_parts(x, weight)
            return (added(logits, 2),)

        return routed

    # Experts and routing

    def _moe(self, moe: MoeWeights) -> Iterator[Case]:
        c, k = self.config, self.config.num_experts_per_tok
        source = self._bf16(self.rows, c.hidden_size)
        spread = torch.rand(self.rows, c.n_routed_experts, generator=self._draw, device=self.device)
        ids, weights = spread.topk(k, 1).indices.int(), spread[:, :k].contiguous() + 0.1
        yield self._case("experts", "routed", partial(self._experts, moe, source, ids, weights))
        logits = self._normal(self.rows, c.n_routed_experts)
        bias = torch.zeros(c.n_routed_experts, device=self.device) if moe.bias is None else moe.bias
        yield self._case("topk_gate", "select", partial(self._gate, logits, bias))
        inner = moe.shared_w2.codes.shape[1]
        yield self._case("swiglu_middle", "weighted", partial(self._middle, self._bf16(self.rows, 2 * inner), weights))
        yield self._case("quant_fp8", "rows", partial(self._quantise, source))

    def _experts(self, moe: MoeWeights, source: Tensor, ids: Tensor, weights: Tensor, rows: Tensor) -> Call:
        x, chosen, share = source[rows], ids[rows].contiguous(), weights[rows].contiguous()
        scale = None
        if moe.experts.activation == "fp8":
            codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=self.device)
            scale = torch.empty(len(rows), x.shape[1] // 128, device=self.device)
            quantise_rows(x, codes, scale)
            x = codes
        plan = moe.experts.plan(len(rows), chosen.shape[1])

        def call() -> Outputs:
            return (moe.experts.run(plan, x, scale, chosen, share).view(len(rows), chosen.shape[1], -1),)

        return call

    def _gate(self, logits: Tensor, bias: Tensor, rows: Tensor) -> Call:
        some, k = logits[rows], self.config.num_experts_per_tok

        def call() -> Outputs:
            ids = torch.empty(len(rows), k, dtype=torch.int32, device=self.device)
            weights = torch.empty(len(rows), k, device=self.device)
            select(some, bias, ids, weights, self.config.routed_scaling_factor)
            return ids, weights

        return call

    def _middle(self, hidden: Tensor, weights: Tensor, rows: Tensor) -> Call:
        some, share = hidden[rows], weights[rows, 0].contiguous()
        inner = some.shape[1] // 2

        def call() -> Outputs:
            codes = torch.empty(len(rows), inner, dtype=torch.float8_e4m3fn, device=self.device)
            scale = torch.empty(len(rows), inner // 128, device=self.device)
            middle(Hidden(some, codes, scale, share), None, self.config.swiglu_limit)
            return codes, scale

        return call

    def _quantise(self, source: Tensor, rows: Tensor) -> Call:
        some = source[rows]

        def call() -> Outputs:
            x = self._quantised(some)
            return x.codes, x.scale

        return call

    # Hyper-connections

    def _boundary(self, block: BlockWeights) -> Iterator[Case]:
        c, rules = (
            self.config,
            BoundaryRules(self.config.hc_sinkhorn_iters, self.config.hc_eps, self.config.rms_norm_eps),
        )
        space = Workspace(max(64, self.rows), c.hidden_size, self.device)
        comb = torch.rand(self.rows, 16, generator=self._draw, device=self.device)
        parts = (
            self._bf16(self.rows, 4, c.hidden_size),
            comb[:, :4].contiguous() * 2,
            comb / 4,
            self._bf16(self.rows, c.num_experts_per_tok, c.hidden_size),
            self._bf16(self.rows, c.hidden_size),
        )
        for name in ("output", "experts"):
            between = partial(self._between, name == "experts", parts, block.ffn_mixer, block.ffn_norm, space, rules)
            yield self._case("hyper_boundary", name, between)
        yield self._case("hyper_boundary", "head", partial(self._head, parts, space, rules))
        ids = self._ints(0, c.vocab_size, self.rows)
        first = partial(self._embedded, ids, block.attn_mixer, block.attn_norm, space, rules)
        yield self._case("hyper_boundary", "embedding", first)

    def _mixed(self, experts: bool, parts: tuple[Tensor, ...], mixer: Mixer, space: Workspace, rows: Tensor) -> Call:
        streams, post, comb, routed, shared = (part[rows].contiguous() for part in parts)

        def call() -> Outputs:
            out = torch.empty_like(streams)
            if experts:
                post_mix(streams, out, post, comb, mixer, space, rows=routed.flatten(0, 1), shared=shared)
            else:
                post_mix(streams, out, post, comb, mixer, space, out=shared)
            return (out,)

        return call

    def _between(
        self,
        experts: bool,
        parts: tuple[Tensor, ...],
        mixer: Mixer,
        norm: Tensor,
        space: Workspace,
        rules: BoundaryRules,
        rows: Tensor,
    ) -> Call:
        mixed = self._mixed(experts, parts, mixer, space, rows)

        def call() -> Outputs:
            (streams,) = mixed()
            return streams, *self._read(streams, mixer, norm, space, rules)

        return call

    def _read(
        self, streams: Tensor, mixer: Mixer, norm: Tensor, space: Workspace, rules: BoundaryRules
    ) -> tuple[Tensor, ...]:
        count, _, width = streams.shape
        y, x = torch.empty_like(streams[:, 0]), Fp8Rows.empty(count, width, self.device)
        post, comb = torch.empty(count, 4, device=self.device), torch.empty(count, 16, device=self.device)
        twice = torch.empty(count, width // 128, device=self.device)
        pre_norm(streams, mixer, space, norm, rules, y=y, post=post, comb=comb, q=x.codes, sf=x.scale, sf2=twice)
        return y, x.codes, x.scale, twice, post, comb

    def _head(self, parts: tuple[Tensor, ...], space: Workspace, rules: BoundaryRules, rows: Tensor) -> Call:
        w = self.weights
        mixed, every = self._mixed(True, parts, w.head_mixer, space, rows), self._numbers(len(rows))

        def call() -> Outputs:
            (streams,) = mixed()
            z = torch.empty_like(streams[:, 0])
            head_norm(streams, w.head_mixer, space, w.norm, rules, every, z)
            return streams, z

        return call

    def _embedded(
        self, ids: Tensor, mixer: Mixer, norm: Tensor, space: Workspace, rules: BoundaryRules, rows: Tensor
    ) -> Call:
        some, embed = ids[rows], self.weights.embed

        def call() -> Outputs:
            streams = torch.empty(len(some), 4, embed.shape[1], dtype=torch.bfloat16, device=self.device)
            embed_mix(some, embed, streams, mixer, space)
            return streams, *self._read(streams, mixer, norm, space, rules)

        return call

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    # Attention, row by row

    def _rows_of_attention(self, attn: AttentionWeights) -> Iterator[Case]:
        c, at = self.config, self._ints(0, POSITIONS, self.rows)
        qkv = self._bf16(self.rows, c.q_lora_rank + HEAD_DIM)
        latent = (partial(self._latent, attn, qkv, at, chunk) for chunk in (False, True))
        yield self._case("latent_rows", "latent and key", next(latent), chunk=next(latent))
        index = c.index_n_heads * INDEX_DIM if attn.ratio == 4 else 0
        heads = self._bf16(self.rows, c.num_attention_heads * HEAD_DIM + index)
        share = self._normal(self.rows, c.index_n_heads)
        yield self._case("query_heads", "heads and indexer", partial(self._heads, heads, share, index > 0, at))
        outputs, groups = self._bf16(self.rows, c.num_attention_heads, HEAD_DIM), attn.wo_a.codes.shape[0]
        yield self._case("attention_output", "turned", partial(self._turned, outputs, groups, at))
        yield self._case("kv_rows", "written and read", partial(self._stored, self._bf16(self.rows, HEAD_DIM)))

    def _latent(self, attn: AttentionWeights, qkv: Tensor, at: Tensor, chunk: bool, rows: Tensor) -> Call:
        some, positions, every = qkv[rows], at[rows], self._numbers(len(rows))
        pool = kv_rows.allocate(len(rows), self.device)

        def call() -> Outputs:
            x = Fp8Rows.empty(len(rows), self.config.q_lora_rank, self.device)
            space = torch.empty(len(rows), HEAD_DIM, dtype=torch.bfloat16, device=self.device)
            beside = chunk or invariant.on()  # as `gpu.attention` asks for it
            latent_rows(
                *(some, attn.q_norm, attn.kv_norm, self.turns, positions, every, pool, x.codes, x.scale),
                eps=self.config.rms_norm_eps,
                workspace=space if beside else None,
                workspace_rows=every if beside else None,
            )
            stored = kv_rows.gather_rows(pool, every, torch.empty_like(space))
            return x.codes, x.scale, stored, space if chunk else stored

        return call

    def _heads(self, heads: Tensor, share: Tensor, indexed: bool, at: Tensor, rows: Tensor) -> Call:
        some, weights, positions, c = heads[rows], share[rows], at[rows], self.config
        width = c.num_attention_heads * HEAD_DIM
        padded = next((n for n in INDEX_HEADS if n >= c.index_n_heads), c.index_n_heads)

        def call() -> Outputs:
            q, index = some.clone(), None
            if indexed:
                codes = torch.empty(len(rows), padded, INDEX_DIM, dtype=torch.float8_e4m3fn, device=self.device)
                folded = torch.empty(len(rows), padded, device=self.device)
                index = IndexQuery(raw=q[:, width:], weights=weights, codes=codes, folded=folded)
            out = query_heads(q[:, :width], self.turns, positions, eps=c.rms_norm_eps, index=index)
            return (out,) if index is None else (out, index.codes, index.folded)

        return call

    def _turned(self, outputs: Tensor, groups: int, at: Tensor, rows: Tensor) -> Call:
        some, positions = outputs[rows], at[rows]
        width = some.shape[1] * HEAD_DIM // groups

        def call() -> Outputs:
            x = empty_groups(len(rows), groups, width, self.device)
            attention_output(some, self.turns, positions, x.codes, x.scale)
            return x.codes, x.scale

        return call

    def _stored(self, values: Tensor, rows: Tensor) -> Call:
        some, every = values[rows], self._numbers(len(rows))
        pool = kv_rows.allocate(len(rows), self.device)

        def call() -> Outputs:
            kv_rows.insert_rows(some, pool, every)
            return (kv_rows.gather_rows(pool, every, torch.empty_like(some)),)

        return call

    # Attention over keys

    def _attention(self, ratio: int, attn: AttentionWeights) -> Iterator[Case]:
        keys = _Keys(self, ratio)
        name = {0: "window", 4: "window and C4", 128: "window and C128"}[ratio]
        decode, chunk = partial(self._decode, keys, attn), partial(self._chunk, keys, attn)
        yield self._case("sparse_attention", name, decode, chunk=chunk)
        joined = partial(self._joined, keys, attn)
        yield self._case("paged_attention", name, joined, most=JOINED_ROWS)

    def _decode(self, keys: _Keys, attn: AttentionWeights, rows: Tensor) -> Call:
        q, lists = keys.q[rows], keys.lists(rows)
        none = torch.zeros_like(lists[2])
        far = none if lists[5] is None else lists[5]

        def call() -> Outputs:
            plans = decode_plans(lists[2], *((far, none) if keys.ratio == 4 else (none, far)), q.shape[1])
            return (decode_attention(q, *lists, attn.sink, HEAD_DIM**-0.5, plans[keys.ratio]),)

        return call

    def _joined(self, keys: _Keys, attn: AttentionWeights, rows: Tensor) -> Call:
        q, lists, at = keys.q[rows], keys.lists(rows), self._numbers(len(rows))
        groups, _, width = attn.wo_a.codes.shape

        def call() -> Outputs:
            x = empty_groups(len(rows), groups, width, self.device)
            paged_attention(q, *lists, attn.sink, HEAD_DIM**-0.5, self.turns, at * 0 + 7, x.codes, x.scale)
            return x.codes, x.scale

        return call

    def _chunk(self, keys: _Keys, attn: AttentionWeights, rows: Tensor) -> Call:
        q, index, reach = keys.q[rows], keys.index[rows], keys.reach[rows]
        return lambda: (
            chunk_attention(
                q, keys.workspace, index, attn.sink, HEAD_DIM**-0.5, reach if keys.ratio else None, fp8=True
            ),
        )

    # Compressed entries

    def _compress(self, ratio: int, attn: AttentionWeights) -> Case:
        assert attn.states is not None
        span = 8 if ratio == 4 else 128
        history = self._normal(self.rows, span, attn.states.shape[0])  # the indexer's heads lie behind the states
        closings = torch.tensor(_closings(ratio), dtype=torch.int32, device=self.device)
        closing = closings[self._numbers(self.rows) % len(closings)]
        make, chunk = (partial(self._closed, ratio, attn, history, closing, chunk) for chunk in (False, True))
        return self._case("compress_step", f"C{ratio}", make, chunk=chunk)

    def _pools(self, ratio: int, attn: AttentionWeights, count: int) -> tuple[Tensor, IndexCompressor | None]:
        index, compressor = None, attn.compressor
        if ratio == 4 and compressor is not None and compressor.index_norm is not None:
            index = IndexCompressor(norm=compressor.index_norm, pool=kv_rows.allocate_index(count, self.device))
        return kv_rows.allocate(count, self.device), index

    def _entries(self, pool: Tensor, index: IndexCompressor | None, count: int) -> Outputs:
        every = self._numbers(count)
        entries = torch.empty(count, HEAD_DIM, dtype=torch.bfloat16, device=self.device)
        kv_rows.gather_rows(pool, every, entries)
        if index is None:
            return (entries,)
        keys = torch.empty(count, INDEX_DIM, dtype=torch.float8_e4m3fn, device=self.device)
        scale = torch.empty(count, device=self.device)
        kv_rows.gather_index_rows(index.pool, every, keys, scale)
        return entries, keys, scale

    def _closed(
        self, ratio: int, attn: AttentionWeights, history: Tensor, closing: Tensor, chunk: bool, rows: Tensor
    ) -> Call:
        """A window each, closed by its last token: all but that token in the ring, or of a chunk the first half (every
        other row) or nothing. Positions below 0 do not exist."""
        compressor, count, span, width = attn.compressor, len(rows), history.shape[1], state_width(ratio)
        assert compressor is not None
        some, place, every = history[rows], self._numbers(span), self._numbers(count)
        at = closing[rows].unsqueeze(1) + place - (span - 1)
        begin = (rows.int() % 2 * (span // 2)).unsqueeze(1) if chunk else torch.full_like(at[:, :1], span - 1)
        kept = (some[..., :width] + compressor.ape[(at % ratio).long()]).masked_fill(
            ((place >= begin) | (at < 0)).unsqueeze(2), torch.nan
        )
        states = torch.empty_like(kept)
        states[every.unsqueeze(1), (at % span).long()] = kept
        live = (place >= begin) & (at >= 0)
        first = torch.where(live, place, span).amin(1, keepdim=True)
        tokens = slice(None) if chunk else slice(span - 1, None)
        length = span if chunk else 1

        def column(values: Tensor) -> Tensor:
            return values.expand(count, span)[:, tokens].flatten().contiguous()

        raw = some[:, tokens].flatten(0, 1).contiguous()
        positions, last = column(torch.where(live, at, -1)), column(closing[rows].unsqueeze(1))
        write = column(torch.where(place == span - 1, every.unsqueeze(1), -1))
        start = column(every.unsqueeze(1) * length + (first if chunk else 0))
        own, (pool, index) = (closing[rows] % span).long(), self._pools(ratio, attn, count)
        args = (raw, compressor.ape, compressor.norm, self.turns, positions, column(every.unsqueeze(1)), start.int())
        target = (states.flatten(0, 1), write, pool)
        rules = {"ratio": ratio, "ring": span, "eps": self.config.rms_norm_eps}

        def call() -> Outputs:
            if chunk:
                compress_chunk(*args, last, *target, **rules, index=index)  # type: ignore[arg-type]
            else:
                compress_step(*args, *target, **rules, index=index)  # type: ignore[arg-type]
            return *self._entries(pool, index, count), states[every, own]

        return call

    # The indexer

    def _selection(self) -> Iterator[Case]:
        c = self.config
        heads = next((n for n in INDEX_HEADS if n >= c.index_n_heads), c.index_n_heads)
        codes = (self._normal(self.rows, heads, INDEX_DIM) * 40).to(torch.float8_e4m3fn)
        folded, lengths = self._normal(self.rows, heads), self._ints(1, ENTRIES + 1, self.rows)
        pool = kv_rows.allocate_index(ENTRIES, "cpu")
        drawn = torch.randn(ENTRIES, INDEX_DIM, generator=self._host)
        kv_rows.insert_index_rows(drawn, pool, torch.arange(ENTRIES, dtype=torch.int32))
        pool = pool.to(self.device)
        table = self._numbers(ENTRIES // KERNEL_PAGE).flip(0).unsqueeze(0).contiguous()
        table = torch.nn.functional.pad(table, (0, WIDE // KERNEL_PAGE - table.shape[1]))
        queries = (codes, folded, lengths, pool, table)
        paged, ragged = partial(self._paged, queries), partial(self._ragged, queries)
        yield self._case("index_scores", "scores", paged, chunk=ragged)
        scores = self._ints(0, 300, self.rows, WIDE).float()  # with ties
        top = (partial(self._top, scores, lengths, chunk) for chunk in (False, True))
        yield self._case("top_entries", "rows", next(top), chunk=next(top))

    def _paged(self, queries: tuple[Tensor, ...], rows: Tensor, width: int = WIDE) -> Call:
        codes, folded, lengths = (part[rows] for part in queries[:3])
        pool, table = queries[3:]
        slots = torch.zeros_like(lengths)

        def call() -> Outputs:
            scores = paged_scores(codes, folded, pool, table, slots, lengths, width)
            return (_visible(scores, lengths),)

        return call

    def _ragged(self, queries: tuple[Tensor, ...], rows: Tensor) -> Call:
        if invariant.on():  # chunks read the pages too
            return self._paged(queries, rows, ENTRIES)
        codes, folded, lengths = (part[rows] for part in queries[:3])
        pool, table = queries[3:]
        entry = self._numbers(ENTRIES)
        places = table[0, (entry // KERNEL_PAGE).long()] * KERNEL_PAGE + entry % KERNEL_PAGE
        keys = torch.empty(ENTRIES, INDEX_DIM, dtype=torch.float8_e4m3fn, device=self.device)
        scale, first = torch.empty(ENTRIES, device=self.device), torch.zeros_like(lengths)
        kv_rows.gather_index_rows(pool, places, keys, scale)

        def call() -> Outputs:
            return (_visible(ragged_scores(codes, folded, keys, scale, first, lengths, ENTRIES), lengths),)

        return call

    def _top(self, scores: Tensor, lengths: Tensor, chunk: bool, rows: Tensor) -> Call:
        """Pages in order and a workspace from row 0 on: the same rows in both forms."""
        some, visible = scores[rows], lengths[rows]
        slots, table = torch.zeros_like(visible), self._numbers(WIDE // KERNEL_PAGE).unsqueeze(0)

        def call() -> Outputs:
            out = torch.empty(len(rows), self.config.index_topk, dtype=torch.int32, device=self.device)
            if chunk:
                return (top_entries(some[:, :ENTRIES], visible, slots, out),)
            return (top_rows(some, visible, slots, table, out),)

        return call

    # Tokens and slots

    def _tokens(self) -> Iterator[Case]:
        logits, rows = self._normal(self.rows, self.config.vocab_size) * 3, self.rows
        uniform = torch.rand(rows, generator=self._draw, device=self.device)
        params = Params(
            temperature=uniform * 1.2,
            top_k=self._ints(0, 60, rows),
            top_p=0.5 + uniform / 2,
            min_p=uniform / 50,
            seed_low=self._ints(0, 1 << 30, rows),
            seed_high=self._ints(0, 1 << 30, rows),
            choice=self._ints(0, 8, rows),
            position=self._ints(0, 4096, rows),
        )
        yield self._case("sample", "tokens", partial(self._sampled, logits, params))
        yield self._case("sample", "log-probabilities", partial(_logprobs, logits))

    def _sampled(self, logits: Tensor, params: Params, rows: Tensor) -> Call:
        some = logits[rows]
        theirs = Params(*(getattr(params, name)[rows] for name in Params.__dataclass_fields__))

        def call() -> Outputs:
            tokens = torch.empty(len(rows), dtype=torch.int32, device=self.device)
            faults = torch.empty_like(tokens)
            sample(some, theirs, tokens, faults)
            return tokens, faults

        return call

    def _bookkeeping(self) -> Iterator[Case]:
        rows = self.rows
        table, at = self._ints(0, 99, rows, POSITIONS // 256), self._ints(0, POSITIONS, rows)
        yield self._case("step_lists", "decode", partial(self._listed, table, at))
        fields = self._ints(0, 50, FIELDS, rows + 1)
        fields[Field.FINISHED] = fields[Field.FINISHED] % 2
        yield self._case("slot_step", "begin", partial(self._begun, fields))

    def _listed(self, table: Tensor, at: Tensor, rows: Tensor) -> Call:
        # Rings and pages go by slot: rows of one batch may stand anywhere.
        slots, positions, zero = rows.int(), at[rows], torch.zeros(len(table), dtype=torch.int32, device=self.device)

        def call() -> Outputs:
            lists = DecodeLists.allocate(len(rows), POSITIONS, self.device, top_k=self.config.index_topk)
            decode_lists(positions, slots, table, zero, zero, ring=192, out=lists)
            return lists.window_rows, lists.window_len, lists.c4_rows, lists.c4_len, lists.c128_rows, lists.c128_len

        return call

    def _begun(self, fields: Tensor, rows: Tensor) -> Call:
        slots = rows.int()

        def call() -> Outputs:
            at = StepRows.empty(len(rows), self.device)
            begin_step(slots, fields, at)
            return at.slots, at.positions, at.ids

        return call


class _Keys:
    """Queries with lists of every length over two pools, and the same in blocks of 128 over one workspace."""

    def __init__(self, cases: Cases, ratio: int) -> None:
        rows, device = cases.rows, cases.device
        self.ratio = ratio
        self.q = cases._bf16(rows, cases.config.num_attention_heads, HEAD_DIM)
        width = {0: 0, 4: cases.config.index_topk, 128: C128_ENTRIES}[ratio]
        keys = 1024
        self.window, self.entries = (kv_rows.allocate(keys, device) for _ in range(2))
        every = cases._numbers(keys)
        for pool in (self.window, self.entries):
            kv_rows.insert_rows(cases._bf16(keys, HEAD_DIM), pool, every)
        self.window_len, self.entry_len = cases._ints(1, WINDOW + 1, rows), cases._ints(0, width + 1, rows)
        self.window_len[::2], self.entry_len[::3] = WINDOW, width
        self.window_rows = _behind(cases._ints(0, keys, rows, WINDOW), self.window_len)
        self.entry_rows = _behind(cases._ints(0, keys, rows, width), self.entry_len)
        self.workspace = torch.empty(2 * keys, HEAD_DIM, dtype=torch.bfloat16, device=device)
        kv_rows.gather_rows(self.window, every, self.workspace[:keys])
        kv_rows.gather_rows(self.entries, every, self.workspace[keys:])
        listed = torch.where(self.entry_rows >= 0, self.entry_rows + keys, -1)
        self.index = torch.nn.functional.pad(torch.cat([self.window_rows, listed], 1), (0, -width % 128), value=-1)
        self.reach = WINDOW + self.entry_len

    def lists(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Both pools with these rows' lists, as decode reads them."""
        near = (self.window, self.window_rows[rows], self.window_len[rows])
        if not self.ratio:
            return *near, None, None, None
        return *near, self.entries, self.entry_rows[rows], self.entry_len[rows]


def _behind(lists: Tensor, lengths: Tensor) -> Tensor:
    """-1 behind the length."""
    inside = torch.arange(lists.shape[1], device=lists.device) < lengths.unsqueeze(1)
    return torch.where(inside, lists, -1)


def _visible(scores: Tensor, lengths: Tensor) -> Tensor:
    """Zero where a score means nothing."""
    inside = torch.arange(ENTRIES, device=scores.device) < lengths.unsqueeze(1)
    return scores[:, :ENTRIES].masked_fill(~inside, 0)


def _logprobs(logits: Tensor, rows: Tensor) -> Call:
    some = logits[rows]
    return lambda: (some.log_softmax(1),)
