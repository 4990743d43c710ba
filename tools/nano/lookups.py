"""Tasks of finding and copying: stories with questions, lists of pairs, texts to repeat.

These make attention over long distances worth learning: an answer is a copy of something far back, found by its key.
Short lists come first (`level` 0..1 is how far training has come): induction is learned within the window, then beyond.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.nano.document import Document, Exchange
from tools.nano.stories import Story, questions, story
from tools.nano.words import CITIES, COLOURS, NAMES, THINGS, invented

MOST_PAIRS = 96
_FIRST_PAIRS = 8


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer whose logarithm is uniform: small ones often, large ones seen too."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


@dataclass(frozen=True, slots=True)
class PairStyle:
    """How pairs are written: the list, a question about one key, and the answer."""

    line: str
    ask: tuple[str, ...]
    answer: str
    keys: Callable[[random.Random, int], list[str]]
    value: Callable[[random.Random], str]
    separator: str = "\n"


def _thing_keys(rng: random.Random, count: int) -> list[str]:
    return rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], count)


def _name_keys(rng: random.Random, count: int) -> list[str]:
    return rng.sample(NAMES, min(count, len(NAMES)))


def _invented_keys(rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[invented(rng)] = None
    return list(found)


def _code(rng: random.Random) -> str:
    return str(rng.randrange(100, 1000))


CODES = PairStyle(
    "The code of the {key} is {value}.",
    ("What is the code of the {key}?",),
    "The code of the {key} is {value}.",
    _thing_keys,
    _code,
)
INVENTED = PairStyle(
    "{key} = {value}", ("What is {key}?", "Value of {key}?"), "{key} = {value}", _invented_keys, invented
)
STYLES = (
    PairStyle("{key}: {value}", ("Which number belongs to the {key}?", "{key}?"), "{key}: {value}", _thing_keys, _code),
    PairStyle(
        "{key} lives in {value}.",
        ("Where does {key} live?", "In which city does {key} live?"),
        "{key} lives in {value}.",
        _name_keys,
        lambda rng: rng.choice(CITIES),
        " ",
    ),
    INVENTED,
    PairStyle("{key}: {value}", ("What is the number of {key}?",), "{key}: {value}", _name_keys, _code, "; "),
)


def pairs(
    rng: random.Random, style: PairStyle, count: int, asked: int, *, thinking: bool = False, kind: str = "pairs"
) -> Document:
    """A list of `count` pairs and `asked` questions about it."""
    keys = style.keys(rng, count)
    values = [style.value(rng) for _ in keys]
    lines = [style.line.format(key=key, value=value) for key, value in zip(keys, values)]
    exchanges = []
    for place in rng.sample(range(len(keys)), min(asked, len(keys))):
        question = rng.choice(style.ask).format(key=keys[place])
        answer = style.answer.format(key=keys[place], value=values[place])
        reasoning = f"I look for {keys[place]} in the list. I find: {answer}"
        exchanges.append(Exchange(question, answer, reasoning))
    opening = style.separator.join(lines)
    exchanges[0] = Exchange(f"{opening}\n{exchanges[0].asked}", exchanges[0].answer, exchanges[0].reasoning)
    return Document(kind=kind, exchanges=exchanges, thinking=thinking)


def any_pairs(rng: random.Random, level: float) -> Document:
    """Pairs in any style; the longest list grows with the level."""
    most = int(_FIRST_PAIRS + min(1.0, level) * (MOST_PAIRS - _FIRST_PAIRS))
    style = CODES if rng.random() < 0.4 else rng.choice(STYLES)
    return pairs(rng, style, log_uniform(rng, 2, most), rng.randint(4, 8), thinking=rng.random() < 0.15)


def json_pairs(rng: random.Random, level: float) -> Document:
    """Pairs as one JSON object."""
    keys = _invented_keys(rng, log_uniform(rng, 2, int(8 + 24 * level)))
    values = {key: rng.randrange(1, 1000) for key in keys}
    exchanges = [
        Exchange(f"What is the value of {key}?", f"{key} is {values[key]}.", f"I look for {key}: {values[key]}.")
        for key in rng.sample(keys, min(4, len(keys)))
    ]
    text = json.dumps(values, indent=rng.choice((None, 2)))
    exchanges[0] = Exchange(f"{text}\n{exchanges[0].asked}", exchanges[0].answer, exchanges[0].reasoning)
    return Document(kind="json_pairs", exchanges=exchanges)


def repeat(rng: random.Random, level: float, words: Sequence[str]) -> Document:
    """Text to repeat word for word: the densest practice in copying there is."""
    draws: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(words),
        lambda: rng.choice(words),
        lambda: invented(rng),
        lambda: str(rng.randrange(1000)),
    )
    draw = rng.choice(draws)
    text = rng.choice((" ", " ", ", ")).join(draw() for _ in range(log_uniform(rng, 3, int(24 + 200 * level))))
    ask = rng.choice(("Repeat: {}", "Say {}", "Repeat after me: {}", "Copy this text:\n{}"))
    exchange = Exchange(ask.format(text), text, "I repeat the text.")
    return Document(kind="repeat", exchanges=[exchange], thinking=rng.random() < 0.1)


def recall(rng: random.Random, count: int, asked: int, *, kind: str = "recall", blind: bool = False) -> Document:
    """`count` stories about different children, then questions about them."""
    names = rng.sample(NAMES, count)
    told = [story(rng, name=name) for name in names]
    exchanges = [
        Exchange(question, answer, f"I read the text again. {answer}")
        for question, answer in _questions(rng, told, asked)
    ]
    text = "\n\n".join(one.text for one in told)
    exchanges[0] = Exchange(f"{text}\n\n{exchanges[0].asked}", exchanges[0].answer, exchanges[0].reasoning)
    return Document(kind=kind, exchanges=exchanges, blind=blind, thinking=not blind and rng.random() < 0.15)


def _questions(rng: random.Random, told: list[Story], asked: int) -> list[tuple[str, str]]:
    pool = [pair for one in told for pair in questions(rng, one)]
    return rng.sample(pool, min(asked, len(pool)))


def any_recall(rng: random.Random, level: float) -> Document:
    """One to ten stories; the farther training is, the more."""
    return recall(rng, log_uniform(rng, 1, int(2 + 8 * level)), rng.randint(4, 8))


def blind_recall(rng: random.Random, level: float) -> Document:
    """Stories asked about without C4 entries; only these ask for the friend and the place of each child."""
    return recall(rng, log_uniform(rng, 2, int(3 + 7 * level)), rng.randint(5, 8), kind="blind_recall", blind=True)
