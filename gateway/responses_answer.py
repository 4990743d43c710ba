"""OpenAI's Responses answer: the response object, or numbered events that build it up.

Each block of the answer is an output item: reasoning, a message, a function call. The last event holds the same object
that is answered without streaming.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.blocks import Block, Blocks, Step
from gateway.chat_answer import token_object
from gateway.errors import ApiError
from gateway.generation import Generation, Update
from gateway.sse import KEEP_ALIVE, json_text, named_event
from gateway.text.deltas import Kind
from gateway.text.tokenizer import Tokenizer
from gateway.token_path import Around
from meshkit.types import TokenLogprobs

_ITEMS: Mapping[Kind, tuple[str, str]] = {
    "reasoning": ("rs", "response.reasoning_text"),
    "content": ("msg", "response.output_text"),
    "tool_call": ("fc", "response.function_call_arguments"),
}
"""Prefix of an item's id, and stem of the events about its text."""


class ResponsesAnswer:
    """Builds the answer of one Responses request; a `WholeRenderer`."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        name: str,
        model: str,
        echo: Mapping[str, Any],
        logprobs: bool,
        keep: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """`name` is the response's id, `echo` the settings the response repeats; `keep` takes the whole answer."""
        self._keep = keep
        self._generation = generation
        self._choice = generation.jobs[0].choices[0]
        self._tokenizer = tokenizer
        self._name = name.removeprefix("resp_")
        self._logprobs = logprobs
        self._head = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **echo,
        }
        self._blocks = Blocks()
        self._sequence = 0
        self._around = (b"", b"")  # the bytes before and after the text of the open block's deltas

    # ---- streamed ---------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def around(self, index: int) -> Around:
        return {}

    def render(self, updates: list[Update]) -> bytes:
        events: list[bytes] = []
        for update in updates:
            for step in self._blocks.take(update.deltas):
                events += self._step(step)
            if update.ended:
                for step in self._blocks.end(cut=self._choice.finish == "length"):
                    events += self._step(step)
        return b"".join(events)

    def closing(self) -> bytes:
        response = self.message()
        return self._event(f"response.{response['status']}", response=response)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        response = {**self._response("failed"), "error": {"code": _code(error), "message": error.message}}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(kind, {"type": kind, **fields, "sequence_number": number})

    def _step(self, step: Step) -> list[bytes]:
        block = step.block
        if step.what == "grow":
            return [self._delta(step)]
        return self._opened(block) if step.what == "open" else self._closed(block)

    def _opened(self, block: Block) -> list[bytes]:
        item = {**self._item(block), "status": "in_progress"}
        if block.kind != "tool_call":
            item["content"] = []
        events = [self._event("response.output_item.added", item=item, output_index=block.index)]
        if block.kind != "tool_call":
            events.append(self._event("response.content_part.added", part=self._part(block), **self._place(block)))
        self._around = self._cut(block)
        return events

    def _closed(self, block: Block) -> list[bytes]:
        stem, place = _ITEMS[block.kind][1], self._place(block)
        events: list[bytes] = []
        if block.kind == "tool_call":
            events.append(self._event(f"{stem}.done", arguments=block.text, name=block.name, **place))
        else:
            extra = {"logprobs": self._tokens(block.entries)} if block.kind == "content" else {}
            events.append(self._event(f"{stem}.done", text=block.text, **extra, **place))
            events.append(self._event("response.content_part.done", part=self._part(block), **place))
        item = self._item(block)
        events.append(self._event("response.output_item.done", item=item, output_index=block.index))
        return events

    def _delta(self, step: Step) -> bytes:
        """A piece of text; without log-probabilities cut from prebuilt bytes."""
        if self._logprobs and step.block.kind == "content":
            logprobs = self._tokens(step.entries)
            place = self._place(step.block)
            return self._event("response.output_text.delta", delta=step.text, logprobs=logprobs, **place)
        before, after = self._around
        number, self._sequence = self._sequence, self._sequence + 1
        return before + json_text(step.text) + after + b"%d}\n\n" % number

    def _cut(self, block: Block) -> tuple[bytes, bytes]:
        kind, mark = f"{_ITEMS[block.kind][1]}.delta", "\x00"
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        fields = {"type": kind, "delta": mark, **extra, **self._place(block), "sequence_number": 0}
        before, _, after = named_event(kind, fields).partition(json_text(mark))
        return before, after.removesuffix(b"0}\n\n")

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "tool_call":
            place["content_index"] = 0
        return place

    # ---- whole ------------------------------------------------------------------------------------------------------

    def collect(self, updates: list[Update]) -> None:
        for update in updates:
            for _ in self._blocks.take(update.deltas):
                continue
            if update.ended:
                for _ in self._blocks.end(cut=self._choice.finish == "length"):
                    continue

    def message(self) -> dict[str, Any]:
        """The whole answer."""
        response = self._ended()
        if self._keep is not None:
            self._keep(response)
        return response

    def _ended(self) -> dict[str, Any]:
        finish = self._choice.finish
        if finish == "abort":
            error = {"code": "server_error", "message": "the request was aborted"}
            return {**self._response("failed"), "error": error, "usage": self._usage()}
        if finish == "length":
            details = {"reason": "max_output_tokens"}
            return {**self._response("incomplete"), "incomplete_details": details, "usage": self._usage()}
        return {**self._response("completed"), "completed_at": int(time.time()), "usage": self._usage()}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [self._item(block) for block in self._blocks.all],
            "usage": None,
        }

    def _item(self, block: Block) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": "completed" if block.complete else "incomplete"}
        if block.kind == "tool_call":
            return {
                **item,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
        item["content"] = [self._part(block)]
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

    def _item_id(self, block: Block) -> str:
        return f"{_ITEMS[block.kind][0]}_{self._name}_{block.index}"

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._tokens(block.entries)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _tokens(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        if not self._logprobs:
            return []
        listed = [
            [token_object(self._tokenizer, token, value) for token, value in zip(entry.ids, entry.values)]
            for entry in entries
        ]
        return [{**row[0], "top_logprobs": row[1:]} for row in listed]

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        prompt, output = generation.prompt_tokens, generation.output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
            "total_tokens": prompt + output,
        }


def _code(error: ApiError) -> str:
    """OpenAI's code of an error inside a response."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
