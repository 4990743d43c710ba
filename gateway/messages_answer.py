"""Anthropic's Messages answer: the whole message, or events whose deltas add up to it.

Thinking is a block of its own, with a signature that says only where it comes from; a call's input is an object.
Tokens read from the prefix cache are counted apart from the input, as Anthropic does.
"""

import json
from typing import Any

from gateway.anthropic_errors import anthropic_error
from gateway.blocks import Block, Blocks, Step
from gateway.errors import ApiError
from gateway.generation import Generation, Update
from gateway.sse import json_text, named_event
from gateway.text.deltas import Kind
from gateway.token_path import Around

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: dict[Kind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}
_PING = named_event("ping", {"type": "ping"})


class MessagesAnswer:
    """Builds the answer of one Messages request; a `WholeRenderer`."""

    def __init__(self, generation: Generation, *, name: str, model: str, label: str) -> None:
        """`label` is the request's id in errors."""
        self._generation = generation
        self._choice = generation.jobs[0].choices[0]
        self._name = name
        self._label = label
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        self._blocks = Blocks()
        self._around = (b"", b"")  # the bytes before and after the text of the open block's deltas

    # ---- streamed ---------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        return named_event("message_start", {"type": "message_start", "message": message})

    def around(self, index: int) -> Around:
        return {}

    def render(self, updates: list[Update]) -> bytes:
        events: list[bytes] = []
        for update in updates:
            events += [self._event(step) for step in self._blocks.take(update.deltas)]
            if update.ended:
                events += [self._event(step) for step in self._end()]
        return b"".join(events)

    def closing(self) -> bytes:
        self._check_aborted()
        usage = self._usage(self._generation.output_tokens)
        ending = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        return named_event("message_delta", ending) + named_event("message_stop", {"type": "message_stop"})

    def keep_alive(self) -> bytes:
        return _PING

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", anthropic_error(error, self._label))

    def _event(self, step: Step) -> bytes:
        block = step.block
        if step.what == "grow":
            before, after = self._around
            return before + json_text(step.text) + after
        if step.what == "open":
            self._around = self._cut(block)
            start = {"type": "content_block_start", "index": block.index, "content_block": _opened(block)}
            return named_event("content_block_start", start) + (_PING if block.index == 0 else b"")
        stop = named_event("content_block_stop", {"type": "content_block_stop", "index": block.index})
        if block.kind != "reasoning":
            return stop
        return self._delta(block, {"type": "signature_delta", "signature": self._name}) + stop

    def _cut(self, block: Block) -> tuple[bytes, bytes]:
        kind, field = _DELTAS[block.kind]
        mark = "\x00"
        before, _, after = self._delta(block, {"type": kind, field: mark}).partition(json_text(mark))
        return before, after

    def _delta(self, block: Block, delta: dict[str, str]) -> bytes:
        value = {"type": "content_block_delta", "index": block.index, "delta": delta}
        return named_event("content_block_delta", value)

    # ---- whole ------------------------------------------------------------------------------------------------------

    def collect(self, updates: list[Update]) -> None:
        for update in updates:
            for _ in self._blocks.take(update.deltas):
                continue

    def message(self) -> dict[str, Any]:
        """The whole answer."""
        self._check_aborted()
        content = [self._whole(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage(self._generation.output_tokens)}

    def _whole(self, block: Block) -> dict[str, Any]:
        if block.kind == "tool_call":
            return {**_opened(block), "input": arguments_object(block.text)}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": self._name}
        return {"type": "text", "text": block.text}

    # ---- both -------------------------------------------------------------------------------------------------------

    def _end(self) -> list[Step]:
        return list(self._blocks.end(cut=self._choice.finish == "length"))

    def _stop(self) -> dict[str, str | None]:
        choice = self._choice
        if choice.finish == "stop" and isinstance(choice.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.matched}
        assert choice.finish is not None
        return {"stop_reason": _STOP_REASONS[choice.finish], "stop_sequence": None}

    def _check_aborted(self) -> None:
        """An operator's abort has no stop reason of its own."""
        if self._choice.finish == "abort":
            raise ApiError(503, "the request was aborted", code="aborted", retry_after_s=1)

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        cached = self._generation.cached_tokens
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
            "output_tokens_details": {"thinking_tokens": self._generation.reasoning_tokens if output_tokens else 0},
            "service_tier": "standard",
        }


def _opened(block: Block) -> dict[str, Any]:
    """A block as it begins."""
    if block.kind == "tool_call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as an object. What broke off inside is one argument with the raw text, as in prompts."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text} if text else {}
