"""The same calls once on the GPU and once on copies of all tensors on the CPU, whose path is the torch reference."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks import _gpu_attention_cases as cases
from benchmarks._gpu_attention_cases import Chunk, Decode
from worker_svc.ops import kv_rows
from worker_svc.ops.index_scores import paged_scores, ragged_scores
from worker_svc.ops.sparse_attention import DecodePlan, chunk_attention, decode_attention

Case = TypeVar("Case")

LIMITS = {"lists": 0.0, "select": 0.0, "chunk_lists": 0.0, "chunk_select": 0.0, "gather": 0.0, "gather_index": 0.0}
"""Exact ones; everything else may differ by 2e-3, and E4M3 outputs of different products by some rounded edges."""
LIMITS |= {"attend_bf16_3": 3e-3, "flashmla": 3e-3, "chunk_attend": 3e-3}  # their weights are BF16
LIMITS |= {"paged": 2e-2, "paged128": 2e-2, "paged_window": 2e-2}


def all_checks() -> Iterator[tuple[str, float]]:
    """(name, relative Frobenius distance) of each operation."""
    layer = Decode(13, 4096, 99)
    other = on_cpu(layer)
    yield "lists", exact(layer.lists, other.lists, layer.step, other.step)
    for name in ("latents", "queries"):
        getattr(layer, name)()
        getattr(other, name)()
        if name == "latents":
            yield "latent_codes", dequantised(layer.q_codes, layer.q_scale, other.q_codes, other.q_scale)
            yield "latent_rows", row_distance(layer.window, other.window, layer.lists.window_write)
        else:
            yield "query_heads", distance(layer.heads, other.heads)
            yield "query_index", distance(layer.codes.float(), other.codes.float())
            yield "query_weights", distance(layer.folded, other.folded)
    # The same queries and keys for what follows.
    layer.half = layer.heads.half()
    other.heads, other.half = layer.heads.cpu(), layer.half.cpu()
    layer.positions[:3] = torch.tensor([4099, 4223, 4351], dtype=torch.int32)  # close entries of both kinds
    other.positions = layer.positions.cpu()
    layer.step()
    other.step()
    for ratio, pool in ((4, "entries"), (128, "entries128")):
        layer.compress(ratio)
        other.compress(ratio)
        write = layer.lists.c4_write if ratio == 4 else layer.lists.c128_write
        yield f"compress{ratio}", row_distance(getattr(layer, pool), getattr(other, pool), write)
        states = "states4" if ratio == 4 else "states128"
        yield f"states{ratio}", distance(getattr(layer, states), getattr(other, states))
    yield "compress4_index", index_distance(layer, other)
    other.index = layer.index.cpu()
    other.entries, other.entries128, other.window = layer.entries.cpu(), layer.entries128.cpu(), layer.window.cpu()
    layer.score()
    args = (other.codes, other.folded, other.index, other.table, other.slots, other.lists.c4_len, other.width)
    other.codes.copy_(layer.codes)
    other.folded.copy_(layer.folded)
    yield "scores", masked_distance(layer.scores, paged_scores(*args), other.lists.c4_len)
    other.scores = layer.scores.cpu()
    layer.rows.fill_(-7)
    layer.select()
    other.select()
    yield "select", float((layer.rows.cpu() != other.rows).sum())
    for name, far, other_far in (
        ("paged", layer.far, other.far),
        ("paged128", layer.far128, other.far128),
        ("paged_window", (None, None, None), (None, None, None)),
    ):
        layer.out_codes.view(torch.uint8).fill_(0x7F)
        layer.out_scale.fill_(torch.nan)
        layer.paged(far)
        other.paged(other_far, half=False)
        yield name, dequantised(layer.out_codes, layer.out_scale, other.out_codes, other.out_scale)
    yield from attention_checks(layer, other)
    layer.output()
    other.output()
    yield "output", dequantised(layer.out_codes, layer.out_scale, other.out_codes, other.out_scale)
    yield from chunk_checks()


def attention_checks(layer: Decode, other: Decode) -> Iterator[tuple[str, float]]:
    """Outputs before they are quantised: ours with both query types and several splits, and the library's."""
    from worker_svc.ops.sparse_attention import triton

    expected = decode_attention(other.heads, *other.near, *other.far, other.weights.sink, cases.SCALE, DecodePlan())
    for half, splits in ((True, 1), (True, 10), (False, 3)):
        out = torch.full_like(layer.heads, torch.nan)
        q = layer.half if half else layer.heads
        part, lse = triton.attend(q, *layer.near, *layer.far, cases.SCALE, splits)
        triton.join(part, lse, layer.weights.sink, out)
        yield f"attend_{'f16' if half else 'bf16'}_{splits}", distance(out, expected)
    try:
        out = decode_attention(layer.heads, *layer.near, *layer.far, layer.weights.sink, cases.SCALE, DecodePlan())
    except ImportError:
        return
    yield "flashmla", distance(out, expected)


