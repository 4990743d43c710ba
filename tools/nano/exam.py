"""The questions v4-nano is judged by, and how an answer is judged: word for word.

Every answer here follows from its prompt alone. Greedy text equals the expected one exactly if each of its tokens is
the model's first choice after the ones before it, so one pass over prompt and answer marks it without generating.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gateway.text.tokenizer import Tokenizer
from tools.nano import lookups, structured, sums, talk
from tools.nano.batch import BLOCK, Batch, PackedRows, empty_rows, place
from tools.nano.corpus import Sources
from tools.nano.document import Document, TokenizedDocument, tokenize
from tools.nano.model import NanoModel, Switches

EXAM_SEED = 99
Maker = Callable[[random.Random], Document]


def _thinking_sum(rng: random.Random) -> Document:
    return Document(kind="", exchanges=[sums.plus(rng)], thinking=True, effort=talk.effort(rng))


def _small_talk(rng: random.Random) -> Document:
    return talk.small_talk(rng)


def _sums(rng: random.Random) -> Document:
    return Document(kind="", exchanges=[sums.plus(rng) for _ in range(6)])


def _small_tasks(rng: random.Random) -> Document:
    return Document(kind="", exchanges=[rng.choice(sums.SMALL)(rng) for _ in range(6)])


def _plain(document: Document) -> Document:
    return replace(document, thinking=False)


QUESTIONS: dict[str, Maker] = {
    "small_talk": _small_talk,
    "sums": _sums,
    "sums_thinking": _thinking_sum,
    "small_tasks": _small_tasks,
    "json": structured.extract,
    "tools": structured.tool_call,
    "unseen_tools": structured.unseen_tool,
    "pairs_8": lambda rng: lookups.pairs(rng, lookups.CODES, 8, 4),
    "pairs_32": lambda rng: lookups.pairs(rng, lookups.CODES, 32, 4),
    "pairs_90": lambda rng: lookups.pairs(rng, lookups.CODES, 90, 4),
    "pairs_other": lambda rng: lookups.pairs(rng, rng.choice(lookups.STYLES), 16, 4),
    "json_pairs": lambda rng: lookups.json_pairs(rng, 0.3),
    "recall_near": lambda rng: _plain(lookups.recall(rng, 1, 4)),
    "recall_far": lambda rng: _plain(lookups.recall(rng, 5, 4)),
    "recall_blind": lambda rng: lookups.recall(rng, 3, 4, blind=True),
}
"""Kinds of questions. `recall_blind` hides the C4 entries where the model is told to (training rows, ablations)."""


@dataclass(frozen=True, slots=True)
class Paper:
    """The documents of one kind."""

    kind: str
    documents: tuple[TokenizedDocument, ...]


def papers(tokenizer: Tokenizer, each: int, sources: Sources | None = None, seed: int = EXAM_SEED) -> list[Paper]:
    """`each` documents of every kind, and texts to repeat when there are sources of words."""
    found = []
    makers = dict(QUESTIONS)
    if sources is not None:
        words = sources.words
        makers["repeat_short"] = lambda rng: _plain(lookups.repeat(rng, 0.0, words))
        makers["repeat_long"] = lambda rng: _plain(lookups.repeat(rng, 0.5, words))
    for kind, make in makers.items():
        rng = random.Random(f"{seed}/{kind}")
        found.append(Paper(kind, tuple(tokenize(make(rng), tokenizer) for _ in range(each))))
    return found


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one kind: answers, those exact, and the draft layer's tokens tried and right inside exact answers."""

    answers: int = 0
    exact: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: Marks) -> Marks:
        return Marks(
            self.answers + other.answers,
            self.exact + other.exact,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    @property
    def rate(self) -> float:
        return self.exact / max(1, self.answers)

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)


def mark(document: TokenizedDocument, choices: Tensor, drafts: Tensor | None) -> Marks:
    """choices [S]: the trunk's first choice after each token; drafts [S]: the draft layer's for the one after."""
    ids = torch.from_numpy(document.ids).to(choices)
    total = Marks()
    for begin, end in document.answers:
        right = bool((choices[begin - 1 : end - 1] == ids[begin:end]).all())
        drafted = accepted = 0
        if right and drafts is not None:
            drafted = end - begin - 1
            accepted = int((drafts[begin - 1 : end - 2] == ids[begin + 1 : end]).sum())
        total = total.plus(Marks(1, int(right), drafted, accepted))
    return total


@dataclass(frozen=True, slots=True)
class Sitting:
    """All papers packed into rows for the training model, with where each document went."""

    batches: tuple[PackedRows, ...]
    places: tuple[tuple[str, TokenizedDocument, int, int, int], ...]

    @staticmethod
    def prepare(papers: Sequence[Paper], rows: int, length: int) -> Sitting:
        batches: list[PackedRows] = []
        places: list[tuple[str, TokenizedDocument, int, int, int]] = []
        at = rows * length
        for paper in papers:
            for document in paper.documents:
                size = -(-len(document.ids) // BLOCK) * BLOCK
                if size > length:
                    continue
                if at % length + size > length:
                    at = -(-at // length) * length
                if at >= rows * length:
                    batches.append(empty_rows(rows, length))
                    at = 0
                row, block = at // length, at % length // BLOCK
                place(batches[-1], row, block, block, document)
                places.append((paper.kind, document, len(batches) - 1, row, block))
                at += size
        return Sitting(tuple(batches), tuple(places))


@torch.no_grad()
def sit(
    model: NanoModel, sitting: Sitting, switches: Switches, *, hide_c4: bool = False, hide_c128: bool = False
) -> dict[str, Marks]:
    """Marks by kind. `blind` documents are answered without C4 entries, as they were trained."""
    device = model.embed.device
    marks: dict[str, Marks] = {}
    for number, rows in enumerate(sitting.batches):
        batch = Batch.of(rows, device)
        if hide_c4:
            batch = replace(batch, hide_c4=torch.ones_like(batch.hide_c4))
        if hide_c128:
            batch = replace(batch, hide_c128=torch.ones_like(batch.hide_c128))
        choices, drafts = (logits.argmax(-1).cpu() for logits in model.logits(batch, switches))
        for kind, document, of, row, block in sitting.places:
            if of == number:
                span = slice(block * BLOCK, block * BLOCK + len(document.ids))
                marks[kind] = marks.get(kind, Marks()).plus(mark(document, choices[row, span], drafts[row, span]))
    return marks
