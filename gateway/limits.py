"""Limits of the HTTP side, and the counters that enforce the concurrent ones.

All of them are checked before any work is done for a request. Limits inside the mesh (queue, pages, slots) are the
scheduler's; rates per key are not counted here.
"""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass

from gateway.errors import ApiError, invalid

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes unless the name says otherwise."""

    body: int = 16 * MIB
    bodies_in_flight: int = 256 * MIB
    header_line: int = 8 * 1024
    header_field: int = 16 * 1024
    body_seconds: float = 60.0
    json_depth: int = 64
    json_containers: int = 100_000  # objects and lists in one body
    messages: int = 4_096
    content_parts: int = 1_024
    prompts: int = 1_024  # prompts in one completions or generate request
    choices: int = 8  # n
    choices_in_flight: int = 64  # of one request: prompts * n
    streams: int = 4_096  # open generations of this process
    queue: int = 1_024  # of them, those that have no token yet
    stops: int = 32
    stop_length: int = 256
    stop_ids: int = 64
    biases: int = 1_024
    allowed_ids: int = 16_384
    bad_words: int = 64
    bad_word_length: int = 128
    logprob_ids: int = 128  # token_ids_logprob
    scored: int = 8_192  # prompt tokens whose log-probabilities one prompt asks for
    top_logprobs: int = 20
    label: int = 512  # salt, user, request ids
    deadline_seconds: float = 3_600.0
    stream_stall_seconds: float = 30.0
    stream_backlog: int = 16_384  # steps a streaming client is behind before it is cut off
    tenant_streams: int = 64  # open generations of one API key
    first_token_seconds: float = 600.0
    header_fields: int = 64


# What is left of a JSON text without its strings and scalars: brackets. Possessive, so linear in the input.
_NOT_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\[\]{}"]++', re.DOTALL)


def check_structure(body: bytes, limits: Limits) -> None:
    """Refuse JSON nested deeper or with more containers than allowed, before a parser recurses into it."""
    if body.count(b"[") + body.count(b"{") <= limits.json_depth:
        return  # too few to nest too deep, even if none of them stands in a string
    brackets = _NOT_STRUCTURE.sub(b"", body)
    if len(brackets) > 2 * limits.json_containers:
        raise invalid(None, f"the body holds more than {limits.json_containers} JSON objects and lists")
    depth = deepest = 0
    for bracket in brackets:
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in b"]}":
            depth -= 1
    if deepest > limits.json_depth:
        raise invalid(None, f"the body is nested {deepest} levels deep; allowed are {limits.json_depth}")


class Admission:
    """Counts what is in flight in this process and refuses beyond the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.body_bytes = 0
        self.streams = 0
        self.waiting = 0
        self._of_tenant: Counter[str] = Counter()
        self.draining = False  # no new connections: what comes on open ones is the last there
        self.idle = asyncio.Event()  # set while nothing is open
        self.idle.set()

    def take_body(self, size: int) -> None:
        if self.body_bytes + size > self._limits.bodies_in_flight:
            raise ApiError(429, "too many request bytes in flight", code="rate_limit_exceeded", retry_after_s=1)
        self.body_bytes += size

    def free_body(self, size: int) -> None:
        self.body_bytes -= size
        assert self.body_bytes >= 0

    def open(self, count: int, tenant: str) -> None:
        """Take `count` generations in, all or none. Each ends with `close`; `first_token` says it waits no more.

        `tenant` is empty where callers are not told apart; else its own bound applies too.
        """
        if self.streams + count > self._limits.streams:
            raise ApiError(
                429, f"{self._limits.streams} generations are open", code="rate_limit_exceeded", retry_after_s=1
            )
        if tenant and self._of_tenant[tenant] + count > self._limits.tenant_streams:
            most, has = self._limits.tenant_streams, self._of_tenant[tenant]
            raise ApiError(
                429,
                f"this key has {has} of {most} generations open (the gateway's --max-key-streams)",
                code="rate_limit_exceeded",
                retry_after_s=1,
                headers={
                    "x-ratelimit-limit-requests": str(most),
                    "x-ratelimit-remaining-requests": str(most - has),
                    "x-ratelimit-reset-requests": "1s",  # the same guess as Retry-After: when one ends is not known
                },
            )
        if self.waiting + count > self._limits.queue:
            raise ApiError(429, f"{self._limits.queue} requests wait here", code="queue_full", retry_after_s=1)
        self.streams += count
        self.idle.clear()
        self.waiting += count
        if tenant:
            self._of_tenant[tenant] += count

    def first_token(self) -> None:
        self.waiting -= 1
        assert self.waiting >= 0

    def close(self, tenant: str) -> None:
        if tenant:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
        self.streams -= 1
        assert self.streams >= 0
        if not self.streams:
            self.idle.set()