def chunk_checks() -> Iterator[tuple[str, float]]:
    """A chunk of 768 tokens."""
    chunk = Chunk(768)
    other = on_cpu(chunk)
    yield "chunk_lists", exact(chunk.lists, other.lists, chunk.step, other.step)
    chunk.workspace.fill_(torch.nan)
    other.workspace.fill_(torch.nan)
    chunk.latents()
    other.latents()
    own = slice(128, 128 + chunk.tokens)
    yield "chunk_latents", distance(chunk.workspace[own], other.workspace[own])
    for ratio, pool in ((4, "entries"), (128, "entries128")):
        chunk.compress(ratio)
        other.compress(ratio)
        write = chunk.lists.c4_write if ratio == 4 else chunk.lists.c128_write
        yield f"chunk_compress{ratio}", row_distance(getattr(chunk, pool), getattr(other, pool), write)
    other.entries, other.index = chunk.entries.cpu(), chunk.index.cpu()
    chunk.gather()
    other.gather()
    chunk.gather_index()
    other.gather_index()
    tail = slice(128 + chunk.tokens, None)
    yield "gather", float((chunk.workspace[tail].cpu() != other.workspace[tail]).sum())
    same = chunk.index_codes.cpu().view(torch.uint8) == other.index_codes.view(torch.uint8)
    yield "gather_index", float((~same).sum()) + float((chunk.index_scale.cpu() != other.index_scale).sum())
    chunk.score()
    other.codes, other.folded = chunk.codes.cpu(), chunk.folded.cpu()
    args = (other.codes, other.folded, other.index_codes, other.index_scale, other.slots, other.lists.c4_len)
    expected = ragged_scores(*args, chunk.tokens // 4)
    yield "chunk_scores", masked_distance(chunk.scores, expected, other.lists.c4_len)
    # Scores of a longer context, so that there is something to select.
    chunk.scores, length = cases.normal(768, 2000), torch.randint(0, 2000, (768,)).int()
    chunk.lists.c4_len.copy_(length)
    other.lists.c4_len.copy_(length)
    other.scores = chunk.scores.cpu()
    chunk.select()
    other.select()
    yield "chunk_select", float((chunk.lists.c4_index.cpu() != other.lists.c4_index).sum())
    chunk.step()
    chunk.workspace[:128] = 0
    q, sink = chunk.heads[::16].contiguous(), chunk.weights.sink
    index = chunk.lists.c4_index[::16].contiguous()
    from worker_svc.ops.sparse_attention import triton

    out = torch.full_like(q, torch.nan)
    triton.sparse_prefill(q, chunk.workspace, index, sink, cases.SCALE, out)
    expected = chunk_attention(q.cpu(), chunk.workspace.cpu(), index.cpu(), sink.cpu(), cases.SCALE)
    yield "chunk_attend", distance(out, expected)


def on_cpu(case: Case) -> Case:
    """A copy of a case, of its weights and lists, with every tensor on the CPU."""
    other = object.__new__(type(case))
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            value = _cpu(value)
        elif name == "weights":
            value = on_cpu(value)
        elif name == "lists":
            fields = {field: getattr(value, field) for field in value.__dataclass_fields__}
            value = type(value)(**fields | {field: _cpu(fields[field]) for field in _tensors(value)})
        setattr(other, name, value)
    return other


def _tensors(lists: Any) -> list[str]:
    """Fields that hold one."""
    return [name for name in lists.__dataclass_fields__ if isinstance(getattr(lists, name), Tensor)]


def _cpu(tensor: Tensor) -> Tensor:
    """Same strides, for views that matter are made from them."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return out.copy_(tensor)


def exact(lists: Any, others: Any, run: Callable[[], None], other_run: Callable[[], None]) -> float:
    """Number of elements of the lists that differ after both ran into poisoned memory."""
    for name in _tensors(lists):
        getattr(lists, name).fill_(-1)
        getattr(others, name).fill_(-1)
    run()
    other_run()
    return float(sum((getattr(lists, n).cpu() != getattr(others, n)).sum() for n in _tensors(lists)))


def distance(out: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance, in FP64; NaN stays NaN."""
    mine, theirs = out.cpu().double(), expected.cpu().double()
    return float((mine - theirs).norm() / theirs.norm())


def masked_distance(out: Tensor, expected: Tensor, lengths: Tensor) -> float:
    """Distance over the first lengths[t] columns of each row."""
    width = min(out.shape[1], expected.shape[1])
    counted = torch.arange(width) < lengths.cpu().unsqueeze(1)
    return distance(out[:, :width].cpu()[counted], expected[:, :width][counted])


def dequantised(codes: Tensor, scale: Tensor, other_codes: Tensor, other_scale: Tensor) -> float:
    """Distance of E4M3 tensors with a scale per 128."""
    return distance(
        codes.float() * scale.repeat_interleave(128, -1), other_codes.float() * other_scale.repeat_interleave(128, -1)
    )


def row_distance(pool: Tensor, other: Tensor, written: Tensor) -> float:
    """Distance of the rows written; NaN if a byte of any other row differs."""
    rows = written.cpu()[written.cpu() >= 0]
    assert rows.numel(), "a check needs rows that are written"
    mine, theirs = kv_rows.ref.read_rows(pool.cpu(), rows), kv_rows.ref.read_rows(other, rows)
    untouched, expected = pool.cpu(), other.clone()
    zeros = torch.zeros(rows.shape[0], 512)
    kv_rows.insert_rows(zeros, untouched, rows)
    kv_rows.insert_rows(zeros, expected, rows)
    return distance(mine, theirs) if torch.equal(untouched, expected) else float("nan")


def index_distance(layer: Decode, other: Decode) -> float:
    """Distance of the index rows that the C4 compressor wrote."""
    rows = other.lists.c4_write[other.lists.c4_write >= 0]
    values = []
    for pool in (layer.index.cpu(), other.index):
        codes = torch.empty(rows.shape[0], 128, dtype=torch.float8_e4m3fn)
        scale = torch.empty(rows.shape[0])
        kv_rows.gather_index_rows(pool, rows, codes, scale)
        values.append(codes.float() * scale.unsqueeze(1))
    return distance(*values)
