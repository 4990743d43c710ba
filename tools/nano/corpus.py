"""The mixture of v4-nano's training text: which kinds of documents, how often, from which sources.

A `Corpus` draws documents from a seeded generator. The natural texts are optional: without them, as in tests, small
stand-ins of our own words keep every kind of document possible.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tools.nano import lookups, structured, sums, talk
from tools.nano.document import Document, Exchange
from tools.nano.words import ANIMALS, COLOURS, FOODS, NAMES, PLACES, THINGS

_PROSE_CHARACTERS = (300, 4000)
_COPYING, _SHORT_SHARE = ("pairs", "json_pairs", "repeat", "recall", "unseen_tools"), 0.35
_FALLBACK = ("The wind blew over the hills all night, and in the morning the village was white with snow.",)


@dataclass(frozen=True, slots=True)
class Sources:
    """Natural text: prose of each book, short sentences, glosses and their words."""

    prose: tuple[str, ...]
    sentences: tuple[str, ...]
    glosses: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    @staticmethod
    def load(folder: Path | None) -> Sources:
        """Read what `natural_text` wrote, without the held-out texts."""
        own = tuple(ANIMALS + THINGS + PLACES + FOODS + COLOURS)
        if folder is None or not (folder / "web.txt").exists():
            return Sources(_FALLBACK * 20, _FALLBACK, tuple((word, f"a kind of {word}") for word in own), own)
        prose = tuple((folder / name).read_text() for name in ("austen.txt", "web.txt"))
        glosses = []
        for line in (folder / "wordnet.txt").read_text().splitlines():
            word, _, gloss = line.split("\t")
            glosses.append((word, gloss))
        found = re.findall(r"(?<=[.?!] )[A-Z][^.?!\n]{15,120}[.?!]", "\n".join(prose))
        words = {word for word, _ in glosses if word.islower() and 2 < len(word) < 11}
        return Sources(prose, tuple(found), tuple(glosses), own * 8 + tuple(sorted(words)))


class Corpus:
    """Draws documents. `level` (0..1) is how far training has come; it lengthens lists and texts."""

    def __init__(self, sources: Sources, seed: int) -> None:
        self._sources, self._rng = sources, random.Random(seed)

    def draw(self, level: float) -> Document:
        """One document of the mixture."""
        names, weights = zip(*MIXTURE)
        return self.draw_kind(self._rng.choices(names, weights)[0], level)

    def draw_kind(self, kind: str, level: float = 1.0) -> Document:
        """One document of a kind of `MIXTURE`."""
        rng, sources = self._rng, self._sources
        makers: dict[str, Callable[[], Document]] = {
            "pairs": lambda: lookups.any_pairs(rng, level),
            "json_pairs": lambda: lookups.json_pairs(rng, level),
            "repeat": lambda: lookups.repeat(rng, level, sources.words),
            "recall": lambda: lookups.any_recall(rng, level),
            "blind_recall": lambda: lookups.blind_recall(rng, level),
            "sums": lambda: sums.sums(rng),
            "small_tasks": lambda: sums.small_tasks(rng),
            "json": lambda: structured.extract(rng),
            "tools": lambda: structured.tool_call(rng),
            "unseen_tools": lambda: structured.unseen_tool(rng),
            "story": lambda: self._single(talk.request(rng)),
            "small_talk": lambda: talk.small_talk(rng),
            "define": lambda: self._several("define", lambda: talk.define(rng, sources.glosses)),
            "unknown": lambda: self._single(talk.unknown(rng, sources.sentences)),
            "rhyme": lambda: self._single(talk.rhyme(rng)),
            "conversation": self._conversation,
            "prose": self._prose,
        }
        document = makers[kind]()
        if document.thinking and document.effort == "low":
            document = replace(document, effort=talk.effort(rng))
        short = kind in _COPYING and rng.random() < _SHORT_SHARE
        return replace(document, kind=kind, short=short)

    def _single(self, exchange: Exchange) -> Document:
        return Document(kind="", exchanges=[exchange], thinking=self._rng.random() < 0.3)

    def _several(self, kind: str, make: Callable[[], Exchange]) -> Document:
        return Document(kind=kind, exchanges=[make() for _ in range(self._rng.randint(2, 6))])

    def _conversation(self) -> Document:
        """Unlike things one after the other, as people ask them."""
        rng = self._rng
        pool: list[Callable[[], list[Exchange]]] = [
            lambda: [talk.fixed(rng)],
            lambda: [talk.request(rng)],
            lambda: [sums.plus(rng)],
            lambda: [rng.choice(sums.SMALL)(rng)],
            lambda: list(lookups.recall(rng, 1, 2).exchanges),
            lambda: list(lookups.any_pairs(rng, 0.1).exchanges[:3]),
            lambda: list(structured.extract(rng).exchanges) if rng.random() < 0.3 else [talk.rhyme(rng)],
            lambda: list(lookups.repeat(rng, 0.0, self._sources.words).exchanges),
            lambda: [talk.unknown(rng, self._sources.sentences)],
        ]
        exchanges = [exchange for _ in range(rng.randint(2, 6)) for exchange in rng.choice(pool)()]
        exchanges = [one for one in exchanges if not str(one.answer).startswith(("{", "["))] or [talk.fixed(rng)]
        if rng.random() < 0.5:
            name = rng.choice(NAMES)
            exchanges = [talk.introduction(rng, name), *exchanges, talk.name_again(rng, name)]
        return Document(kind="", exchanges=exchanges, thinking=rng.random() < 0.25)

    def _prose(self) -> Document:
        rng = self._rng
        text = rng.choice(self._sources.prose)
        begin = text.find("\n\n", rng.randrange(max(1, len(text) - 5000))) + 1
        return Document(kind="", prose=text[begin : begin + rng.randint(*_PROSE_CHARACTERS)].strip() or text[:300])


MIXTURE: tuple[tuple[str, float], ...] = (
    ("pairs", 20),
    ("json_pairs", 3),
    ("repeat", 9),
    ("recall", 11),
    ("blind_recall", 7),
    ("sums", 14),
    ("small_tasks", 5),
    ("json", 7),
    ("tools", 8),
    ("unseen_tools", 5),
    ("story", 6),
    ("small_talk", 6),
    ("define", 2),
    ("unknown", 2),
    ("rhyme", 1),
    ("conversation", 7),
    ("prose", 3),
)
"""Documents of each kind, in parts. Kinds differ in length: pairs and stories with questions have most tokens."""
