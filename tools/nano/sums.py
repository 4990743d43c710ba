"""Arithmetic and other small exact tasks: sums, comparisons, sequences, facts."""

from __future__ import annotations

import random

from tools.nano.document import Document, Exchange
from tools.nano.stories import child
from tools.nano.words import CAPITALS, DAYS, OPPOSITES, THINGS


def plus(rng: random.Random, top: int = 99) -> Exchange:
    """Two numbers of up to two digits (or `top`), with the working as reasoning."""
    a, b = rng.randint(1, top), rng.randint(1, top)
    ask = rng.choice((f"What is {a} + {b}?", f"What is {a} + {b}?", f"{a} + {b} = ?", f"Add {a} and {b}."))
    return Exchange(ask, f"{a} + {b} = {a + b}.", _working(a, b))


def _working(a: int, b: int) -> str:
    """Column by column from the ones, the way it is done on paper."""
    steps, carry, place = [], 0, 1
    while place <= max(a, b):
        x, y = a // place % 10, b // place % 10
        total = x + y + carry
        steps.append(f"{x} + {y}{f' + {carry}' if carry else ''} = {total}")
        carry, place = total // 10, place * 10
    return f"{', '.join(steps)}. So it is {a + b}."


def minus(rng: random.Random) -> Exchange:
    """A difference that is not negative."""
    a, b = sorted((rng.randint(1, 99), rng.randint(1, 99)), reverse=True)
    tens = b // 10 * 10
    return Exchange(
        rng.choice((f"What is {a} - {b}?", f"{a} - {b} = ?", f"Take {b} away from {a}.")),
        f"{a} - {b} = {a - b}.",
        f"{a} - {tens} = {a - tens}, {a - tens} - {b - tens} = {a - b}. So it is {a - b}.",
    )


def times(rng: random.Random) -> Exchange:
    """A product from the table up to twelve."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    ask = rng.choice((f"What is {a} times {b}?", f"What is {a} * {b}?"))
    return Exchange(ask, f"{a} times {b} is {a * b}.", f"I know the table of {a}: {a} times {b} is {a * b}.")


def left_over(rng: random.Random) -> Exchange:
    """A difference told as a story."""
    who, thing = child(rng), rng.choice(THINGS)
    a, b = sorted((rng.randint(3, 99), rng.randint(1, 40)), reverse=True)
    asked = f"{who.name} has {a} {thing}s and gives away {b}. How many are left?"
    return Exchange(asked, f"{a} - {b} = {a - b}, so {who.name} has {a - b} {thing}s left.", f"I take {b} from {a}.")


def larger(rng: random.Random) -> Exchange:
    """The larger of two numbers."""
    a, b = rng.sample(range(1, 1000), 2)
    return Exchange(
        f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.", f"I compare {a} and {b}."
    )


def count_up(rng: random.Random) -> Exchange:
    """Counting between two numbers."""
    first = rng.choice((1, 1, rng.randint(1, 60)))
    last = first + rng.randint(2, 12)
    asked = f"Count to {last}." if first == 1 else f"Count from {first} to {last}."
    return Exchange(asked, ", ".join(str(n) for n in range(first, last + 1)) + ".", f"I start at {first}.")


def fact(rng: random.Random) -> Exchange:
    """Capitals, opposites, days of the week."""
    kind = rng.randrange(3)
    if kind == 0:
        country, city = rng.choice(list(CAPITALS.items()))
        return Exchange(
            f"What is the capital of {country}?", f"The capital of {country} is {city}.", "I know this city."
        )
    if kind == 1:
        one, other = rng.choice(list(OPPOSITES.items()))
        one, other = rng.choice(((one, other), (other, one)))
        return Exchange(
            rng.choice((f"What is the opposite of {one}?", f"What is the opposite of '{one}'?")),
            f"The opposite of {one} is {other}.",
            "I think of the other end.",
        )
    day = rng.randrange(7)
    after = rng.random() < 0.5
    asked = f"Which day comes {'after' if after else 'before'} {DAYS[day]}?"
    other = DAYS[(day + (1 if after else -1)) % 7]
    return Exchange(asked, f"{other} comes {'after' if after else 'before'} {DAYS[day]}.", "I think of the week.")


SMALL = (minus, times, left_over, larger, count_up, fact)


def sums(rng: random.Random) -> Document:
    """A sheet of additions, mostly of two digits, sometimes three with the working shown."""
    thinking = rng.random() < 0.3
    top = 999 if thinking and rng.random() < 0.3 else 99
    return Document(kind="sums", exchanges=[plus(rng, top) for _ in range(_few(rng, thinking))], thinking=thinking)


def small_tasks(rng: random.Random) -> Document:
    """A sheet of everything else."""
    thinking = rng.random() < 0.2
    tasks = [rng.choice(SMALL)(rng) for _ in range(_few(rng, thinking))]
    return Document(kind="small_tasks", exchanges=tasks, thinking=thinking)


def _few(rng: random.Random, thinking: bool) -> int:
    """Reasoning of earlier turns is not rendered, so a thinking document teaches with its last turn only."""
    return rng.randint(1, 2) if thinking else rng.randint(4, 10)
