"""Streams for a mesh that gets hurt: kinds of requests, what each brought token by token, and how it differs.

Each request is asked once undisturbed (the reference) and then again and again; in deterministic mode every answer must
have the reference's ids, logprob bits, text and end. A client does what a load balancer does for it: it goes to another
gateway where a connection is refused, before anything was sent. Nothing else is ever tried twice.
"""

import asyncio
import difflib
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

KINDS: Final = ("prefill", "decode", "constrained", "choices", "logprobs", "tool")
LIMIT_S: Final = 240.0
REFUSED_S: Final = 30.0
_PERSON: Final = {
    "type": "array",
    "items": {"type": "string", "maxLength": 60},
    "minItems": 12,
}
# Its one argument is text, which streams as it comes: a number is told when it is whole, a pause of its own.
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "tell",
        "parameters": {
            "type": "object",
            "properties": {"story": {"type": "string", "minLength": 300, "maxLength": 600}},
            "required": ["story"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the catalogue."""

    name: str
    kind: str
    path: str
    body: dict[str, Any]


def catalogue(per_kind: int, tokens: int) -> list[Asked]:
    """`per_kind` different requests of each kind; `tokens` is the length of an ordinary answer."""
    return [_asked(kind, number, tokens) for number in range(per_kind) for kind in KINDS]


def _asked(kind: str, number: int, tokens: int) -> Asked:
    name = f"{kind}-{number}"
    plain = {"prompt": f"Story {number}: once upon a time", "max_tokens": tokens, "temperature": 0.9}
    body: dict[str, Any]
    match kind:
        case "prefill":
            body = plain | {"prompt": f"Number {number}. " + f"The fox and the lamp {number}. " * 40, "max_tokens": 8}
        case "choices":
            body = plain | {"n": 3, "max_tokens": tokens * 2 // 3}
        case "logprobs":
            body = plain | {"logprobs": 2}
        case "decode":
            body = plain
        case _:
            messages = [{"role": "user", "content": f"Tell story {number} of a fox and a lamp."}]
            body = {"messages": messages, "max_tokens": tokens, "temperature": 0.9, "thinking": {"type": "disabled"}}
            if kind == "tool":
                body |= {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "tell"}}}
            else:
                schema = {"name": "answer", "schema": _PERSON}
                body |= {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind in ("prefill", "choices", "logprobs", "decode"):
        body["ignore_eos"] = True
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    extra = {"model": "v4-nano", "seed": 1000 + number, "stream": True, "return_token_ids": True}
    return Asked(name, kind, path, body | extra | {"stream_options": {"include_usage": True}})


@dataclass(slots=True)
class Told:
    """What one choice brought."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text: str = ""
    finish: str = ""


@dataclass(slots=True, eq=False)
class Run:
    """One request on its way, and afterwards."""

    asked: Asked
    gateway: int
    started: float
    ended: float = 0.0
    error: str = ""
    refused: bool = False  # by a status and Retry-After, before the first byte: the client may come again
    usage: int = -1
    choices: dict[int, Told] = field(default_factory=dict)
    marks: list[float] = field(default_factory=list)  # when tokens came
    worker_kills: int = 0

    @property
    def phase(self) -> str:
        """Of a run that is under way: prefill before its first token, then what it is about."""
        return self.asked.kind if self.marks else "prefill"

    @property
    def ids(self) -> int:
        return sum(len(told.ids) for told in self.choices.values())


@dataclass(slots=True)
class Difference:
    """How a run differs from its reference."""

    lost: int = 0
    doubled: int = 0
    other: int = 0  # ids that differ at their place
    logprobs: int = 0  # entries that differ though their ids do not
    text: int = 0  # choices whose text or end differs though their ids do not

    def add(self, more: "Difference") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(more, name))


def compare(run: Run, reference: Run) -> Difference:
    """Token by token, choice by choice."""
    found = Difference()
    for index, told in reference.choices.items():
        got = run.choices.get(index, Told())
        if got.ids != told.ids:
            for kind, a, b, c, d in difflib.SequenceMatcher(None, told.ids, got.ids, autojunk=False).get_opcodes():
                found.lost += (b - a) if kind == "delete" else 0
                found.doubled += (d - c) if kind == "insert" else 0
                found.other += max(b - a, d - c) if kind == "replace" else 0
            continue
        found.logprobs += sum(x != y for x, y in itertools.zip_longest(got.logprobs, told.logprobs))
        found.text += (got.text, got.finish) != (told.text, told.finish)
    found.doubled += sum(len(told.ids) for index, told in run.choices.items() if index not in reference.choices)
    found.lost += run.usage >= 0 and run.usage != run.ids
    return found


class Load:
    """A steady number of streams against the gateways at `ports`, until told to stop."""

    def __init__(self, ports: Sequence[int], asked: Sequence[Asked], rng: random.Random) -> None:
        self._ports, self._asked, self._rng = ports, list(asked), rng
        self.open: set[Run] = set()
        self.done: list[Run] = []
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._salts = itertools.count()
        self.avoid: set[int] = set()  # gateways that are not ready, as a load balancer knows: no new requests

    async def __aenter__(self) -> "Load":
        # A connection per request: one that was kept open would be a second way to meet a dead gateway.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=LIMIT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    def start(self, streams: int) -> None:
        turns = itertools.cycle(self._rng.sample(self._asked, len(self._asked)))
        self._tasks += [asyncio.create_task(self._client(number, turns)) for number in range(streams)]

    async def stop(self) -> None:
        """Let what is open end, start nothing new."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def each(self, asked: Sequence[Asked], at_once: int) -> dict[str, Run]:
        """Every request once, on the first gateway: the reference."""
        gate = asyncio.Semaphore(at_once)

        async def one(it: Asked) -> Run:
            async with gate:
                run = await self.run(it, 0)
                while run.refused:  # a busy machine: grammars take too long to compile
                    await asyncio.sleep(1.0)
                    run = await self.run(it, 0)
                return run

        runs = await asyncio.gather(*(one(it) for it in asked))
        for run in runs:
            if run.error:
                raise RuntimeError(f"the reference failed: {run.asked.name}: {run.error}")
        return {run.asked.name: run for run in runs}

    async def _client(self, number: int, turns: "itertools.cycle[Asked]") -> None:
        await asyncio.sleep(number * 0.05)
        while not self._stopping:
            run = await self.run(next(turns), number % len(self._ports))
            self.done.append(run)
            if run.refused:
                await asyncio.sleep(1.0)

    async def run(self, asked: Asked, gateway: int) -> Run:
        """One request to its end, whatever that is."""
        run = Run(asked, gateway, time.monotonic())
        if asked.kind == "prefill":  # its KV must not be in the prefix cache
            asked = Asked(asked.name, asked.kind, asked.path, asked.body | {"cache_salt": f"salt {next(self._salts)}"})
        self.open.add(run)
        try:
            while True:
                try:
                    await self._stream(asked, run)
                    break
                except aiohttp.ClientConnectorError as error:  # refused: nothing was sent
                    if time.monotonic() - run.started > REFUSED_S:
                        run.error = f"no gateway: {error}"
                        break
                    run.gateway = (run.gateway + 1) % len(self._ports)
                    await asyncio.sleep(0.05)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            run.error = f"{type(error).__name__}: {error}"
        finally:
            self.open.discard(run)
            run.ended = time.monotonic()
        if not run.error and (not run.choices or not all(told.finish for told in run.choices.values())):
            run.error = "the stream ended before its choices did"
        return run

    async def _stream(self, asked: Asked, run: Run) -> None:
        while run.gateway in self.avoid:
            others = [n for n in range(len(self._ports)) if n not in self.avoid]
            run.gateway = others[0] if others else run.gateway
            await asyncio.sleep(0.0 if others else 0.05)
        url = f"http://127.0.0.1:{self._ports[run.gateway]}{asked.path}"
        async with self._http.post(url, json=asked.body) as reply:
            if reply.status != 200:
                run.error = f"{reply.status}: {(await reply.text())[:300]}"
                run.refused = reply.status in (429, 503) and "Retry-After" in reply.headers
                return
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    _take(json.loads(line[6:]), run)
                    if run.error:
                        return


def _take(event: dict[str, Any], run: Run) -> None:
    if "error" in event:
        run.error = str(event["error"])[:300]
        return
    if event.get("usage"):
        run.usage = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        told = run.choices.setdefault(choice["index"], Told())
        if ids := choice.get("token_ids"):
            run.marks.append(time.monotonic())
            told.ids += ids
        delta = choice.get("delta") or {}
        told.text += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            told.text += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        if logprobs := choice.get("logprobs"):
            told.logprobs += logprobs.get("token_logprobs") or [e["logprob"] for e in logprobs.get("content") or ()]
        told.finish = choice.get("finish_reason") or told.finish
