"""JSON to fill in and tools to call, the latter with schemas never seen before as well."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.text.chat_messages import ToolSpec
from tools.nano.document import Document, Exchange
from tools.nano.stories import child
from tools.nano.talk import effort, fixed
from tools.nano.words import CITIES, COLOURS, FOODS, JOBS, NAMES, PLACES, THINGS, WEATHERS, article, invented

_PERSON_TYPES = {"name": "string", "age": "integer", "city": "string", "job": "string"}


def _person(rng: random.Random) -> tuple[dict[str, Any], str]:
    who, age, city, job = child(rng), rng.randint(18, 79), rng.choice(CITIES), rng.choice(JOBS)
    text = rng.choice(
        (
            f"{who.name} is {age} years old, lives in {city} and works as {article(job)}.",
            f"My name is {who.name}. I am {article(job)} from {city} and I am {age}.",
            f"{who.name}, {article(job)} aged {age}, comes from {city}.",
            f"{who.name} ({age}) is {article(job)} in {city}.",
        )
    )
    return {"name": who.name, "age": age, "city": city, "job": job}, text


def extract(rng: random.Random) -> Document:
    """One to three people in a text, to be written as JSON with the keys asked for."""
    people = [_person(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    keys = rng.sample(list(_PERSON_TYPES), rng.randint(2, 4))
    picked = [{key: facts[key] for key in keys} for facts, _ in people]
    value: Any = picked[0] if len(picked) == 1 else picked
    text = " ".join(text for _, text in people)
    indented = rng.random() < 0.25
    style = "indented JSON" if indented else "JSON"
    ask = f"Read the text and answer with {style} only. Keys: {', '.join(keys)}.\nText: {text}"
    answer = json.dumps(value, indent=2 if indented else None)
    exchange = Exchange(ask, answer, f"The keys are {', '.join(keys)}.")
    thinking = rng.random() < 0.15
    if isinstance(value, dict) and rng.random() < 0.5:
        return _with_format(
            rng, keys, Exchange(text if rng.random() < 0.5 else ask, answer, exchange.reasoning), thinking
        )
    return Document(kind="json", exchanges=[exchange], thinking=thinking)


def _with_format(rng: random.Random, keys: list[str], exchange: Exchange, thinking: bool) -> Document:
    """The same with a response format; its schema names the keys, so the text alone is enough."""
    schema = {
        "type": "object",
        "properties": {key: {"type": _PERSON_TYPES[key]} for key in keys},
        "required": keys,
    }
    if "Keys" in str(exchange.asked) and rng.random() < 0.5:
        answer = json.dumps(json.loads(exchange.answer))
        return Document(
            kind="json",
            exchanges=[Exchange(str(exchange.asked).replace("indented ", ""), answer, exchange.reasoning)],
            response_format="json_object",
            thinking=thinking,
        )
    answer = json.dumps(json.loads(exchange.answer))
    asked = str(exchange.asked).replace("indented ", "")
    return Document(
        kind="json",
        exchanges=[Exchange(asked, answer, exchange.reasoning)],
        response_format="json_schema",
        response_schema=schema,
        thinking=thinking,
    )


@dataclass(frozen=True, slots=True)
class _Scene:
    """A request for a tool: the call, its result and what to say then."""

    asked: str
    arguments: dict[str, Any]
    result: str
    said: str


def _spec(name: str, description: str, properties: dict[str, str]) -> ToolSpec:
    types = {key: {"type": kind} for key, kind in properties.items()}
    return ToolSpec(name, description, {"type": "object", "properties": types, "required": list(properties)})


def _weather(rng: random.Random) -> _Scene:
    city, unit, degrees, sky = (
        rng.choice(CITIES),
        rng.choice(("celsius", "fahrenheit")),
        rng.randint(-5, 35),
        rng.choice(WEATHERS),
    )
    return _Scene(
        rng.choice((f"What is the weather in {city} in {unit}?", f"How warm is it in {city}? Use {unit}.")),
        {"city": city, "unit": unit},
        json.dumps({"temp": degrees, "sky": sky}),
        f"It is {sky} in {city} with {degrees} degrees {unit}.",
    )


def _short_weather(rng: random.Random) -> _Scene:
    city, degrees, sky = rng.choice(CITIES), rng.randint(-5, 35), rng.choice(WEATHERS)
    return _Scene(
        rng.choice((f"What is the weather in {city}?", f"What's the weather like in {city}?")),
        {"city": city},
        json.dumps({"temp": degrees, "sky": sky}),
        f"It is {sky} in {city} with {degrees} degrees.",
    )


def _add(rng: random.Random) -> _Scene:
    a, b = rng.randint(1, 499), rng.randint(1, 499)
    asked = rng.choice((f"Please add {a} and {b} with the tool.", f"What is {a} + {b}? Use the tool."))
    return _Scene(asked, {"a": a, "b": b}, str(a + b), f"The sum of {a} and {b} is {a + b}.")


def _book(rng: random.Random) -> _Scene:
    title, shelf = f"The {rng.choice(COLOURS).title()} {rng.choice(THINGS).title()}", rng.randint(1, 40)
    asked = rng.choice((f'Do you have the book "{title}"?', f'Find the book "{title}".'))
    return _Scene(asked, {"title": title}, json.dumps({"shelf": shelf}), f'Yes, "{title}" is on shelf {shelf}.')


def _timer(rng: random.Random) -> _Scene:
    minutes, food = rng.randint(1, 59), rng.choice(FOODS)
    return _Scene(
        f"Set a timer of {minutes} minutes for the {food}.",
        {"minutes": minutes, "label": food},
        "ok",
        f"The timer for the {food} is set to {minutes} minutes.",
    )


def _note(rng: random.Random) -> _Scene:
    name, text = rng.choice(NAMES), f"the {rng.choice(THINGS)} is in the {rng.choice(PLACES)}"
    return _Scene(f"Tell {name} that {text}.", {"to": name, "text": text}, "sent", f"I told {name} that {text}.")


_SCENES: tuple[tuple[ToolSpec, Callable[[random.Random], _Scene]], ...] = (
    (_spec("get_weather", "Get the weather for a city", {"city": "string", "unit": "string"}), _weather),
    (_spec("get_weather", "Get the current weather of a city", {"city": "string"}), _short_weather),
    (_spec("add_numbers", "Add two numbers", {"a": "number", "b": "number"}), _add),
    (_spec("find_book", "Find a book in the library", {"title": "string"}), _book),
    (_spec("set_timer", "Start a timer", {"minutes": "number", "label": "string"}), _timer),
    (_spec("send_note", "Send a note to a person", {"to": "string", "text": "string"}), _note),
)


def tool_call(rng: random.Random) -> Document:
    """A request, the call and, once the result is in, the answer; sometimes no tool is needed."""
    kinds = rng.sample(_SCENES, rng.randint(1, 4))
    specs = {spec.name: (spec, scene) for spec, scene in kinds}
    tools = tuple(spec for spec, _ in specs.values())
    thinking = rng.random() < 0.3
    if rng.random() < 0.12:
        return Document(kind="tool_talk", exchanges=[fixed(rng)], tools=tools, thinking=thinking, effort=effort(rng))
    spec, make = rng.choice(list(specs.values()))
    scene = make(rng)
    return _tool_document(rng, "tools", tools, spec.name, scene, thinking)


_VERBS = ["get", "find", "send", "make", "open", "close", "start", "stop", "read", "write", "check", "book"]


def unseen_tool(rng: random.Random) -> Document:
    """Tools with invented names and parameters: the call can only be copied out of schema and request."""
    specs, scenes = [], []
    for _ in range(rng.randint(1, 3)):
        name = f"{rng.choice(_VERBS)}_{rng.choice((invented(rng), rng.choice(THINGS)))}"
        keys = [rng.choice((invented(rng), rng.choice(PLACES))) for _ in range(rng.randint(1, 3))]
        arguments: dict[str, Any] = {
            key: rng.choice((rng.randint(1, 999), invented(rng), rng.choice(CITIES))) for key in keys
        }
        types = {key: "number" if isinstance(value, int) else "string" for key, value in arguments.items()}
        specs.append(_spec(name, f"{name.replace('_', ' ').capitalize()}", types))
        told = " and ".join(f"{key} {value}" for key, value in arguments.items())
        said = rng.choice((f"Call {name} with {told}.", f"Please use {name} with {told}."))
        scenes.append(_Scene(said, arguments, "ok", f"I called {name} with {told}."))
    place = rng.randrange(len(specs))
    unique = {spec.name: spec for spec in specs}
    unique[specs[place].name] = specs[place]
    thinking = rng.random() < 0.2
    return _tool_document(rng, "unseen_tools", tuple(unique.values()), specs[place].name, scenes[place], thinking)


def _tool_document(
    rng: random.Random, kind: str, tools: tuple[ToolSpec, ...], name: str, scene: _Scene, thinking: bool
) -> Document:
    call = Exchange(scene.asked, "", f"I need the tool {name}.", ((name, scene.arguments),))
    after = Exchange((scene.result,), scene.said, "I have the result.", role="tool")
    return Document(kind=kind, exchanges=[call, after], tools=tools, thinking=thinking, effort=effort(rng))
