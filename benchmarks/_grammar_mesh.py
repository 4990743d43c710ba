"""Constrained requests through a whole mesh over REST: are the outputs valid, and what does a killed service cost?

200 requests at concurrency 16, half greedy and half sampled. An output that ends with `stop` is judged independently;
one that is cut by its length must be a prefix that a fresh matcher accepts. Then the same under `kill -9` of the
serving grammar process: with its standby, and without.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import psutil

from benchmarks._grammar_judges import Case, mesh_cases, schema_judge
from benchmarks._mesh import running_mesh
from grammar_svc import compiler
from grammar_svc.limits import SourceLimits
from grammar_svc.sources import read_source
from grammar_svc.vocabulary import Vocabulary
from meshkit.types import GrammarKind

REQUESTS: Final = 200
CONCURRENCY: Final = 16
MAX_TOKENS: Final = 512
TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back of one request; `error` is the status or the reason of a stream that failed."""

    case: Case
    text: str
    reason: str
    tokens: int
    error: str = ""


def requests(count: int) -> list[tuple[Case, dict[str, Any]]]:
    """`count` requests over all cases in turn; every other round is sampled."""
    made = []
    every = mesh_cases()
    for number, case in zip(range(count), itertools.cycle(every)):
        body = {
            "model": "v4-nano",
            "messages": [{"role": "user", "content": f"Fill in JSON about a fox and a lamp, number {number}."}],
            "max_tokens": MAX_TOKENS,
            "thinking": {"type": "disabled"},
            "temperature": float(number // len(every) % 2),
            "seed": number,
            **case.body,
        }
        made.append((case, body))
    return made


async def ask(session: aiohttp.ClientSession, url: str, case: Case, body: dict[str, Any]) -> Answer:
    """One request, not streamed."""
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        answer = await reply.json()
    if reply.status != 200:
        return Answer(case, "", "", 0, f"{reply.status}: {answer.get('error', answer)}")
    choice = answer["choices"][0]
    tokens = answer["usage"]["completion_tokens"]
    return Answer(case, choice["message"]["content"] or "", choice["finish_reason"], tokens)


async def ask_all(url: str, wanted: list[tuple[Case, dict[str, Any]]], concurrency: int) -> list[Answer]:
    """All requests, at most `concurrency` at once."""
    gate = asyncio.Semaphore(concurrency)
    limits = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=limits) as session:

        async def one(case: Case, body: dict[str, Any]) -> Answer:
            async with gate:
                return await ask(session, url, case, body)

        return await asyncio.gather(*(one(case, body) for case, body in wanted))


def judged(answers: list[Answer], vocabulary: Vocabulary) -> dict[str, float | int | str]:
    """Counts and shares; every output that breaks a rule is printed."""
    counts: collections.Counter[str] = collections.Counter()
    made = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary)
    for answer in answers:
        if answer.error:
            verdict = "failed"
        elif answer.reason == "stop":
            verdict = "valid" if answer.case.judge(answer.text) else "invalid"
        else:
            verdict = "cut" if _is_prefix(made, answer) else "no prefix"
        counts[verdict] += 1
        if verdict not in ("valid", "cut"):
            print(f"{verdict}: {answer.case.name}: {answer.error or repr(answer.text[:300])}")
    stopped = counts["valid"] + counts["invalid"]
    return {
        "requests": len(answers),
        "failed": counts["failed"],
        "stopped": stopped,
        "cut": counts["cut"] + counts["no prefix"],
        "cut_without_prefix": counts["no prefix"],
        "stop_share": round(stopped / max(1, len(answers)), 4),
        "valid_share": round(counts["valid"] / max(1, stopped), 4),
        "tokens": sum(answer.tokens for answer in answers),
    }


def _is_prefix(made: compiler.Compiler, answer: Answer) -> bool:
    source = read_source(answer.case.kind, answer.case.text, SourceLimits())
    matcher = compiler.new_matcher(compiler.compile_source(made, source), [1])
    return bool(matcher.accept_string(answer.text.rstrip("\ufffd")))  # cut in the middle of a character


# ---- kills ----------------------------------------------------------------------------------------------------------


def grammar_processes() -> list[psutil.Process]:
    """The grammar services among this process's descendants, the serving one first."""
    found, serving = [], 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "grammar" in line and "--listen" in line:
                found.append(process)
                serving = serving or _listener(line[line.index("--listen") + 1].removeprefix("unix:"))
    return sorted(found, key=lambda process: process.pid != serving)


