"""The indexer's selection: our kernel, FlashInfer's in two ways, and torch.topk, at decode's and prompts' sizes.

Floor: scores read once, rows written once. FlashInfer's "any tie" may take any of equal scores at the border, which is
not what the operation promises; it is there to show what that promise costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks._gpu_op import Bench

TOP_K, PAGE = 512, 64
DECODE = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (8, 16384), (64, 16384), (1, 262144), (8, 262144))
"""Rows and C4 entries: contexts of 4K, 64K and 1M tokens."""
PROMPT = ((1024, 1024), (1024, 4096), (4096, 4096))


def selection(bench: Bench) -> None:
    """Microseconds of each candidate; ours against the reference, FlashInfer's against ours, as sets of rows."""
    from worker_svc.ops import registry

    library = not bench.warming and not registry.obstacle("flashinfer")
    if not bench.warming and not library:
        print(f"FlashInfer is not timed: {registry.obstacle('flashinfer')}", flush=True)
    for rows, entries in DECODE:
        _decode(bench, rows, entries, library=library)
    for rows, entries in PROMPT:
        _prompt(bench, rows, entries, library=library)


def _scores(bench: Bench, rows: int, entries: int) -> Tensor:
    """As an indexer makes them: a fifth are zeros, which tie."""
    scores = bench.randn(rows, entries, dtype=torch.float32)
    return scores if bench.warming else torch.where(scores < -0.85, 0.0, scores.abs())


def _decode(bench: Bench, rows: int, entries: int, *, library: bool) -> None:
    from worker_svc.ops.top_entries import ref, triton

    scores, pages = _scores(bench, rows, entries), entries // PAGE
    lengths, slots = _ints(bench, torch.full((rows,), entries)), _ints(bench, torch.arange(rows))
    table = _ints(bench, torch.stack([torch.randperm(pages) + place * pages for place in range(rows)]))
    out = bench.empty(rows, TOP_K, dtype=torch.int32)
    name, where = f"{rows}_of_{entries}", (scores, lengths, slots, table)
    ours = partial(triton.top_rows, *where, out)
    _record(bench, f"select_{name}", ours, rows, entries)
    if not bench.warming:
        truth = torch.empty(rows, TOP_K, dtype=torch.int32)
        ref.top_rows(scores.cpu(), lengths.cpu(), slots.cpu(), table.cpu(), truth)
        bench.exact(f"select_{name}", torch.equal(truth, out.cpu()))
    if not library:
        return
    from worker_svc.ops.top_entries import flashinfer

    theirs = bench.empty(rows, TOP_K, dtype=torch.int32)
    _record(bench, f"select_{name}_flashinfer", partial(flashinfer.top_rows, *where, theirs), rows, entries)
    bench.exact(f"select_{name}_flashinfer", torch.equal(theirs.sort(1).values, out.sort(1).values))
    states = torch.zeros(1 << 20, dtype=torch.uint8, device=scores.device)
    call = flashinfer.library().radix_topk_page_table_transform
    some = (scores, theirs, table, slots, lengths, states, TOP_K, False, 0, PAGE, False, None, None, None)
    _record(bench, f"select_{name}_flashinfer_any_tie", partial(call, *some), rows, entries)
    _record(bench, f"select_{name}_torch", partial(torch.topk, scores, TOP_K, dim=1), rows, entries)


def _prompt(bench: Bench, rows: int, entries: int, *, library: bool) -> None:
    """Causal: query t sees t + entries - rows of them at most; into a wider list, as a chunk does."""
    from worker_svc.ops.top_entries import ref, triton

    scores = _scores(bench, rows, entries)
    lengths = _ints(bench, (torch.arange(rows) + 1) * entries // rows)
    base, lists = _ints(bench, torch.full((rows,), 640)), bench.empty(rows, 128 + TOP_K, dtype=torch.int32)
    out, name = lists[:, 128:], f"prompt_{rows}_of_{entries}"
    _record(bench, f"select_{name}", partial(triton.top_entries, scores, lengths, base, out), rows, entries // 2)
    if not bench.warming:
        truth = torch.empty(rows, TOP_K, dtype=torch.int32)
        ref.top_entries(scores.cpu(), lengths.cpu(), base.cpu(), truth)
        bench.exact(f"select_{name}", torch.equal(truth, out.cpu()))
    if not library:
        return
    from worker_svc.ops.top_entries import flashinfer

    theirs = bench.empty(rows, 128 + TOP_K, dtype=torch.int32)[:, 128:]
    call = partial(flashinfer.top_entries, scores, lengths, base, theirs)
    _record(bench, f"select_{name}_flashinfer", call, rows, entries // 2)
    bench.exact(f"select_{name}_flashinfer", torch.equal(theirs.sort(1).values, out.sort(1).values))
    _record(bench, f"select_{name}_torch", partial(torch.topk, scores, TOP_K, dim=1), rows, entries)


def _ints(bench: Bench, values: Tensor) -> Tensor:
    return values.int().to(bench.device)


def _record(bench: Bench, name: str, call: Callable[[], object], rows: int, entries: int) -> None:
    bench.record(name, bench.time([call] * 10), rows * (entries + TOP_K) * 4)
