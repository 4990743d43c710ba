"""Chat completions as JSON: the whole message, or chunks whose deltas add up to it byte for byte.

The common chunk (text only) is cut from prebuilt bytes; chunks of tool calls, with log-probabilities, token ids or
running usage are built as objects. Reasoning goes into its own field, or into the content, or nowhere, as the request
says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from gateway.answer import OpenAiEvents
from gateway.generation import Choice, Generation, Update
from gateway.prompt_answer import vllm_list
from gateway.sse import DONE, event, json_text, shared
from gateway.text.deltas import CallPiece, Delta, Kind
from gateway.text.prompt import END_THINK, THINK
from gateway.text.tokenizer import Tokenizer
from gateway.token_path import Around
from meshkit.types import TokenLogprobs

ReasoningMode = Literal["separate", "inline", "dropped"]
_FIELDS: Mapping[Kind, str] = {"reasoning": "reasoning_content", "content": "content"}


class ChatAnswer(OpenAiEvents):
    """Builds the answer of one chat request; a `Renderer` when streamed."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        name: str,
        created: int,
        model: str,
        fingerprint: str,
        logprobs: bool,
        token_ids: bool,
        reasoning: ReasoningMode,
        thinking: bool,
        include_usage: bool,
        running_usage: bool,
        last_usage: bool = False,
        prompt_top: int | None = None,
    ) -> None:
        """`last_usage`: the chunk that ends a choice tells the usage, asked for or not.

        `prompt_top`: the whole answer tells the prompt's log-probabilities, with so many alternatives.
        """
        self._prompt_top = prompt_top
        self._generation = generation
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._thinking = thinking and reasoning == "separate"
        self._include_usage = include_usage or running_usage
        self._running_usage = running_usage
        self._last_usage = last_usage
        self._head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}
        self._head["system_fingerprint"] = fingerprint
        choices = [choice for job in generation.jobs for choice in job.choices]
        self._views = {choice.index: _ReasoningView(reasoning, thinking) for choice in choices}
        self._texts: dict[int, dict[Kind, list[str]]] = {c.index: {"reasoning": [], "content": []} for c in choices}
        self._entries: dict[int, dict[Kind, list[TokenLogprobs]]] = {
            c.index: {"reasoning": [], "content": []} for c in choices
        }
        self._calls: dict[int, list[_Call]] = {c.index: [] for c in choices}
        self._unsent_ids: dict[int, list[int]] = {c.index: [] for c in choices}
        self._plain = not (logprobs or token_ids or running_usage)
        self._cut = {c.index: {part: self._around(c.index, part) for part in _FIELDS} for c in choices}

    # ---- streamed ---------------------------------------------------------------------------------------------------

    def around(self, index: int) -> Around:
        if not self._plain:
            return {}
        return {part: cut for part, cut in self._cut[index].items() if self._views[index].leaves(part)}

    def opening(self) -> bytes:
        if self._thinking:
            delta = {"role": "assistant", "content": None, "reasoning_content": ""}
        else:
            delta = {"role": "assistant", "content": "", "reasoning_content": None}
        return b"".join(self._chunk(index, delta) for index in self._views)

    def render(self, updates: list[Update]) -> bytes:
        events: list[bytes] = []
        for update in updates:
            index = update.choice.index
            if self._token_ids:
                self._unsent_ids[index] += update.ids
            for delta in self._views[index].show(update.deltas):
                events.append(self._text(index, delta) if delta.call is None else self._call(index, delta))
            if update.ended:
                events.append(self._last(update.choice))
        return b"".join(events)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._generation.usage()}) + DONE

    def _text(self, index: int, delta: Delta) -> bytes:
        if self._plain:
            before, after = self._cut[index][delta.kind]
            return before + json_text(delta.text) + after
        fields = {"content": None, "reasoning_content": None, _FIELDS[delta.kind]: delta.text}
        logprobs = self._logprobs_of({delta.kind: delta.logprobs}) if self._logprobs else None
        return self._chunk(index, fields, logprobs=logprobs)

    def _call(self, index: int, delta: Delta) -> bytes:
        """A piece of a tool call: the first chunk has its name and no arguments, later ones arguments alone."""
        call = delta.call
        assert call is not None
        pieces: list[dict[str, Any]] = []
        if call.opens:
            function = {"name": call.name, "arguments": ""}
            pieces.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        if delta.text:
            pieces.append({"index": call.index, "function": {"arguments": delta.text}})
        fields = {"content": None, "reasoning_content": None}
        return b"".join([self._chunk(index, {**fields, "tool_calls": [piece]}) for piece in pieces])

    def _last(self, choice: Choice) -> bytes:
        end = {
            "finish_reason": choice.finish,
            "matched_stop": choice.matched,
            "stop_reason": choice.stop_reason,
        }
        return self._chunk(choice.index, {"content": "", "reasoning_content": None}, **end)

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        if self._token_ids:
            choice["token_ids"], self._unsent_ids[index] = self._unsent_ids[index], []
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        ends = self._last_usage and fields.get("finish_reason") is not None
        if self._include_usage or ends:
            chunk["usage"] = self._generation.usage() if self._running_usage or ends else None
        return event(chunk)

    def _around(self, index: int, part: Kind) -> tuple[bytes, bytes]:
        """The bytes of a plain chunk before and after its text."""
        mark = "\x00"
        delta = {"content": None, "reasoning_content": None, _FIELDS[part]: mark}
        before, _, after = self._chunk(index, delta).partition(json_text(mark))
        return before, shared(after)

    # ---- whole ------------------------------------------------------------------------------------------------------

    def collect(self, updates: list[Update]) -> None:
        """Take text for `message`."""
        for update in updates:
            index = update.choice.index
            for delta in self._views[index].show(update.deltas):
                if delta.call is not None:
                    self._collect_call(index, delta.call, delta.text)
                    continue
                self._texts[index][delta.kind].append(delta.text)
                self._entries[index][delta.kind] += delta.logprobs

    def _collect_call(self, index: int, call: CallPiece, arguments: str) -> None:
        if call.opens:
            self._calls[index].append(_Call(call.id, call.name, []))
        self._calls[index][call.index].arguments.append(arguments)

    def message(self) -> dict[str, Any]:
        """The whole answer."""
        answer: dict[str, Any] = {**self._head, "object": "chat.completion"}
        answer["choices"] = [self._choice(choice) for job in self._generation.jobs for choice in job.choices]
        answer["usage"] = self._generation.usage()
        if self._token_ids:
            answer["prompt_token_ids"] = list(self._generation.jobs[0].prompt)
        if self._prompt_top is not None:
            answer["prompt_logprobs"] = vllm_list(self._generation.jobs[0], self._tokenizer, self._prompt_top)
        return answer

    def _choice(self, choice: Choice) -> dict[str, Any]:
        texts = {part: "".join(pieces) for part, pieces in self._texts[choice.index].items()}
        reasoning = texts["reasoning"] if self._thinking or texts["reasoning"] else None
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "reasoning_content": reasoning}
        if calls := self._calls[choice.index]:
            message["tool_calls"] = [call.whole() for call in calls]
        whole: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs_of(self._entries[choice.index]) if self._logprobs else None,
            "finish_reason": choice.finish,
            "matched_stop": choice.matched,
            "stop_reason": choice.stop_reason,
        }
        if self._token_ids:
            whole["token_ids"] = choice.ids
        return whole

    def _logprobs_of(self, entries: Mapping[Kind, Sequence[TokenLogprobs]]) -> dict[str, Any]:
        return {
            "content": [self._token(entry) for entry in entries.get("content", ())],
            "reasoning_content": [self._token(entry) for entry in entries.get("reasoning", ())],
            "refusal": None,
        }

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        listed = [token_object(self._tokenizer, token, value) for token, value in zip(entry.ids, entry.values)]
        return {**listed[0], "top_logprobs": listed[1:]}


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool call as it is gathered."""

    id: str
    name: str
    arguments: list[str]

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class _ReasoningView:
    """Where one choice's reasoning goes."""

    def __init__(self, mode: ReasoningMode, thinking: bool) -> None:
        self._mode = mode
        self._thinking = thinking
        self._open = False

    def leaves(self, kind: Kind) -> bool:
        """Whether deltas of this part are always shown as they are."""
        return self._mode == "separate" or not self._thinking

    def show(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        if self._mode == "separate" or not self._thinking:
            return deltas
        if self._mode == "dropped":
            return [delta for delta in deltas if delta.kind != "reasoning"]
        return [shown for delta in deltas for shown in self._inlined(delta)]

    def _inlined(self, delta: Delta) -> Sequence[Delta]:
        text = delta.text
        if delta.kind == "tool_call":
            closing, self._open = self._open, False
            return [Delta("content", END_THINK, ()), delta] if closing else [delta]
        if delta.kind == "reasoning" and not self._open:
            self._open, text = True, THINK + text
        elif delta.kind == "content" and self._open:
            self._open, text = False, END_THINK + text
        return [replace(delta, kind="content", text=text)]


def token_object(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """A token with its log-probability as OpenAI writes it; minus infinity is -9999."""
    return {
        "token": tokenizer.token_text(token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def finite(logprob: float) -> float:
    return logprob if logprob > -9999.0 else -9999.0
