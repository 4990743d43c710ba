"""Text completions as JSON: the whole answer, or chunks whose texts add up to it byte for byte.

The common chunk (text only) is cut from prebuilt bytes; chunks with log-probabilities, token ids or running usage are
built as objects.
"""

from collections.abc import Sequence
from typing import Any

from gateway.answer import OpenAiEvents
from gateway.chat_answer import finite
from gateway.generation import Choice, Generation, Update
from gateway.prompt_answer import completion_lists, vllm_list
from gateway.sse import DONE, event, json_text, shared
from gateway.text.output_parser import Delta
from gateway.text.tokenizer import Tokenizer
from gateway.token_path import Around


class CompletionAnswer(OpenAiEvents):
    """Builds the answer of one completions request; a `Renderer` when streamed."""

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
        echoes: Sequence[str],
        include_usage: bool,
        running_usage: bool,
        last_usage: bool,
        prompt_top: int | None = None,
    ) -> None:
        """`echoes` are the prompts' texts if they are to be repeated, else empty.

        `last_usage`: the chunk that ends a choice has it, asked for or not. `prompt_top`: the whole answer tells the
        prompt's log-probabilities, with so many alternatives, in vLLM's form too.
        """
        self._generation = generation
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._include_usage = include_usage or running_usage
        self._running_usage = running_usage
        self._last_usage = last_usage
        self._head = {"id": name, "object": "text_completion", "created": created, "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._echo: dict[int, str] = {}
        for job, echo in zip(generation.jobs, echoes, strict=False):
            self._echo |= {choice.index: echo for choice in job.choices}
        self._prompt_top = prompt_top
        self._job_of = {choice.index: job for job in generation.jobs for choice in job.choices}
        self._top = max((job.scores.output_top for job in generation.jobs if job.scores is not None), default=0)
        # An echo with its log-probabilities is sent once they are all there.
        self._late_echo = set(self._echo) if logprobs else set()
        self._choices = [choice for job in generation.jobs for choice in job.choices]
        self._deltas: dict[int, list[Delta]] = {choice.index: [] for choice in self._choices}
        self._lengths = {choice.index: len(self._echo.get(choice.index, "")) for choice in self._choices}
        self._unsent_ids: dict[int, list[int]] = {choice.index: [] for choice in self._choices}
        self._plain = not (logprobs or token_ids or running_usage)
        self._cut = {choice.index: self._around(choice.index) for choice in self._choices}

    # ---- streamed ---------------------------------------------------------------------------------------------------

    def around(self, index: int) -> Around:
        return {"content": self._cut[index]} if self._plain else {}

    def opening(self) -> bytes:
        return b"".join(self._chunk(index, echo) for index, echo in self._echo.items() if index not in self._late_echo)

    def render(self, updates: list[Update]) -> bytes:
        events: list[bytes] = []
        for update in updates:
            index = update.choice.index
            if index in self._late_echo:
                self._late_echo.discard(index)
                events.append(self._chunk(index, self._echo[index], logprobs=self._echoed(index)))
            if self._token_ids:
                self._unsent_ids[index] += update.ids
            for delta in update.deltas:
                events.append(self._text(index, delta))
            if update.ended:
                events.append(self._chunk(index, "", **_end(update.choice)))
        return b"".join(events)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._generation.usage()}) + DONE

    def _text(self, index: int, delta: Delta) -> bytes:
        if self._plain:
            before, after = self._cut[index]
            return before + json_text(delta.text) + after
        logprobs = self._logprobs_of([delta], self._lengths[index]) if self._logprobs else None
        self._lengths[index] += len(delta.text)
        return self._chunk(index, delta.text, logprobs=logprobs)

    def _chunk(self, index: int, text: str, **fields: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **fields}
        if self._token_ids:
            choice["token_ids"], self._unsent_ids[index] = self._unsent_ids[index], []
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        ends = self._last_usage and fields.get("finish_reason") is not None
        if self._include_usage or ends:
            chunk["usage"] = self._generation.usage() if self._running_usage or ends else None
        return event(chunk)

    def _around(self, index: int) -> tuple[bytes, bytes]:
        mark = "\x00"
        before, _, after = self._chunk(index, mark).partition(json_text(mark))
        return before, shared(after)

    # ---- whole ------------------------------------------------------------------------------------------------------

    def collect(self, updates: list[Update]) -> None:
        """Take text for `whole`."""
        for update in updates:
            self._deltas[update.choice.index] += update.deltas

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._whole_choice(choice) for choice in self._choices]
        return {**self._head, "choices": choices, "usage": self._generation.usage()}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        deltas = self._deltas[choice.index]
        echo = self._echo.get(choice.index, "")
        whole: dict[str, Any] = {
            "index": choice.index,
            "text": echo + "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs_of(deltas, len(echo)) if self._logprobs else None,
            **_end(choice),
        }
        if self._logprobs and choice.index in self._echo:
            echoed = self._echoed(choice.index)
            whole["logprobs"] = {name: [*echoed[name], *values] for name, values in whole["logprobs"].items()}
        if self._prompt_top is not None:
            whole["prompt_logprobs"] = vllm_list(self._job_of[choice.index], self._tokenizer, self._prompt_top)
        if self._token_ids:
            whole["token_ids"] = choice.ids
            prompts = {c.index: job.prompt for job in self._generation.jobs for c in job.choices}
            whole["prompt_token_ids"] = list(prompts[choice.index])
        return whole

    def _echoed(self, index: int) -> dict[str, Any]:
        return completion_lists(self._job_of[index], self._tokenizer, self._top, len(self._echo[index]))

    def _logprobs_of(self, deltas: Sequence[Delta], offset: int) -> dict[str, Any]:
        """The four parallel lists; `offset` counts the characters before the first delta."""
        tokens: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        text_of = self._tokenizer.token_text
        for delta in deltas:
            data = b""
            for entry in delta.logprobs:
                before = len(data.decode(errors="ignore"))
                data += self._tokenizer.token_bytes(entry.ids[0])
                offsets.append(offset + min(before, len(delta.text)))
                tokens.append(text_of(entry.ids[0]))
                values.append(finite(entry.values[0]))
                tops.append({text_of(token): finite(value) for token, value in zip(entry.ids, entry.values)})
            offset += len(delta.text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _end(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish, "matched_stop": choice.matched, "stop_reason": choice.stop_reason}
