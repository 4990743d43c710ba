"""One layer's attention inputs and pools at the shapes of Flash, in decode and in prefill, with random contents."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker_svc.ops import attention_output, kv_rows, step_lists
from worker_svc.ops.compress_step import IndexCompressor, compress_chunk, compress_step, state_width
from worker_svc.ops.index_scores import ScorePlan, deep_gemm
from worker_svc.ops.index_scores import triton as score_kernels
from worker_svc.ops.latent_rows import latent_rows
from worker_svc.ops.paged_attention import paged_attention
from worker_svc.ops.query_heads import IndexQuery, query_heads
from worker_svc.ops.sparse_attention import DecodePlan, flash_mla
from worker_svc.ops.sparse_attention import triton as attention_kernels
from worker_svc.ops.top_entries import top_entries, top_rows

HEADS, Q_LORA, GROUPS, TOP_K, RING, EPS = 64, 1024, 8, 512, 128, 1e-6
SCALE = 512**-0.5
DEVICE = "cuda"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32, device=DEVICE)


def turns(positions: int) -> Tensor:
    """Rotary table FP32 [positions, 32, 2]."""
    freqs = 10000.0 ** (-torch.arange(0, 64, 2, device=DEVICE) / 64)
    angles = torch.arange(positions, device=DEVICE).unsqueeze(1) * freqs
    return torch.stack([angles.cos(), angles.sin()], dim=-1).contiguous()


def filled_rows(count: int) -> Tensor:
    """An FP8 pool of random rows."""
    pool = kv_rows.allocate(count, DEVICE)
    for first in range(0, count, 1 << 16):
        rows = torch.arange(first, min(count, first + (1 << 16)), dtype=torch.int32, device=DEVICE)
        kv_rows.insert_rows(normal(rows.shape[0], 512, dtype=torch.bfloat16), pool, rows)
    return pool


def filled_index(count: int) -> Tensor:
    """An index pool of random codes, scales near one."""
    pool = kv_rows.allocate_index(count, DEVICE)
    codes = normal(pool.shape[0], 64 * 128).to(torch.float8_e4m3fn)
    pool[:, : 64 * 128] = codes.view(torch.uint8)
    pool.view(torch.float32)[:, 64 * 32 :] = torch.exp2(
        torch.randint(-2, 3, (pool.shape[0], 64), device=DEVICE).float()
    )
    return pool


class Weights:
    """Small parameters of a C4 and a C128 layer."""

    def __init__(self, positions: int) -> None:
        self.turns = turns(positions)
        self.q_norm, self.kv_norm, self.entry_norm = (1 + normal(n) / 8 for n in (Q_LORA, 512, 512))
        self.index_norm, self.sink = 1 + normal(128) / 8, normal(HEADS)
        self.ape4, self.ape128 = normal(4, state_width(4)), normal(128, state_width(128))
        self.ape4[:, :1024], self.ape4[:, 2048:2304], self.ape128[:, :512] = 0, 0, 0


class Decode:
    """`tokens` sequences near `context` tokens long; one layer's pools."""

    def __init__(self, tokens: int, context: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokens, self.weights = tokens, Weights(context + 256)
        pages = context // 256 + 1
        self.positions = (context + torch.randint(0, 200, (tokens,), device=DEVICE)).int()
        self.positions[0] = context + 3  # closes a C4 entry
        self.slots = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        self.first = self.slots.clone()
        self.table = torch.randperm(tokens * pages, device=DEVICE).view(tokens, pages).int()
        self.window, self.entries = filled_rows(tokens * RING), filled_rows(tokens * pages * 64)
        self.entries128, self.index = filled_rows(tokens * pages * 2), filled_index(tokens * pages * 64)
        self.states4, self.states128 = normal(tokens * 8, state_width(4)), normal(tokens * 128, state_width(128))
        self.zeros = ints(tokens)
        self.lists = step_lists.DecodeLists.allocate(tokens, context + 256, DEVICE)
        self.step()
        self.qkv, self.raw = normal(tokens, Q_LORA + 512, dtype=torch.bfloat16), normal(tokens, 2624)
        self.raw128 = normal(tokens, 1024)
        self.q = normal(tokens, HEADS * 512 + 64 * 128, dtype=torch.bfloat16)
        self.heads = normal(tokens, HEADS, 512, dtype=torch.bfloat16)
        self.half = self.heads.half()
        self.q_codes = torch.empty(tokens, Q_LORA, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.q_scale = torch.empty(Q_LORA // 128, -(-tokens // 4) * 4, device=DEVICE).t()[:tokens]
        self.codes = normal(tokens, 64, 128).to(torch.float8_e4m3fn)
        self.folded = normal(tokens, 64)
        self.width = -(-(context + 256) // 4 // 64) * 64
        self.scores = normal(tokens, self.width)
        self.rows = ints(tokens, TOP_K)
        self.select()
        self.out_codes = torch.empty(tokens, GROUPS, 4096, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.out_scale = attention_output.scales(tokens, GROUPS, 4096, DEVICE)
        self.counted = torch.full_like(self.lists.c4_len, TOP_K).minimum(self.lists.c4_len)

    def step(self) -> None:
        args = (self.positions, self.slots, self.table, self.zeros, self.zeros)
        step_lists.decode_lists(*args, ring=RING, out=self.lists)

    def latents(self) -> None:
        w, lists = self.weights, self.lists
        args = (self.qkv, w.q_norm, w.kv_norm, w.turns, self.positions, lists.window_write, self.window)
        latent_rows(*args, self.q_codes, self.q_scale, eps=EPS)

    def compress(self, ratio: int) -> None:
        w, lists = self.weights, self.lists
        if ratio == 4:
            raw, ape, states, write, pool = self.raw, w.ape4, self.states4, lists.c4_write, self.entries
        else:
            raw, ape, states, write, pool = self.raw128, w.ape128, self.states128, lists.c128_write, self.entries128
        index = IndexCompressor(norm=w.index_norm, pool=self.index) if ratio == 4 else None
        args = (raw, ape, w.entry_norm, w.turns, self.positions, self.slots, self.first, states, write, pool)
        compress_step(*args, ratio=ratio, ring=8 if ratio == 4 else 128, eps=EPS, index=index)

    def queries(self) -> None:
        index = IndexQuery(
            raw=self.q[:, HEADS * 512 :], weights=self.raw[:, 2560:], codes=self.codes, folded=self.folded
        )
        q = self.q[:, : HEADS * 512]
        query_heads(q, self.weights.turns, self.positions, eps=EPS, index=index, out=self.heads)

    def score(self) -> None:
        args = (self.codes, self.folded, self.index, self.table, self.slots, self.lists.c4_len)
        score_kernels.paged_scores(*args, self.scores)

    def score_library(self) -> None:
        args = (self.codes, self.folded, self.index, self.table, self.slots, self.lists.c4_len)
        deep_gemm.paged_scores(*args, self.width, self.score_plan)

    def select(self) -> None:
        top_rows(self.scores, self.lists.c4_len, self.slots, self.table, self.rows)

    @property
    def near(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.window, self.lists.window_rows, self.lists.window_len

    @property
    def far(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.entries, self.rows, self.counted

    @property
    def far128(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.entries128, self.lists.c128_rows, self.lists.c128_len

    def paged(self, far: tuple[Any, Any, Any], *, half: bool = True) -> None:
        w = self.weights
        q = self.half if half else self.heads
        paged_attention(q, *self.near, *far, w.sink, SCALE, w.turns, self.positions, self.out_codes, self.out_scale)

    def attend(self, splits: int, tile: attention_kernels.Tile, *, half: bool) -> None:
        q = self.half if half else self.heads
        attention_kernels.attend(q, *self.near, *self.far, SCALE, splits, tile)

    def library(self, far: tuple[Tensor, Tensor, Tensor]) -> None:
        flash_mla.decode_attention(self.heads, *self.near, *far, self.weights.sink, SCALE, self.plan)

    @property
    def score_plan(self) -> ScorePlan:
        if not hasattr(self, "_score_plan"):
            self._score_plan = ScorePlan()
        return self._score_plan

    @property
    def plan(self) -> DecodePlan:
        if not hasattr(self, "_plan"):
            self._plan = DecodePlan()
        return self._plan

    def output(self) -> None:
        args = (self.heads, self.weights.turns, self.positions, self.out_codes, self.out_scale)
        attention_output.attention_output(*args)

    @property
    def splits(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_splits"):
            self._splits = attention_kernels.attend(self.half, *self.near, *self.far, SCALE)
        return self._splits

    def join(self) -> None:
        w = self.weights
        attention_kernels.join_quantised(*self.splits, w.sink, w.turns, self.positions, self.out_codes, self.out_scale)

    def least_bytes(self) -> dict[str, float]:
        """What each operation has to read and write."""
        t, entries, heads = self.tokens, float(self.lists.c4_len.sum()), HEADS * 512
        rows = 584 * float(self.lists.window_len.sum() + self.counted.sum())
        return {
            "latents": t * ((Q_LORA + 512) * 2 + Q_LORA + 584),
            "compress4": t * state_width(4) * 8,
            "compress128": t * state_width(128) * 8,
            "queries": t * (heads * 4 + 64 * 128 * 3 + 64 * 8),
            "scores": entries * 132,
            "scores_deepgemm": entries * 132,
            "select": entries * 4 + t * TOP_K * 4,
            "paged": rows + t * heads * 3,
            "flashmla": rows + t * heads * 4,
            "join": self.splits[0].numel() * 2 + t * heads,
            "output": t * heads * 3,
        }


DECODE_OPS: dict[str, Callable[[Any], None]] = {
    "lists": Decode.step,
    "latents": Decode.latents,
    "compress4": lambda layer: layer.compress(4),
    "compress128": lambda layer: layer.compress(128),
    "queries": Decode.queries,
    "scores": Decode.score,
    "scores_deepgemm": Decode.score_library,
    "select": Decode.select,
    "paged": lambda layer: layer.paged(layer.far),
    "paged_bf16": lambda layer: layer.paged(layer.far, half=False),
    "paged128": lambda layer: layer.paged(layer.far128),
    "paged_window": lambda layer: layer.paged((None, None, None)),
    "flashmla": lambda layer: layer.library(layer.far),
    "join": Decode.join,
    "output": Decode.output,
}


class Chunk:
    """One row of `tokens` tokens from position 0."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(1)
        self.tokens, self.weights = tokens, Weights(tokens)
        self.positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        self.slots, self.first, self.zero = ints(tokens), ints(tokens), ints(1)
        self.last = torch.full_like(self.positions, tokens - 1)
        pages = tokens // 256
        self.table = torch.randperm(pages, device=DEVICE).view(1, pages).int()
        self.window, self.entries = filled_rows(RING), filled_rows(pages * 64)
        self.entries128, self.index = filled_rows(pages * 2), filled_index(pages * 64)
        self.states4, self.states128 = normal(8, state_width(4)), normal(128, state_width(128))
        self.own = self.positions + 128
        self.base = torch.full_like(self.own, 128 + tokens)
        self.workspace = normal(128 + tokens + tokens // 4, 512, dtype=torch.bfloat16)
        self.lists = step_lists.ChunkLists.allocate(tokens, tokens, DEVICE)
        self.step()
        self.qkv, self.raw = normal(tokens, Q_LORA + 512, dtype=torch.bfloat16), normal(tokens, 2624)
        self.q = normal(tokens, HEADS * 512 + 64 * 128, dtype=torch.bfloat16)
        self.q_codes = torch.empty(tokens, Q_LORA, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.q_scale = torch.empty(Q_LORA // 128, tokens, device=DEVICE).t()
        self.codes = torch.empty(tokens, 64, 128, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.folded = normal(tokens, 64)
        self.heads = normal(tokens, HEADS, 512, dtype=torch.bfloat16)
        self.out_codes = torch.empty(tokens, GROUPS, 4096, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.out_scale = attention_output.scales(tokens, GROUPS, 4096, DEVICE)
        entry = torch.arange(tokens // 4, device=DEVICE)
        self.entry_rows = (self.table[0, entry // 64] * 64 + entry % 64).int()
        self.index_codes = torch.empty(tokens // 4, 128, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.index_scale = torch.empty(tokens // 4, device=DEVICE)
        self.scores = normal(tokens, tokens // 4)
        self.gather_index()
        self.queries()

    def step(self) -> None:
        args = (self.positions, self.slots, self.last, self.table, self.zero, self.zero, self.own, self.base, self.base)
        step_lists.chunk_lists(*args, ring=RING, out=self.lists)

    def latents(self) -> None:
        w = self.weights
        args = (self.qkv, w.q_norm, w.kv_norm, w.turns, self.positions, self.lists.window_write, self.window)
        latent_rows(*args, self.q_codes, self.q_scale, eps=EPS, workspace=self.workspace, workspace_rows=self.own)

    def compress(self, ratio: int) -> None:
        w, lists = self.weights, self.lists
        if ratio == 4:
            ape, states, write, pool = w.ape4, self.states4, lists.c4_write, self.entries
        else:
            ape, states, write, pool = w.ape128, self.states128, lists.c128_write, self.entries128
        index = IndexCompressor(norm=w.index_norm, pool=self.index) if ratio == 4 else None
        args = (self.raw, ape, w.entry_norm, w.turns, self.positions, self.slots, self.first, self.last)
        compress_chunk(*args, states, write, pool, ratio=ratio, ring=8 if ratio == 4 else 128, eps=EPS, index=index)

    def queries(self) -> None:
        index = IndexQuery(
            raw=self.q[:, HEADS * 512 :], weights=self.raw[:, 2560:], codes=self.codes, folded=self.folded
        )
        q = self.q[:, : HEADS * 512]
        query_heads(q, self.weights.turns, self.positions, eps=EPS, index=index, out=self.heads)

    def gather(self) -> None:
        kv_rows.gather_rows(self.entries, self.entry_rows, self.workspace[128 + self.tokens :])

    def gather_index(self) -> None:
        kv_rows.gather_index_rows(self.index, self.entry_rows, self.index_codes, self.index_scale)

    def score(self) -> None:
        args = (self.codes, self.folded, self.index_codes, self.index_scale, self.slots, self.lists.c4_len)
        score_kernels.ragged_scores(*args, self.scores)

    def score_library(self) -> None:
        args = (self.codes, self.folded, self.index_codes, self.index_scale, self.slots, self.lists.c4_len)
        deep_gemm.ragged_scores(*args, self.tokens // 4)

    def select(self) -> None:
        top_entries(self.scores, self.lists.c4_len, self.base, self.lists.c4_index[:, 128:])

    def attend(self) -> None:
        out = torch.empty_like(self.heads)
        attention_kernels.sparse_prefill(self.heads, self.workspace, self.lists.c4_index, self.weights.sink, SCALE, out)

    def library(self) -> None:
        flash_mla.chunk_attention(self.heads, self.workspace, self.lists.c4_index, self.weights.sink, SCALE)

    def output(self) -> None:
        args = (self.heads, self.weights.turns, self.positions, self.out_codes, self.out_scale)
        attention_output.attention_output(*args)

    def least_bytes(self) -> dict[str, float]:
        """What each operation has to read and write."""
        t, entries, heads = self.tokens, float(self.lists.c4_len.sum()), HEADS * 512
        return {
            "latents": t * ((Q_LORA + 512) * 2 + Q_LORA + 584 + 1024),
            "compress4": t * state_width(4) * 4 + t / 4 * (584 + 132),
            "compress128": t * state_width(128) * 4 + t / 128 * 584,
            "queries": t * (heads * 4 + 64 * 128 * 3 + 64 * 8),
            "gather": t / 4 * (584 + 1024),
            "gather_index": t / 4 * 132 * 2,
            "select": entries * 4 + t * TOP_K * 4,
            "output": t * heads * 3,
        }


CHUNK_OPS: dict[str, Callable[[Any], None]] = {
    "lists": Chunk.step,
    "latents": Chunk.latents,
    "compress4": lambda chunk: chunk.compress(4),
    "compress128": lambda chunk: chunk.compress(128),
    "queries": Chunk.queries,
    "gather": Chunk.gather,
    "gather_index": Chunk.gather_index,
    "scores": Chunk.score,
    "scores_deepgemm": Chunk.score_library,
    "select": Chunk.select,
    "attend": Chunk.attend,
    "flashmla": Chunk.library,
    "output": Chunk.output,
}
