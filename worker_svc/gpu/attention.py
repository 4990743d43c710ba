"""Attention of one layer on the device: latent, heads, indexer, compressor, sparse attention, grouped output.

The same projections serve decode and chunks; between them a decode step reads keys from the pools, a chunk from a
workspace. Order matters: the ring's old rows are gathered before new ones overwrite them, and entries that the step
closes are written before its queries read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.checkpoint.config import V4Config
from worker_svc.gpu.overlap import Overlap
from worker_svc.gpu.pools import LayerPools
from worker_svc.gpu.step import ChunkStep, DecodeStep, EntryArea, joined
from worker_svc.gpu.weights import AttentionWeights
from worker_svc.ops import invariant
from worker_svc.ops.attention_output import attention_output
from worker_svc.ops.bf16_gemm import bf16_gemm
from worker_svc.ops.compress_step import IndexCompressor, compress_chunk, compress_step
from worker_svc.ops.fp8_gemm import Fp8Rows, empty_groups, fp8_gemm, fp8_gemm_parts, fp8_grouped_parts
from worker_svc.ops.index_scores import paged_scores, ragged_scores
from worker_svc.ops.kv_rows import (
    FP8_PAGE_BYTES,
    HEAD_DIM,
    INDEX_DIM,
    KERNEL_PAGE,
    gather_index_rows,
    gather_rows,
    insert_rows,
)
from worker_svc.ops.latent_rows import latent_rows
from worker_svc.ops.paged_attention import paged_attention
from worker_svc.ops.quant_fp8 import quantise_rows
from worker_svc.ops.query_heads import IndexQuery, query_heads
from worker_svc.ops.sparse_attention import chunk_attention, decode_attention
from worker_svc.ops.top_entries import top_entries, top_rows

INDEX_HEADS = (32, 64)
"""What the scoring library takes; fewer heads are padded with weight zero."""
SCORE_BYTES = 1 << 29
"""Scores that exist at once in a chunk: queries are scored in groups of so many bytes."""
SCORE_QUERIES = 2048
"""And of no more queries: early ones see few entries, and selection costs what the widest row of its launch does."""


class Attention:
    """One layer; `turns` FP32 [positions, 32, 2] is the rotary table of its kind."""

    def __init__(
        self, weights: AttentionWeights, config: V4Config, turns: Tensor, state_ring: int, overlap: Overlap
    ) -> None:
        self.weights, self.config, self.turns = weights, config, turns
        self.ratio, self.state_ring, self.overlap = weights.ratio, state_ring, overlap
        self.heads, self.q_lora = config.num_attention_heads, config.q_lora_rank
        self.scale, self.eps = config.head_dim**-0.5, config.rms_norm_eps
        self.index_heads = next((n for n in INDEX_HEADS if n >= config.index_n_heads), config.index_n_heads)

    def __call__(self, y: Tensor, x: Fp8Rows, step: DecodeStep | ChunkStep, pools: LayerPools) -> Tensor:
        """y BF16 [T, D] normed, x the same in FP8 -> BF16 [T, D] or FP32 [parts, T, D], as `post_mix` takes it."""
        w = self.weights
        with self.overlap.beside():
            raw = self._states(y, step, pools)
        qkv = fp8_gemm_parts(x, w.inputs)
        latent = Fp8Rows.empty(y.shape[0], self.q_lora, y.device)
        workspace, own_rows = self._workspace(step, pools)
        latent_rows(
            *(qkv, w.q_norm, w.kv_norm, self.turns, step.positions, step.lists.window_write, pools.window),
            *(latent.codes, latent.scale),
            eps=self.eps,
            workspace=workspace,
            workspace_rows=own_rows,
        )
        heads = fp8_gemm(latent, w.wq_b)  # [T, H * 512 (+ index heads * 128)]
        self.overlap.join()
        q, index = self._queries(heads, raw, step)
        groups, _, width = w.wo_a.codes.shape
        rows = empty_groups(y.shape[0], groups, width, y.device)
        if isinstance(step, DecodeStep):
            self._attend_pools(q, index, step, pools, rows)
        else:
            assert workspace is not None
            out = self._attend_workspace(q, index, step, pools, workspace)
            attention_output(out, self.turns, step.positions, rows.codes, rows.scale)
        return self._project(rows)

    def _states(self, y: Tensor, step: DecodeStep | ChunkStep, pools: LayerPools) -> Tensor | None:
        """The compressor's projection FP32 [T, state width (+ index heads)]; states kept, closed entries written."""
        if self.weights.states is None:
            return None
        raw = bf16_gemm(y, self.weights.states)
        if self.ratio == 4 and isinstance(step, ChunkStep):
            self._save_states(raw, step, pools)
        self._compress(raw, step, pools)
        return raw

    def _queries(
        self, heads: Tensor, raw: Tensor | None, step: DecodeStep | ChunkStep
    ) -> tuple[Tensor, IndexQuery | None]:
        """Query heads [T, H, 512] normed and rotated in place, and the indexer's."""
        index, width = None, self.heads * HEAD_DIM
        if self.ratio == 4:
            assert raw is not None
            tokens, device = heads.shape[0], heads.device
            index = IndexQuery(
                raw=heads[:, width:],
                weights=raw[:, raw.shape[1] - self.config.index_n_heads :],
                codes=torch.empty(tokens, self.index_heads, INDEX_DIM, dtype=torch.float8_e4m3fn, device=device),
                folded=torch.empty(tokens, self.index_heads, device=device),
            )
        q = query_heads(heads[:, :width], self.turns, step.positions, eps=self.eps, index=index)
        return q, index

    def _compress(self, raw: Tensor, step: DecodeStep | ChunkStep, pools: LayerPools) -> None:
        """Keep the tokens' states; write the entries that they close."""
        w = self.weights
        assert w.compressor is not None and pools.states is not None and pools.entries is not None
        index = None
        if pools.index_keys is not None and w.compressor.index_norm is not None:
            index = IndexCompressor(norm=w.compressor.index_norm, pool=pools.index_keys)
        write = step.lists.c4_write if self.ratio == 4 else step.lists.c128_write
        args = (raw, w.compressor.ape, w.compressor.norm, self.turns, step.positions, step.slots, step.first_token)
        target, ring = (pools.states, write, pools.entries), self.state_ring
        if isinstance(step, DecodeStep):
            compress_step(*args, *target, ratio=self.ratio, ring=ring, eps=self.eps, index=index)
        else:
            last = step.last_position
            compress_chunk(*args, last, *target, ratio=self.ratio, ring=ring, eps=self.eps, index=index)

    # Decode: keys are rows of the pools

    def _attend_pools(
        self, q: Tensor, index: IndexQuery | None, step: DecodeStep, pools: LayerPools, out: Fp8Rows
    ) -> None:
        """Fill `out`: the attention output turned back and quantised."""
        lists, rows, length = step.lists, None, None
        if index is not None:
            rows, length = self._select(index, step, pools), lists.top_len
        elif self.ratio:
            rows, length = lists.c128_rows, lists.c128_len
        keys = (q, pools.window, lists.window_rows, lists.window_len, pools.entries, rows, length)
        if joined(len(q), on_gpu=q.is_cuda):
            turned = (self.turns, step.positions, out.codes, out.scale)
            paged_attention(*keys, self.weights.sink, self.scale, *turned)
            return
        attended = decode_attention(*keys, self.weights.sink, self.scale, step.plans[self.ratio])
        attention_output(attended, self.turns, step.positions, out.codes, out.scale)

    def _select(self, index: IndexQuery, step: DecodeStep, pools: LayerPools) -> Tensor:
        """Pool rows int32 [T, k] of the entries to read."""
        lists, top_k = step.lists, self.config.index_topk
        if step.most_entries <= top_k:  # every visible entry is read: nothing to score
            return lists.c4_rows
        assert pools.index_keys is not None
        table = step.tables.pages
        scores = paged_scores(
            *(index.codes, index.folded, pools.index_keys, table, step.slots, lists.c4_len, step.most_entries),
            step.score_plan,
        )
        rows = torch.empty(len(step.ids), top_k, dtype=torch.int32, device=scores.device)
        return top_rows(scores, lists.c4_len, step.slots, table, rows)

    # Chunks: keys are rows of a workspace

    def _workspace(self, step: DecodeStep | ChunkStep, pools: LayerPools) -> tuple[Tensor | None, Tensor | None]:
        """Where the tokens' own keys go beside the pool, and their rows there. In deterministic mode decode has one
        too, which nobody reads: its latents come from the program that makes those of chunks."""
        if isinstance(step, ChunkStep):
            return self._old_window(step, pools), step.own_rows
        if not invariant.on():
            return None, None
        every = step.lists.every
        return torch.empty(len(every), HEAD_DIM, dtype=torch.bfloat16, device=every.device), every

    def _old_window(self, step: ChunkStep, pools: LayerPools) -> Tensor:
        """The workspace [rows, 512], its old window rows filled: before the chunk's own rows overwrite the ring."""
        workspace = torch.empty(step.workspace_rows, HEAD_DIM, dtype=torch.bfloat16, device=step.ids.device)
        old = torch.empty(step.old_rows.shape[0], HEAD_DIM, dtype=torch.bfloat16, device=step.ids.device)
        if len(old):
            workspace[step.old_rows.long()] = gather_rows(pools.window, step.old_ring_rows, old)
        return workspace

    def _attend_workspace(
        self,
        q: Tensor,
        index: IndexQuery | None,
        step: ChunkStep,
        pools: LayerPools,
        workspace: Tensor,
    ) -> Tensor:
        lists = step.lists
        for save in step.window_saves:
            insert_rows(workspace[save.source.long()], pools.tail_window, save.target)
        if self.ratio:
            area = step.areas[self.ratio]
            if len(area.pool_rows):
                assert pools.entries is not None
                gather_rows(
                    pools.entries, area.pool_rows, workspace[area.first_row : area.first_row + len(area.pool_rows)]
                )
            if index is not None and area.most > self.config.index_topk:
                self._select_workspace(index, step, pools, area)
        keys = {0: lists.window_index, 4: lists.c4_index, 128: lists.c128_index}[self.ratio]
        reach = lists.c4_reach if self.ratio == 4 else None
        if self.ratio == 128 and invariant.on():
            reach = lists.c128_len  # the library is no faster for it, our kernel is
        fp8 = pools.window.shape[1] == FP8_PAGE_BYTES
        return chunk_attention(q, workspace, keys, self.weights.sink, self.scale, reach, fp8=fp8)

    def _select_workspace(self, index: IndexQuery, step: ChunkStep, pools: LayerPools, area: EntryArea) -> None:
        """Fill the C4 lists behind the window with the chosen entries, some queries at a time."""
        scored = self._scorer(index, step, pools, area)
        visible, lists = step.lists.c4_len, step.lists
        window, group = lists.window_index.shape[1], max(64, SCORE_BYTES // (4 * max(1, area.most)) // 64 * 64)
        group = min(group, SCORE_QUERIES)
        for first in range(0, len(visible), group):
            part = slice(first, first + group)
            most = int(step.visible[part].max())
            if most <= self.config.index_topk:
                continue  # these read every entry, and their lists say so already
            scores = scored(part, most)
            chosen = lists.c4_index[part, window : window + self.config.index_topk]
            top_entries(scores[:, :most], visible[part], area.base[part], chosen)

    def _scorer(
        self, index: IndexQuery, step: ChunkStep, pools: LayerPools, area: EntryArea
    ) -> Callable[[slice, int], Tensor]:
        """(tokens, the most entries that one of them sees) -> their scores FP32 [n, that many or more].

        Keys are gathered once; in deterministic mode they are read where they lie, by decode's program."""
        assert pools.index_keys is not None
        paged, visible, codes, folded = pools.index_keys, step.lists.c4_len, index.codes, index.folded
        if invariant.on():

            def read(part: slice, most: int) -> Tensor:
                at = (paged, step.tables.pages, step.slots[part], visible[part], -(-most // KERNEL_PAGE) * KERNEL_PAGE)
                return paged_scores(codes[part], folded[part], *at)

            return read
        keys = torch.empty(len(area.pool_rows), INDEX_DIM, dtype=torch.float8_e4m3fn, device=codes.device)
        scale = torch.empty(len(keys), device=codes.device)
        gather_index_rows(paged, area.pool_rows, keys, scale)
        last = area.key_first + visible

        def gathered(part: slice, most: int) -> Tensor:
            at = (keys, scale, area.key_first[part], last[part], most)
            return ragged_scores(codes[part], folded[part], *at)

        return gathered

    def _save_states(self, raw: Tensor, step: ChunkStep, pools: LayerPools) -> None:
        """C4 states before page boundaries into tails, with ape as the ring has it."""
        assert pools.carries is not None and pools.states is not None and self.weights.compressor is not None
        ape = self.weights.compressor.ape
        for save in step.state_saves:
            target = pools.carries[save.tail]
            target[: save.places.start] = pools.states[save.ring_rows]
            target[save.places] = raw[save.tokens, : target.shape[1]] + ape[save.places]

    def _project(self, rows: Fp8Rows) -> Tensor:
        """Attention output [T, G, H / G * 512] -> [T, D], or [parts, T, D] to be added up."""
        low = fp8_grouped_parts(rows, self.weights.wo_a).flatten(-2)
        quantised = Fp8Rows.empty(low.shape[-2], low.shape[-1], low.device)
        quantise_rows(low, quantised.codes, quantised.scale)
        return fp8_gemm_parts(quantised, self.weights.wo_b)
