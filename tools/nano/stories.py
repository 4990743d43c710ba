"""Short stories and what can be asked about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.nano.words import (
    ANIMALS,
    BOYS,
    COLOURS,
    FOODS,
    GIRLS,
    JOBS,
    PLACES,
    THINGS,
    TRAITS,
    WEATHERS,
    article,
)


@dataclass(frozen=True, slots=True)
class Child:
    """The hero and the pronouns that fit."""

    name: str
    they: str
    them: str
    their: str


@dataclass(frozen=True, slots=True)
class Story:
    """A text and the facts in it; every fact is told once or more, in plain words."""

    text: str
    name: str
    friend: str
    colour: str
    thing: str
    place: str
    weather: str
    food: str


@dataclass(frozen=True, slots=True)
class _Cast:
    child: Child
    friend: str
    thing: str
    colour: str
    home: str
    place: str
    last: str
    food: str
    trait: str
    friend_trait: str


def child(rng: random.Random, name: str | None = None) -> Child:
    """A child with pronouns."""
    chosen = name or rng.choice(GIRLS + BOYS)
    return Child(chosen, "she", "her", "her") if chosen in GIRLS else Child(chosen, "he", "him", "his")


def story(rng: random.Random, *, friend: str | None = None, thing: str | None = None, name: str | None = None) -> Story:
    """A story of eight to twelve sentences, about the animal and the thing if given."""
    home, place, last = rng.sample(PLACES, 3)
    trait, friend_trait = rng.sample(TRAITS, 2)
    cast = _Cast(
        child(rng, name),
        friend or rng.choice(ANIMALS),
        thing or rng.choice(THINGS),
        rng.choice(COLOURS),
        home,
        place,
        last,
        rng.choice(FOODS),
        trait,
        friend_trait,
    )
    weather = rng.choice(WEATHERS)
    plot = rng.choice(PLOTS)(rng, cast)
    sentences = [*_opening(rng, cast), _setting_out(rng, cast, weather), *plot, _closing(rng, cast)]
    return Story(
        " ".join(sentences), cast.child.name, cast.friend, cast.colour, cast.thing, cast.place, weather, cast.food
    )


def _opening(rng: random.Random, c: _Cast) -> list[str]:
    who, they, their = c.child.name, c.child.they.capitalize(), c.child.their
    hero = rng.choice(
        (
            f"Once upon a time there was {article(c.trait)} child called {who} who lived near the {c.home}.",
            f"{who} was {article(c.trait)} child. {they} lived in a small house by the {c.home}.",
            f"In a little house by the {c.home} lived {article(c.trait)} child called {who}.",
        )
    )
    friend = rng.choice(
        (
            f"{their.capitalize()} best friend was {article(c.friend_trait)} {c.friend}.",
            f"{they} had a friend, {article(c.friend_trait)} {c.friend}, who came to visit every day.",
            f"Every morning {article(c.friend_trait)} {c.friend} came to the door and they ate {c.food} together.",
        )
    )
    thing = rng.choice(
        (
            f"{who} loved {their} {c.colour} {c.thing} more than anything.",
            f"One day {their} grandmother gave {c.child.them} {article(c.colour)} {c.thing}.",
            f"{they} kept {article(c.colour)} {c.thing} under {their} bed.",
        )
    )
    return [hero, friend, thing]


def _setting_out(rng: random.Random, c: _Cast, weather: str) -> str:
    return rng.choice(
        (
            f"One {weather} morning they walked to the {c.place}.",
            f"It was {article(weather)} day, so they went to the {c.place}.",
            f"On {article(weather)} afternoon the two friends set out for the {c.place}.",
        )
    )


def _lost(rng: random.Random, c: _Cast) -> list[str]:
    who, they, their = c.child.name, c.child.they, c.child.their
    return [
        rng.choice(
            (
                f"There {who} saw that the {c.thing} was gone.",
                f"When they got there, the {c.thing} was not in {their} bag.",
            )
        ),
        rng.choice((f'"Oh no!" said {who}. "I have lost my {c.thing}!"', f'"Where is my {c.thing}?" cried {who}.')),
        rng.choice(
            (
                f'"Do not be sad," said the {c.friend}. "We will look for it together."',
                f'The {c.friend} said, "Let us look again, step by step."',
            )
        ),
        "They looked under the stones and behind the trees, but they did not find it.",
        rng.choice(
            (
                f"Then they went to the {c.last}, and there was the {c.colour} {c.thing}!",
                f"At last the {c.friend} found the {c.thing} near the {c.last}.",
            )
        ),
        rng.choice(
            (
                f"{who} was so happy that {they} gave the {c.friend} some {c.food}.",
                f'"Thank you," said {who}, and they shared some {c.food}.',
            )
        ),
    ]


def _gift(rng: random.Random, c: _Cast) -> list[str]:
    who, they = c.child.name, c.child.they
    other = rng.choice([animal for animal in ANIMALS if animal != c.friend])
    return [
        f"At the {c.place} they met {article(other)}.",
        rng.choice(
            (
                f"The {other} was sad because it had nothing to play with.",
                f'"I am all alone," said the {other}. "Nobody plays with me."',
            )
        ),
        rng.choice(
            (
                f"{who} thought for a moment. Then {they} gave the {other} the {c.colour} {c.thing}.",
                f"{who} sat down and let the {other} play with the {c.thing}.",
            )
        ),
        f'"You are very kind," said the {other}.',
        f"After that the three friends met at the {c.last} every week and ate {c.food}.",
    ]


def _water(rng: random.Random, c: _Cast) -> list[str]:
    who = c.child.name
    return [
        f"Soon the wind blew hard and the {c.thing} fell into the water.",
        f"{who} could not reach it.",
        rng.choice(
            (f'"I can swim," said the {c.friend}, and jumped in.', f"The {c.friend} took a long stick and pulled.")
        ),
        f"A moment later the {c.thing} was safe, but the {c.friend} was very cold.",
        f"So {who} took the {c.friend} home to the {c.last} and made hot {c.food}.",
    ]


def _note(rng: random.Random, c: _Cast) -> list[str]:
    other = rng.choice([thing for thing in THINGS if thing != c.thing])
    return [
        f"There they found {article(rng.choice(COLOURS))} {other} with a note on it.",
        f'The note said, "Bring this {other} to the {c.last}."',
        f"They ran all the way to the {c.last}.",
        f"{rng.choice(('An old', 'A tired', 'A friendly'))} {rng.choice(JOBS)} opened the door.",
        f'"You brought back my {other}!" the {rng.choice(("stranger", "neighbour"))} said, '
        f"and gave them {c.food} to eat.",
    ]


def _closing(rng: random.Random, c: _Cast) -> str:
    who = c.child.name
    return rng.choice(
        (
            f"From that day on, {who} and the {c.friend} were never apart.",
            f"{who} learned that it is good to be {c.friend_trait}.",
            f"That night {who} slept well and dreamed of the {c.last}.",
            "And they all went home happy.",
            "It was the best day of all.",
        )
    )


PLOTS: tuple[Callable[[random.Random, _Cast], list[str]], ...] = (_lost, _gift, _water, _note)


def questions(rng: random.Random, s: Story) -> list[tuple[str, str]]:
    """Questions whose answers stand in the story, in random order; the answer follows from the question alone."""
    found = [
        (
            rng.choice((f"What colour was {s.name}'s {s.thing}?", f"Which colour did {s.name}'s {s.thing} have?")),
            f"{s.name}'s {s.thing} was {s.colour}.",
        ),
        (
            rng.choice((f"Which animal was {s.name}'s friend?", f"Who was {s.name}'s friend?")),
            f"{s.name}'s friend was {article(s.friend)}.",
        ),
        (
            rng.choice((f"Where did {s.name} go on that day?", f"Where did {s.name} and the {s.friend} go?")),
            f"{s.name} went to the {s.place}.",
        ),
        (
            f"What was the weather like when {s.name} went out?",
            f"It was {s.weather} when {s.name} went out.",
        ),
        (f"What did {s.name} eat?", f"{s.name} ate {s.food}."),
        (f"Which thing did {s.name} have?", f"{s.name} had {article(s.colour)} {s.thing}."),
    ]
    rng.shuffle(found)
    return found
