"""Whether an operation gives a row the same bits alone, in any company, run after run, and in decode as in a chunk.

A `Case` computes any of its rows in one call; `examine` runs all of them together, some, chosen ones alone, all of
them as chunks, and compares bytes. Memory that is handed out next holds NaN, so that what a call leaves unwritten
shows. What the cases are is in `invariance_cases`; nothing here knows of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
"""Each with the rows asked for along its first dimension, in the order asked for."""
Call = Callable[[], Outputs]
Maker = Callable[[Tensor], Call]
"""int64 [n] numbers of rows -> a call that computes them and may be repeated: its inputs stay as they are."""

WATCHED = 3
REPEATS = 3
POISON_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`rows` rows of inputs of one operation, at most `most` to a call; `chunk`: the same as prefill computes them."""

    op: str
    name: str
    rows: int
    make: Maker
    chunk: Maker | None = None
    most: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of one case: bits equal run to run, at all batch sizes, and in decode and chunk (None: there is one form only).

    `difference` is the largest of an element, over the largest value; `wrong` says where it was seen.
    """

    op: str
    name: str
    repeats: bool
    invariant: bool
    chunk: bool | None
    difference: float = 0.0
    wrong: str = ""

    @property
    def same(self) -> bool:
        """Nothing differed anywhere."""
        return self.repeats and self.invariant and self.chunk is not False


class _Difference:
    """The largest difference met, and where."""

    def __init__(self) -> None:
        self.most, self.where = 0.0, ""

    def same(self, found: Outputs, wanted: Outputs, where: str) -> bool:
        """Whether all bytes are equal; remembers by how much they are not."""
        same = True
        for a, b in zip(found, wanted, strict=True):
            if torch.equal(_bytes(a), _bytes(b)):
                continue
            same = False
            x, y = a.double(), b.double()
            apart = float((x - y).abs().nan_to_num(torch.inf).max() / y.abs().max().clamp(min=1e-30))
            if not self.where or apart > self.most:
                self.most, self.where = apart, where
        return same


def examine(case: Case, device: torch.device, sizes: Iterable[int], seed: int = 0) -> Finding:
    """Run the case at these batch sizes, as far as it has rows for them.

    What all rows come to together is what everything else is held against, each of its rows: fewer rows, chosen ones
    alone, and chunks.
    """
    draw = torch.Generator().manual_seed(seed)
    watched = torch.randperm(case.rows, generator=draw)[: min(WATCHED, case.most)]
    seen, largest = _Difference(), min(case.rows, case.most)
    everybody = _company(watched, case.rows, largest, draw)
    together = _run(case.make, everybody, device)
    place = torch.full((case.rows,), -1)
    place[everybody] = torch.arange(largest)

    def as_together(make: Maker, rows: Tensor, where: str) -> bool:
        met = place[rows] >= 0
        numbers = place[rows][met].to(device)
        found = tuple(output[met.to(device)] for output in _run(make, rows, device))
        return seen.same(found, tuple(output[numbers] for output in together), where)

    repeats = all(
        seen.same(_run(case.make, rows, device), first, f"run again with {len(rows)} rows")
        for rows, first in ((watched[:1], _run(case.make, watched[:1], device)), (everybody, together))
        for _ in range(REPEATS - 1)
    )
    invariant = all(
        as_together(case.make, watched[i : i + 1], f"among {largest} rows") for i in range(len(watched))
    ) and all(
        as_together(case.make, _company(watched, case.rows, size, draw), f"among {size} rows")
        for size in sorted({size for size in sizes if 1 < size < largest})
    )
    chunk = None
    if case.chunk is not None:
        chunk = all(as_together(case.chunk, rows, f"in a chunk of {len(rows)}") for rows in (watched, everybody))
    return Finding(
        op=case.op,
        name=case.name,
        repeats=repeats,
        invariant=invariant,
        chunk=chunk,
        difference=seen.most,
        wrong=seen.where,
    )


def _company(watched: Tensor, rows: int, size: int, draw: torch.Generator) -> Tensor:
    """`size` distinct rows in any order, as many watched ones among them as fit."""
    others = torch.randperm(rows, generator=draw)
    others = others[~torch.isin(others, watched)]
    chosen = torch.cat([watched[torch.randperm(len(watched), generator=draw)][:size], others])[:size]
    return chosen[torch.randperm(len(chosen), generator=draw)]


def _run(make: Maker, rows: Tensor, device: torch.device) -> Outputs:
    call = make(rows.to(device))
    poison(device)
    return tuple(output.clone(memory_format=torch.contiguous_format) for output in call())


def poison(device: torch.device) -> None:
    """What `torch.empty` returns next on a GPU holds bytes of NaN."""
    if device.type == "cuda":
        for size in (POISON_BYTES, POISON_BYTES >> 6, POISON_BYTES >> 12):
            torch.full((size,), 255, dtype=torch.uint8, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
