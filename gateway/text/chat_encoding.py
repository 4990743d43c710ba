"""DeepSeek-V4's chat prompt: conversation and mode to token ids, in pure Python.

The prompt is `BOS effort system turns header`; system texts move to the front, consecutive user and tool messages share
one turn, earlier reasoning is dropped unless tools are offered, and effort is a fixed text. The fixed texts are data
(`chat_constants.json`, made by `tools/chat_constants.py`). Sampling, grammars and the output's parsing are elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Final, Literal

from gateway.text import prompt as markers
from gateway.text.chat_messages import ChatError, Message, Profile, ThinkingMode, ToolCall, ToolSpec
from gateway.text.chat_messages import parse_messages as parse_messages
from gateway.text.chat_messages import parse_tools as parse_tools
from gateway.text.chat_messages import resolve_thinking as resolve_thinking
from gateway.text.prompt import MissingMarkerError as MissingMarkerError
from gateway.text.prompt import Prompt
from gateway.text.tokenizer import PromptTooLong, Tokenizer
from gateway.text.tool_encoding import add_calls, order_results, result_text, schema_line, to_json

CONSTANTS: Final[dict[str, str]] = json.loads(Path(__file__).with_name("chat_constants.json").read_text("utf-8"))
EffortRevision = Literal["preview", "ga"]
ResponseFormat = Literal["text", "json_object", "json_schema", "regex", "structural_tag"]
ToolChoice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Everything but the messages that shapes a prompt.

    `effort_revision` is the checkpoint's: which efforts have a text. `response_schema` is the JSON schema of
    `json_schema`. `keep_reasoning` leaves earlier reasoning in place as tools do. `profile` "deepseek" repeats the
    hosted service's refusals.
    """

    thinking: bool = True
    effort: str = "high"
    effort_revision: EffortRevision = "ga"
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = "auto"
    response_format: ResponseFormat = "text"
    response_schema: Any = None
    continue_final_message: bool = False
    keep_reasoning: bool = False
    task: str | None = None
    profile: Profile = "open"

    @property
    def tools_active(self) -> bool:
        """Whether tools are rendered and calls parsed."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt and how its output begins.

    `starts_in` says what the first generated token belongs to. `fresh_turn` is false when the output continues text of
    the client's: leading newlines are then the model's intention and stay.
    """

    ids: list[int]
    text: str
    starts_in: Literal["reasoning", "content"]
    fresh_turn: bool
    thinking: bool
    tools_active: bool


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], options: ChatOptions, *, limit: int | None = None
) -> EncodedPrompt:
    """The prompt of a conversation. Raises `ChatError`, and `PromptTooLong` beyond `limit` ids."""
    if not messages:
        raise ChatError("messages must be a list of at least one message", "messages")
    _check(messages, options)
    prompt = Prompt()
    prompt.mark(markers.BOS)
    if options.thinking:
        prompt.text(effort_text(options.effort, options.effort_revision))
    _add_system(prompt, messages, options)
    turns = [(index, message) for index, message in enumerate(messages) if message.role != "system"]
    continued = turns.pop()[1] if _continues(messages, options) else None
    _add_turns(prompt, turns, options)
    if continued:
        starts_in, fresh = _add_continued(prompt, continued, options.thinking)
    else:
        starts_in, fresh = _add_header(prompt, options), True
    return EncodedPrompt(
        prompt.encode(tokenizer, limit), prompt.render(), starts_in, fresh, options.thinking, options.tools_active
    )


def encode_fim(tokenizer: Tokenizer, prefix: str, suffix: str, *, limit: int | None = None) -> list[int]:
    """Ids that ask for the text between `prefix` and `suffix`; both are raw, as the completions route has them."""
    marks = {}
    for token in (markers.BOS, "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"):
        token_id = tokenizer.id_of(token)
        if token_id is None:
            raise MissingMarkerError(token, "suffix")
        marks[token] = token_id
    bos, begin, hole, end = marks.values()
    before = tokenizer.encode(prefix, limit=limit)
    ids = [bos, begin, *before, hole, *tokenizer.encode(suffix, limit=limit), end]
    if limit is not None and len(ids) > limit:
        raise PromptTooLong(limit, len(ids))
    return ids


def effort_text(effort: str, revision: EffortRevision) -> str:
    """The text an effort puts in front of the system part of a thinking prompt."""
    if revision == "ga":
        if effort in ("max", "ultra"):
            return CONSTANTS["effort_2"]
        return CONSTANTS["effort_1"] if effort in ("medium", "high", "xhigh") else ""
    return CONSTANTS["effort_1"] if effort in ("xhigh", "max", "ultra") else ""


def effort_revision(model_folder: Path) -> EffortRevision:
    """The revision of a checkpoint, told by whether the encoding script beside its weights knows the second text."""
    script = model_folder / "encoding" / "encoding_dsv4.py"
    if not script.is_file():
        return "ga"
    opening = CONSTANTS["effort_2"].partition("—")[0]
    return "ga" if opening in script.read_text("utf-8", errors="replace") else "preview"


def _continues(messages: Sequence[Message], options: ChatOptions) -> bool:
    return messages[-1].role == "assistant" and (messages[-1].prefix or options.continue_final_message)


def _check(messages: Sequence[Message], options: ChatOptions) -> None:
    """What can be refused before anything is rendered."""
    last = messages[-1]
    if options.continue_final_message and last.role != "assistant":
        raise ChatError("continue_final_message needs an assistant message at the end", "continue_final_message")
    if options.response_format == "json_schema" and options.response_schema is None:
        raise ChatError("response_format json_schema needs json_schema.schema", "response_format")
    if options.task is not None:
        _check_task(options.task, messages, options)
    if options.profile == "deepseek":
        _check_hosted(messages, options)


