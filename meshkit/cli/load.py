"""A load generator for chat completions: closed loop (so many at once) or open loop (so many per second).

Prompts and arrival times come from a seed, so that a run can be repeated. Every request is measured by the client's
clock; nothing is averaged here. Warm-up requests run before, one after the other, and are not part of the result.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshkit.cli.http_client import Endpoint, request
from meshkit.cli.turn import Turn, stream_turn

TEXT = (
    "the fox and a river in winter under old trees where light falls on snow while birds call from hills beyond this "
    "small house that stands near water with stones green moss bread warm milk two children who walk along paths "
    "toward fields of corn before evening comes"
)
WORDS = TEXT.split()
TOKENS_PER_WORD = 1.3  # until the server's tokenizer has been asked


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send. `request_rate` 0 means closed loop with `concurrency` requests in flight."""

    model: str
    num_prompts: int
    concurrency: int
    request_rate: float
    input_len: int  # tokens, about
    output_len: int  # tokens, exactly: the end-of-text token is ignored
    warmup: int
    seed: int
    timeout_s: float


@dataclass(slots=True)
class LoadResult:
    """One Turn per request, in the order of sending. `seconds` spans the first request to the last answer."""

    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0


async def run_load(
    endpoint: Endpoint, plan: LoadPlan, *, api_key: str = "", on_done: Callable[[int], None] = lambda done: None
) -> LoadResult:
    """Send everything; refusals and broken streams are Turns with an `error`."""
    ratio = await tokens_per_word(endpoint, plan.model, api_key)
    bodies = make_bodies(plan, ratio)
    for body in bodies[: plan.warmup]:
        await _send(endpoint, body, api_key, plan.timeout_s)
    measured = bodies[plan.warmup :]
    result = LoadResult(turns=[Turn()] * len(measured))
    done = 0

    async def one(index: int) -> None:
        nonlocal done
        result.turns[index] = await _send(endpoint, measured[index], api_key, plan.timeout_s)
        done += 1
        on_done(done)

    began = time.perf_counter()
    if plan.request_rate > 0:
        await _open_loop(plan, len(measured), one)
    else:
        await _closed_loop(plan.concurrency, len(measured), one)
    result.seconds = time.perf_counter() - began
    return result


async def _closed_loop(concurrency: int, count: int, one: Callable[[int], Any]) -> None:
    numbers = iter(range(count))

    async def client() -> None:
        for index in numbers:
            await one(index)

    await asyncio.gather(*(client() for _ in range(min(concurrency, count))))


async def _open_loop(plan: LoadPlan, count: int, one: Callable[[int], Any]) -> None:
    """Poisson arrivals, kept to the clock however slow the answers are."""
    clock = random.Random(plan.seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(index))
            due += clock.expovariate(plan.request_rate)


async def _send(endpoint: Endpoint, body: dict[str, Any], api_key: str, timeout_s: float) -> Turn:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            return await stream_turn(endpoint, body, api_key=api_key, timeout_s=timeout_s)
    except (OSError, TimeoutError, EOFError, ValueError) as e:
        return Turn(error=f"{type(e).__name__}: {e}", end_s=time.perf_counter() - began)


def make_bodies(plan: LoadPlan, ratio: float) -> list[dict[str, Any]]:
    """The requests of a run, warm-up first; each prompt is new, so that no prefix is shared."""
    dice = random.Random(plan.seed)
    count = max(1, round(plan.input_len / ratio))
    return [
        {
            "model": plan.model,
            "messages": [{"role": "user", "content": " ".join(dice.choices(WORDS, k=count))}],
            "max_tokens": plan.output_len,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": plan.seed + number,
        }
        for number in range(plan.warmup + plan.num_prompts)
    ]


async def tokens_per_word(endpoint: Endpoint, model: str, api_key: str) -> float:
    """Asks the server's tokenizer, so that `input_len` means its tokens; a guess where it has no /tokenize."""
    body = {"model": model, "prompt": " ".join(WORDS)}
    try:
        async with request(endpoint, "POST", "/tokenize", body=body, api_key=api_key) as response:
            reply = json.loads(await response.text())
        return max(0.1, int(reply.get("count") or len(reply["tokens"])) / len(WORDS))
    except (OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError):
        return TOKENS_PER_WORD


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed (nearest rank); 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = math.ceil(round(share * len(ordered), 9))  # rounded: 0.99 * 100 is a little above 99
    return ordered[max(rank, 1) - 1]
