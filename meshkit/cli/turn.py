"""One chat completion over server-sent events: deltas as they come, and the times a person wants to know.

Shared by `chat`, `demo` and `bench`. Times are taken where bytes arrive, in this process.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from meshkit.cli.http_client import Endpoint, StatusError, error_text, get_json, request
from meshkit.exit_codes import Exit, Problem, ProblemsError

OnDelta = Callable[[Literal["reasoning", "content"], str], None]


@dataclass(slots=True)
class Turn:
    """What came back. Times are seconds since the request was sent."""

    status: int = 0
    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    error: str = ""
    arrivals_s: list[float] = field(default_factory=list)  # one per event that carried text
    end_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token, or to the end if none came."""
        return self.arrivals_s[0] if self.arrivals_s else self.end_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens after the first; 0 with fewer than two tokens."""
        if self.completion_tokens < 2 or not self.arrivals_s:
            return 0.0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.completion_tokens - 1)

    def summary(self) -> str:
        """`TTFT 41 ms · 96 tok/s · 224 prompt tokens, 192 from cache`"""
        parts = [f"TTFT {self.ttft_s * 1e3:.0f} ms"]
        if self.itl_s > 0:
            parts.append(f"{1 / self.itl_s:.0f} tok/s")
        cached = f", {self.cached_tokens} from cache" if self.cached_tokens else ""
        parts.append(f"{self.prompt_tokens} prompt tokens{cached}")
        return " · ".join([*parts, f"{self.completion_tokens} new"])


def _ignore(kind: str, text: str) -> None:
    """The default listener: nobody watches."""


async def stream_turn(
    endpoint: Endpoint, body: dict[str, Any], *, api_key: str = "", on_delta: OnDelta = _ignore, timeout_s: float = 60.0
) -> Turn:
    """POST a streaming chat completion and read it to its end. A refusal is in the Turn; no connection: OSError."""
    turn = Turn()
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    sent = time.perf_counter()
    async with request(
        endpoint, "POST", "/v1/chat/completions", body=wanted, api_key=api_key, timeout_s=timeout_s
    ) as response:
        turn.status = response.status
        if response.status != 200:
            turn.error = error_text(await response.text())
        else:
            async for data in response.events():
                if data == "[DONE]":
                    break
                _take(turn, json.loads(data), time.perf_counter() - sent, on_delta)
            else:
                turn.error = turn.error or "the stream ended early"
    turn.end_s = time.perf_counter() - sent
    return turn


def _take(turn: Turn, event: dict[str, Any], at_s: float, on_delta: OnDelta) -> None:
    if "error" in event:
        turn.error = str(event["error"].get("message", event["error"]))
        return
    if usage := event.get("usage"):
        turn.prompt_tokens = usage.get("prompt_tokens", 0)
        turn.completion_tokens = usage.get("completion_tokens", 0)
        turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) or 0
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
        if reasoning or content:
            turn.arrivals_s.append(at_s)
        if reasoning:
            turn.reasoning += reasoning
            on_delta("reasoning", reasoning)
        if content:
            turn.content += content
            on_delta("content", content)
        turn.finish_reason = choice.get("finish_reason") or turn.finish_reason


async def first_model(endpoint: Endpoint, api_key: str = "") -> str:
    """The name of the model served there; a problem that says what to do if there is none, or we may not ask."""
    try:
        models = await get_json(endpoint, "/v1/models", api_key=api_key)
        return str(models["data"][0]["id"])
    except StatusError as e:
        raise ProblemsError(refusal(endpoint, e.status, e.message, with_key=bool(api_key))) from e
    except (OSError, TimeoutError) as e:
        raise ProblemsError(no_mesh(endpoint, e)) from e
    except (LookupError, TypeError, ValueError) as e:
        fact = f"{endpoint}/v1/models does not answer like a mesh ({type(e).__name__}: {e})"
        raise ProblemsError(Problem("PEER", Exit.PEER, fact, "check --url")) from e


def refusal(endpoint: Endpoint, status: int, message: str, *, with_key: bool) -> Problem:
    """What an answer other than 200 means. A missing or wrong key is ours to mend: CONFIG, not PEER."""
    if status != 401:
        return Problem("REFUSED", Exit.PEER, message)
    if with_key:
        fix = "the gateway started with another key file: give --api-key-file one of its keys"
        return Problem("UNAUTHORIZED", Exit.CONFIG, f"{endpoint} does not know this API key", fix)
    fix = "--api-key-file FILE, or the variable V4MESH_API_KEY"
    return Problem("UNAUTHORIZED", Exit.CONFIG, f"{endpoint} wants an API key", fix)


def no_mesh(endpoint: Endpoint, error: BaseException) -> Problem:
    """Nobody answers at this address."""
    why = str(error) or type(error).__name__
    fix = "start one in another terminal: v4mesh up" if endpoint.host in ("127.0.0.1", "localhost") else "check --url"
    return Problem("PEER", Exit.PEER, f"no mesh answers at {endpoint} ({why})", fix)