def _listener(path: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return 0
        return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


@dataclass(slots=True)
class Stream:
    """What one streamed request brought: arrival times of its tokens, text, finish reason or error."""

    times: list[float] = field(default_factory=list)
    text: str = ""
    reason: str = ""

    def longest_gap(self, since: float, until: float) -> float:
        """Seconds without a token, between `since` and `until` (monotonic)."""
        marks = [since, *(t for t in self.times if since < t < until)]
        marks += [min(until, self.times[-1])] if self.times and self.times[-1] > since else []
        return max((b - a for a, b in itertools.pairwise(marks)), default=0.0)


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], into: Stream) -> None:
    """Run one streamed request to its end."""
    async with session.post(f"{url}/v1/chat/completions", json=body | {"stream": True}) as reply:
        if reply.status != 200:
            into.reason = f"{reply.status}: {(await reply.text())[:200]}"
            return
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                into.reason = str(event["error"])[:300]
                return
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    into.times.append(time.monotonic())
                    into.text += text
                into.reason = choice["finish_reason"] or into.reason


KILL_SCHEMA: Final = {"type": "array", "items": {"type": "string", "maxLength": 300}, "minItems": 60}
BEFORE_S: Final = 4.0
AFTER_S: Final = 120.0


async def kill(url: str, vocabulary: Vocabulary, *, both: bool, streams: int) -> dict[str, float | int | str]:
    """kill -9 of the serving process, or of both, while streams run; the longest pause of any of them around it."""
    body = {
        "model": "v4-nano",
        "max_tokens": 1000,
        "thinking": {"type": "disabled"},
        "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": KILL_SCHEMA}},
    }
    all_of = [Stream() for _ in range(streams)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        running = []
        for number, one in enumerate(all_of):
            asked = body | {"seed": number, "messages": [{"role": "user", "content": f"JSON list {number}"}]}
            running.append(asyncio.create_task(stream(session, url, asked, one)))
        while not all(one.times for one in all_of) and not all(task.done() for task in running):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(BEFORE_S)
        under_way = sum(not task.done() for task in running)
        victims = grammar_processes()[: 2 if both else 1]
        for process in victims:
            process.kill()
        killed = time.monotonic()
        await asyncio.gather(*running)
    name = "kill_both" if both else "kill"
    case = Case(name, GrammarKind.JSON_SCHEMA, json.dumps(KILL_SCHEMA), {}, schema_judge(KILL_SCHEMA))
    ends = judged(
        [Answer(case, one.text, one.reason, 0, "" if one.reason in ENDS else one.reason) for one in all_of], vocabulary
    )
    return {
        f"{name}_streams_running": under_way,
        f"{name}_streams_failed": ends["failed"],
        f"{name}_outputs_invalid": int(ends["stopped"])
        - round(float(ends["valid_share"]) * int(ends["stopped"]))
        + int(ends["cut_without_prefix"]),
        f"{name}_longest_pause_before_s": round(max(s.longest_gap(killed - BEFORE_S, killed) for s in all_of), 3),
        f"{name}_longest_pause_after_s": round(max(s.longest_gap(killed, killed + AFTER_S) for s in all_of), 3),
    }


ENDS: Final = ("stop", "length")


async def until_standby(limit_s: float = 120.0) -> None:
    """Wait until a serving process and its warm standby are there (both have a compile process)."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found = grammar_processes()
        with contextlib.suppress(psutil.Error):
            if len(found) == 2 and all(process.children() for process in found):
                await asyncio.sleep(5.0)  # its compile process has been started, not warmed yet
                return
        await asyncio.sleep(0.5)
    raise RuntimeError("no standby came")


def run_mesh(vocabulary: Vocabulary, *, quick: bool) -> dict[str, float | int | str]:
    """The whole part. `vocabulary` is nano's."""
    count = 70 if quick else REQUESTS
    with running_mesh("--grammar", "on") as url:
        began = time.monotonic()
        answers = asyncio.run(ask_all(url, requests(count), CONCURRENCY))
        result = {f"mesh_{key}": value for key, value in judged(answers, vocabulary).items()}
        result["mesh_s"] = round(time.monotonic() - began, 1)
        asyncio.run(until_standby())
        result |= asyncio.run(kill(url, vocabulary, both=False, streams=8))
        asyncio.run(until_standby())
        result |= asyncio.run(kill(url, vocabulary, both=True, streams=8))
    return result
