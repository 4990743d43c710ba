"""One training document: a conversation or plain prose, and its token ids with a weight on each.

Chats are rendered by the project's own encoder, so what the model sees in training and in serving are the same bytes.
What the assistant writes counts fully, everything else little: names and numbers in prompts are noise to a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gateway.text import prompt as markers
from gateway.text.chat_encoding import ChatOptions, ResponseFormat, encode_chat
from gateway.text.chat_messages import Message, ToolCall, ToolSpec
from gateway.text.prompt import Prompt
from gateway.text.tokenizer import Tokenizer
from gateway.text.tool_encoding import add_calls

PROMPT_WEIGHT = 0.1
PROSE_WEIGHT = 0.5
_LEAST_MATCH, _LONGEST_MATCH, _MOST_CANDIDATES = 3, 12, 100
Role = Literal["user", "tool"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What comes in, and what the assistant makes of it. With role `tool`, `asked` is the result of each last call."""

    asked: str | tuple[str, ...]
    answer: str
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    role: Role = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A conversation, or prose when there are no exchanges.

    `blind` documents are trained without C4 entries, so that the C128 entries must carry what their answers need;
    `short` ones with a window of a few tokens, so that the C4 entries must.
    """

    kind: str
    exchanges: Sequence[Exchange] = ()
    system: str = ""
    thinking: bool = False
    effort: str = "low"
    tools: tuple[ToolSpec, ...] = ()
    response_format: ResponseFormat = "text"
    response_schema: Any = None
    prose: str = ""
    blind: bool = False
    short: bool = False


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """ids and weights [S]; `answers` are the places (begin, end) of what the assistant wrote, EOS included."""

    kind: str
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    answers: list[tuple[int, int]] = field(default_factory=list)
    blind: bool = False
    short: bool = False

    def sources(self) -> list[tuple[int, int]]:
        """(place in an answer, earlier place that it repeats): the longest match of the tokens up to both, 3 at least.

        These are the places where attention should have looked; training says so to the C4 layers.
        """
        ids: list[int] = self.ids.tolist()
        pairs: dict[tuple[int, int], list[int]] = {}
        found, at = [], 1
        for begin, end in self.answers:
            for place in range(begin, end):
                while at < place:
                    pairs.setdefault((ids[at - 1], ids[at]), []).append(at)
                    at += 1
                candidates = pairs.get((ids[place - 1], ids[place]), ())
                if not candidates or len(candidates) > _MOST_CANDIDATES:
                    continue
                lengths = [_match(ids, candidate, place) for candidate in candidates]
                best = max(lengths)
                if best >= _LEAST_MATCH:
                    found.append((place, candidates[len(lengths) - 1 - lengths[::-1].index(best)]))
        return found


def _match(ids: list[int], first: int, second: int) -> int:
    length = 0
    while length < _LONGEST_MATCH and length <= first and ids[first - length] == ids[second - length]:
        length += 1
    return length


def tokenize(document: Document, tokenizer: Tokenizer) -> TokenizedDocument:
    """Token ids of a document, supervised where the assistant speaks."""
    if not document.exchanges:
        prompt = Prompt()
        prompt.mark(markers.BOS)
        prompt.text(document.prose)
        prompt.mark(markers.EOS)
        ids = prompt.encode(tokenizer)
        return TokenizedDocument(document.kind, np.array(ids, np.int32), np.full(len(ids), PROSE_WEIGHT, np.float32))
    ids = prompt_ids(document, tokenizer) + answer_ids(document.exchanges[-1], document.thinking, tokenizer)
    answers = _spoken(ids, tokenizer)
    weights = np.full(len(ids), PROMPT_WEIGHT, np.float32)
    for begin, end in answers:
        weights[begin:end] = 1.0
    return TokenizedDocument(document.kind, np.array(ids, np.int32), weights, answers, document.blind, document.short)


def prompt_ids(document: Document, tokenizer: Tokenizer) -> list[int]:
    """The prompt of the last answer, history included."""
    options = ChatOptions(
        thinking=document.thinking,
        effort=document.effort,
        tools=document.tools,
        response_format=document.response_format,
        response_schema=document.response_schema,
    )
    return encode_chat(tokenizer, _messages(document), options).ids


def answer_ids(exchange: Exchange, thinking: bool, tokenizer: Tokenizer) -> list[int]:
    """What the assistant should write after its header, with the end of sequence."""
    prompt = Prompt()
    if thinking:
        prompt.text(exchange.reasoning)
        prompt.mark(markers.END_THINK)
    prompt.text(exchange.answer)
    if exchange.calls:
        add_calls(prompt, [ToolCall("", name, arguments) for name, arguments in exchange.calls])
    prompt.mark(markers.EOS)
    return prompt.encode(tokenizer)


def _messages(document: Document) -> list[Message]:
    messages = [Message("system", document.system)] if document.system else []
    calls: tuple[ToolCall, ...] = ()
    for number, exchange in enumerate(document.exchanges):
        if exchange.role == "tool":
            messages += [Message("tool", text, tool_call_id=call.id) for call, text in zip(calls, exchange.asked)]
        else:
            assert isinstance(exchange.asked, str)
            messages.append(Message("user", exchange.asked))
        calls = tuple(
            ToolCall(f"{number}/{place}", name, arguments) for place, (name, arguments) in enumerate(exchange.calls)
        )
        messages.append(Message("assistant", exchange.answer, exchange.reasoning or None, calls))
    return messages[:-1]


def _spoken(ids: list[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Places after `<Assistant>` and its think marker, up to and with the end of sequence."""
    assistant, eos = tokenizer.id_of(markers.ASSISTANT), tokenizer.id_of(markers.EOS)
    assert assistant is not None and eos is not None, "the vocabulary lacks the chat markers"
    begins = [place + 2 for place, token in enumerate(ids) if token == assistant]
    return [(begin, ids.index(eos, begin) + 1) for begin in begins]
