"""How far rounding alone takes two right forwards apart: plain torch on the CPU against itself with one thing changed.

The GPU forward on CPU tensors (plain torch in every kernel's place, BF16 where the kernels round) reads a text, and so
does the same with a change that no user would call an error. Logits of every token are compared as the sections check
and check_flash of `gpu_forward` compare kernels with them: free, and with the first one's choices of experts and
entries. A kernel cannot agree better than a change that it makes too.
"""
# mypy: disallow-untyped-calls=False

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks._gpu_agreement import CpuModel, GpuForward, compare
from benchmarks._gpu_checks import HOST, Text, flash_text, nano_text
from worker_svc.ops.bf16_gemm import ref as bf16_products
from worker_svc.ops.fp4_experts import ref as expert_products
from worker_svc.ops.fp8_gemm import ref as fp8_products
from worker_svc.ops.matmul import matmul
from worker_svc.ops.sparse_attention import rows_ref

TITLE = "how far BF16, FP8 sums and their order alone take two right forwards apart (CPU, plain torch)"
PIECES: Final = 8
QUERIES: Final = 32
TENSOR_CORE: Final = 1e-4
"""Relative error of a sum in the FP8 tensor cores' registers: an assumption, 13 bits or so; not measured."""


@contextlib.contextmanager
def other_order() -> Iterator[None]:
    """Products as sums over pieces of K: FP32's last bits differ."""

    def pieces(a: Tensor, b: Tensor, *, deterministic: bool) -> Tensor:
        step = -(-a.shape[1] // PIECES)
        cuts = range(0, a.shape[1], step)
        return torch.stack(
            [matmul(a[:, k : k + step], b[k : k + step], deterministic=deterministic) for k in cuts]
        ).sum(0)

    with contextlib.ExitStack() as stack:
        for module in (fp8_products, bf16_products, expert_products):
            stack.enter_context(patch.object(module, "matmul", pieces))
        yield


@contextlib.contextmanager
def bf16_weights() -> Iterator[None]:
    """Attention weights of chunks in BF16, as the library's kernel has them."""

    def rounded(q: Tensor, keys: Tensor, index: Tensor, sink: Tensor, scale: float) -> Tensor:
        parts = range(0, len(q), QUERIES)
        some = (slice(first, first + QUERIES) for first in parts)
        return torch.cat([rows_ref.rounded_chunk_attention(q[s], keys, index[s], sink, scale) for s in some])

    with patch.object(rows_ref, "chunk_attention", rounded):
        yield


@contextlib.contextmanager
def tensor_core_sums() -> Iterator[None]:
    """The experts' products with the error of an FP8 tensor core before they are rounded to BF16."""
    draw = torch.Generator().manual_seed(0)

    def noisy(a: Tensor, b: Tensor, *, deterministic: bool) -> Tensor:
        exact = matmul(a, b, deterministic=deterministic)
        size = exact.square().mean(1, keepdim=True).sqrt()
        return exact + torch.randn(exact.shape, generator=draw) * size * TENSOR_CORE

    with patch.object(expert_products, "matmul", noisy):
        yield


CHANGES: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    "order of FP32 sums": other_order,
    "FP8 tensor core sums": tensor_core_sums,
    "attention weights BF16": bf16_weights,
}


class Changed(GpuForward):
    """The same forward with one thing changed."""

    def __init__(self, text: Text, weights: Any, change: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(weights, text.config, HOST, graphs=False)
        self._change = change

    def forward(self, ids: list[int], start: int) -> Tensor:
        """See `Side`."""
        with self._change():
            return super().forward(ids, start)


@dataclass(slots=True)
class Rows:
    """What `compare` reports, as a table."""

    metrics: dict[str, float] = field(default_factory=dict)

    def row(self, section: str, **values: Any) -> None:
        """One comparison: a line."""
        if section == "check":
            shown = "cosine {cosine_mean:.5f}, of the worst token {cosine_least:.3f}, greedy {agreement:.4f}".format(
                **values
            )
            print(f"{values['model']:32} {values['kind']:7} {shown} of {values['clear']}", flush=True)


def run(args: list[str]) -> dict[str, float | int | str]:
    """A line for each change, free and forced, chunks and decode; then the BF16 roundings themselves."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rounding", description=TITLE)
    parser.add_argument("--model", choices=("nano", "flash4"), default="nano", help="flash4: 4 layers, minutes")
    parser.add_argument("--tokens", type=int, default=0, help="0: 900 of nano's text, 100 of flash4's")
    parser.add_argument(
        "--singles", type=int, default=0, help="of them read one by one; 0: 30 of nano's, 6 of flash4's"
    )
    parser.add_argument("--out", type=Path, help="file for the numbers")
    options = parser.parse_args(args)
    nano = options.model == "nano"
    tokens = options.tokens or (900 if nano else 100)
    text, rows = nano_text(tokens) if nano else flash_text(HOST, tokens=tokens), Rows()
    weights, singles = text.weights(HOST), options.singles or (30 if nano else 6)

    def against(side: GpuForward | CpuModel, name: str, change: Callable[[], AbstractContextManager[None]]) -> None:
        free, forced = (Changed(text, weights, change) for _ in range(2))
        compare(side, {name: free, f"{name} forced": forced}, text.ids, rows, singles=singles)

    for name, change in CHANGES.items():
        against(GpuForward(weights, text.config, HOST, graphs=False), name, change)
    against(text.cpu, "BF16 against exact", contextlib.nullcontext)
    found = {name.replace(" ", "_"): value for name, value in rows.metrics.items()}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return {"model": options.model, "tokens": tokens, **found}