def _check_task(task: str, messages: Sequence[Message], options: ChatOptions) -> None:
    if task not in markers.TASKS:
        raise ChatError(f"task is {task!r}; accepted: {', '.join(markers.TASKS)}", "task")
    if _continues(messages, options):
        raise ChatError("task cannot be combined with a message to continue", "task")
    needs = "assistant" if task == "title" else "user"
    if task != "action" and messages[-1].role != needs:
        raise ChatError(f"task {task} needs a conversation that ends with a message of role {needs}", "task")


def _check_hosted(messages: Sequence[Message], options: ChatOptions) -> None:
    """Refusals of the hosted service that the open profile does without."""
    if options.response_format == "json_object" and not any("json" in m.content.lower() for m in messages):
        raise ChatError("response_format json_object needs the word 'json' in some message", "response_format")
    if not (options.thinking and options.tools_active):
        return
    if options.tool_choice in ("required", "named"):
        raise ChatError("Thinking mode does not support this tool_choice", "tool_choice")
    for index, message in enumerate(messages):
        if message.role == "assistant" and message.reasoning is None and not message.prefix:
            where = f"messages[{index}].reasoning_content"
            raise ChatError(f"{where} must be passed back in thinking mode with tools", where)


def _add_system(prompt: Prompt, messages: Sequence[Message], options: ChatOptions) -> None:
    """All system texts, wherever they stood, the tools and the response format."""
    prompt.text("\n\n".join(m.content for m in messages if m.role == "system" and m.content))
    if options.tools_active:
        prompt.markup(CONSTANTS["tools_head"])
        prompt.text("\n".join(schema_line(tool, f"tools[{i}]") for i, tool in enumerate(options.tools)))
        prompt.markup(CONSTANTS["tools_tail"])
    if options.response_format == "json_object":
        prompt.text(CONSTANTS["json_object"])
    elif options.response_format == "json_schema":
        prompt.text(CONSTANTS["json_schema"] + to_json(options.response_schema, "response_format"))


def _add_turns(prompt: Prompt, turns: Sequence[tuple[int, Message]], options: ChatOptions) -> None:
    """Finished turns, each message with its place in the request."""
    calls: tuple[ToolCall, ...] = ()
    caller = ""
    for user_side, run in groupby(turns, key=lambda turn: turn[1].role in ("user", "tool")):
        if user_side:
            _add_user(prompt, [message for _, message in run], calls, caller)
            calls = ()
            continue
        for index, message in run:
            order_results(calls, [], caller)
            calls, caller = message.tool_calls, f"messages[{index}]"
            if message.role == "assistant":
                _add_assistant(prompt, message, options)
            else:
                prompt.mark(markers.REMINDER)
                prompt.text(message.content)
    order_results(calls, [], caller)


def _add_user(prompt: Prompt, turn: Sequence[Message], calls: Sequence[ToolCall], caller: str) -> None:
    """User and tool messages that follow each other: results first, in the order of the calls, then the texts."""
    results = list(takewhile(lambda message: message.role == "tool", turn))
    texts = turn[len(results) :]
    if any(message.role == "tool" for message in texts) or (results and not calls):
        raise ChatError("a tool message must follow the assistant message whose tool_calls it answers", "messages")
    parts = [result_text(message) for message in order_results(calls, results, caller)]
    if texts:
        parts.append("\n\n".join(message.content for message in texts if message.content))
    prompt.mark(markers.USER)
    prompt.text("\n\n".join(parts))


def _add_assistant(prompt: Prompt, message: Message, options: ChatOptions) -> None:
    """A finished assistant turn; its reasoning stays in a thinking conversation with tools, or where that is asked."""
    prompt.mark(markers.ASSISTANT)
    if options.thinking and (options.tools_active or options.keep_reasoning):
        prompt.mark(markers.THINK)
        prompt.text(message.reasoning or "")
    prompt.mark(markers.END_THINK)
    prompt.text(message.content)
    if message.tool_calls:
        add_calls(prompt, message.tool_calls)
    prompt.mark(markers.EOS)


def _add_continued(prompt: Prompt, message: Message, thinking: bool) -> tuple[Literal["reasoning", "content"], bool]:
    """An assistant turn left open for the model to continue."""
    if message.tool_calls:
        raise ChatError("a message to continue cannot have tool_calls", "messages")
    prompt.mark(markers.ASSISTANT)
    if not thinking:
        prompt.mark(markers.END_THINK)
        prompt.text(message.content)
        return "content", not message.content
    prompt.mark(markers.THINK)
    prompt.text(message.reasoning or "")
    if not message.content:
        return "reasoning", not message.reasoning
    prompt.mark(markers.END_THINK)
    prompt.text(message.content)
    return "content", False


def _add_header(prompt: Prompt, options: ChatOptions) -> Literal["reasoning", "content"]:
    """The opening of the model's turn, or the token of a quick task."""
    task = options.task
    if task is None or task == "action":
        prompt.mark(markers.ASSISTANT)
        prompt.mark(markers.THINK if options.thinking else markers.END_THINK)
    if task is not None:
        prompt.mark(markers.TASKS[task], "task")
        return "content"
    return "reasoning" if options.thinking else "content"


__all__ = [
    "ChatError",
    "ChatOptions",
    "EncodedPrompt",
    "Message",
    "MissingMarkerError",
    "ThinkingMode",
    "ToolCall",
    "ToolSpec",
    "effort_revision",
    "effort_text",
    "encode_chat",
    "encode_fim",
    "parse_messages",
    "parse_tools",
    "resolve_thinking",
]
