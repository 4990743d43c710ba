"""The serving model sitting v4-nano's exams: logits of trunk and draft layer over whole documents, and ablations.

An ablation takes something away from a model that was trained with it: compressed entries, or the indexer's choice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshkit.types import PAGE_TOKENS
from tools.nano.exam import Marks, Paper, mark
from worker_svc.checkpoint.loader import load_checkpoint
from worker_svc.checkpoint.quant_choice import Numerics
from worker_svc.kv.layout import KvLayout
from worker_svc.kv.pools import KvPools, LayerPools
from worker_svc.model.norm import RMSNorm
from worker_svc.model.step import ForwardInputs, Row, plan_step
from worker_svc.model.weights import ModelBuilder
from worker_svc.solo import pages_for

CHUNK = 1024


class Student:
    """One model over pools for one sequence of up to `max_tokens`."""

    def __init__(self, folder: Path, *, numerics: Numerics | None = None, max_tokens: int = 2048) -> None:
        checkpoint = load_checkpoint(folder)
        layout = KvLayout(config=checkpoint.config, numerics=numerics or Numerics(), max_verify=1)
        self.pools = KvPools(layout, slots=1, pages=-(-max_tokens // PAGE_TOKENS), tails=0)
        builder = ModelBuilder(checkpoint, layout, max_context=max_tokens, deterministic=False)
        self.model = builder.transformer(self.pools)
        draft = builder.draft_layer(self.model)
        assert draft is not None, "the model has no draft layer"
        self.draft = draft
        self._streams: list[Tensor] = []
        head = self.model.hyper_head

        def listen(x: Tensor, norm: RMSNorm) -> Tensor:
            self._streams.append(x.clone())
            return head(x, norm)

        self.model.hyper_head = listen  # type: ignore[assignment]

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """[S] -> [S, V], in chunks."""
        self._streams.clear()
        pages, parts = pages_for(len(ids)), []
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            row = Row(slot=0, start=start, length=len(part), pages=pages, num_samples=len(part))
            parts.append(self.model.forward(ForwardInputs(part, (row,))))
        return torch.cat(parts)

    @torch.inference_mode()
    def draft_logits(self, ids: Tensor) -> Tensor:
        """[S - 1, V] of the sequence that `logits` saw last: at p, for the token p + 2."""
        streams = torch.cat(self._streams)[:-1]
        pools = LayerPools(self.pools.layout, 0, slots=1, pages=0, tails=0)
        row = Row(slot=0, start=0, length=len(streams), pages=pages_for(len(ids)), num_samples=1)
        step = plan_step(ForwardInputs(ids[1:], (row,)), self.pools, self.model.ropes, deterministic=False)
        return self.draft.forward(streams, step, pools)[0]

    def marks(self, paper: Paper, *, drafts: bool = False) -> Marks:
        """Sit one paper."""
        total = Marks()
        for document in paper.documents:
            ids = torch.from_numpy(document.ids).long()
            choices = self.logits(ids).argmax(-1)
            guesses = self.draft_logits(ids).argmax(-1) if drafts else None
            total = total.plus(mark(document, choices, guesses))
        return total


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is taken away, and how."""

    name: str
    apply: Callable[[Student], None]


def _without(ratio: int) -> Callable[[Student], None]:
    def apply(student: Student) -> None:
        for block, pools in zip(student.model.blocks, student.model.pools.layers):
            if pools.ratio == ratio:
                block.attn._entries = lambda *_: (None, None)  # type: ignore[method-assign]

    return apply


def _random_choice(student: Student) -> None:
    draw = torch.Generator().manual_seed(0)
    for block in student.model.blocks:
        if (indexer := block.attn.indexer) is not None:
            count = indexer.top_k

            def select(q: Tensor, w: Tensor, store: object, rows: Tensor, visible: Tensor, k: int = count) -> Tensor:
                scores = torch.rand(len(visible), len(rows), generator=draw)
                scores[torch.arange(len(rows)) >= visible.unsqueeze(1)] = -1
                chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k).indices, True)
                return chosen & (scores >= 0)

            indexer.select = select  # type: ignore[method-assign, assignment]


def _window_only(student: Student) -> None:
    _without(4)(student)
    _without(128)(student)


ABLATIONS = (
    Ablation("no_c4", _without(4)),
    Ablation("random_indexer", _random_choice),
    Ablation("no_c128", _without(128)),
    Ablation("window_only", _window_only),
)
