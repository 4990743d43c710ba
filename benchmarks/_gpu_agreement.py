"""One text through a reference on the CPU and through the GPU forward: logits of every token, in chunks and one by one.

Two references: the CPU model, exact between its quantisations, and the GPU forward itself on CPU tensors (plain torch
in every kernel's place), which rounds to BF16 where the kernels do. Free, both sides make their own choices of experts
and entries, and the GPU's decode runs as replayed graphs. Forced, the GPU reads what the reference chose (see
`_gpu_choices`), so that only arithmetic is compared.
"""
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks._gpu_choices import Choices, imposed, recorded, recorded_rows
from benchmarks._gpu_model import NUMERICS
from worker_svc.gpu.graphs import DecodeGraphs
from worker_svc.gpu.pools import GpuPools
from worker_svc.gpu.slots import DeviceSlots
from worker_svc.gpu.step import ChunkRow, chunk_step
from worker_svc.gpu.transformer import Transformer
from worker_svc.kv.layout import KvLayout
from worker_svc.model.step import ForwardInputs, Row
from worker_svc.ops.slot_step import Field

CLEAR = 0.05
"""Greedy choices count where the best logit leads by more than this."""
PAGES = [3, 1, 5, 0]


class Side(Protocol):
    """One of the two that are compared: a sequence in PAGES, fed part by part."""

    def forward(self, ids: list[int], start: int) -> Tensor:
        """FP32 logits [T, V] of a part whose first token stands at `start`."""

    def choosing(self, choices: Choices) -> AbstractContextManager[None]:
        """Forwards meanwhile leave their choices."""


class CpuModel:
    """The CPU model; exact between its quantisations."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, ids: list[int], start: int) -> Tensor:
        """See `Side`."""
        row = Row(slot=1, start=start, length=len(ids), pages=PAGES, num_samples=len(ids))
        logits: Tensor = self.model.forward(ForwardInputs(torch.tensor(ids), (row,)))
        return logits

    def choosing(self, choices: Choices) -> AbstractContextManager[None]:
        """See `Side`."""
        return recorded(self.model, choices)


class GpuForward:
    """The GPU forward on either device."""

    def __init__(self, weights: Any, config: Any, device: torch.device, *, graphs: bool) -> None:
        layout = KvLayout(config=config, numerics=NUMERICS, max_verify=1)
        self.pools = GpuPools(layout, slots=2, pages=8, tails=2, device=device)
        self.model = Transformer(weights, config, self.pools, max_context=2048, max_tokens=1024, overlap=graphs)
        self.slots = DeviceSlots(2, 8, device)
        self.slots.tables.pages[1, : len(PAGES)] = torch.tensor(PAGES, dtype=torch.int32, device=device)
        self.graphs = DecodeGraphs(self.model, self.pools, self.slots.tables, lambda *_: None, on=graphs)

    def forward(self, ids: list[int], start: int) -> Tensor:
        """See `Side`."""
        tables = self.slots.tables
        if len(ids) > 1:
            rows = (ChunkRow(slot=1, start=start, length=len(ids), pages=PAGES),)
            return self.model.forward(chunk_step(np.array(ids), rows, range(len(ids)), tables, self.pools))[0].cpu()
        bucket = self.graphs.bucket(2)
        bucket.rows.copy_(torch.tensor([1, -1], dtype=torch.int32))
        tables.fields[Field.LENGTH, 1], tables.fields[Field.NEXT, 1] = start, ids[0]
        self.graphs.forward(bucket)
        return bucket.logits[:1].cpu()

    def choosing(self, choices: Choices) -> AbstractContextManager[None]:
        """See `Side`."""
        return recorded_rows(self.model, choices, PAGES)


def compare(reference: Side, gpus: Mapping[str, GpuForward], ids: list[int], report: Any, *, singles: int = 30) -> None:
    """The last `singles` ids token by token, ten before them as a chunk, all others as another.

    `gpus` by the name of their metrics; one whose name ends in `forced` reads what the reference chose.
    """
    kept = {name: Choices() for name in gpus}
    choices, wanted = Choices(), list[Tensor]()
    found: dict[str, list[Tensor]] = {name: [] for name in gpus}
    last = len(ids) - singles
    cuts = (last - 10, *range(last, len(ids) + 1))
    for start, end in pairwise((0, *cuts)):
        part = ids[start:end]
        choices.forget()
        with torch.inference_mode(), reference.choosing(choices):
            wanted.append(reference.forward(part, start))
        for name, gpu in gpus.items():
            kept[name].take(choices)
            forced = imposed(gpu.model, kept[name], PAGES) if name.endswith("forced") else nullcontext()
            with torch.inference_mode(), forced:
                found[name].append(gpu.forward(part, start))
    for name, logits in found.items():
        for kind, a, b in (("chunk", logits[:2], wanted[:2]), ("decode", logits[2:], wanted[2:])):
            _report(torch.cat(a), torch.cat(b), name, kind, report)
        if name.endswith("forced"):
            report.row("check_choices", model=name, **kept[name].summary())
            report.metrics |= {f"{name}_{key}": round(value, 6) for key, value in kept[name].summary().items()}


def _report(got: Tensor, ref: Tensor, name: str, kind: str, report: Any) -> None:
    cosine, top = torch.cosine_similarity(got, ref), ref.topk(2).values
    lead, other = top[:, 0] - top[:, 1], got.argmax(1) != ref.argmax(1)
    clear = lead > CLEAR
    agree = 1 - other[clear].float().mean()
    report.row(
        "check",
        model=name,
        kind=kind,
        cosine_mean=float(cosine.mean()),
        cosine_least=float(cosine.min()),
        error=float((got - ref).norm() / ref.norm()),
        agreement=float(agree),
        widest_lead_lost=float(lead[other].max()) if bool(other.any()) else 0.0,
        tokens=len(got),
        clear=int(clear.sum()),
    )
    report.metrics[f"{name}_{kind}_cosine"] = round(float(cosine.mean()), 6)
    report.metrics[f"{name}_{kind}_agreement"] = round(float(agree), 4)
