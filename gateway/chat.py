"""POST /v1/chat/completions: from the body to a generation.

Checks everything that needs no text first, then encodes the conversation, then starts. Prompts are
`gateway.text.chat_encoding`'s, the answer's JSON is `chat_answer`'s, what the answer must look like is `constraints`'
and `tool_rules`'.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from gateway.answer import WholeRenderer, send_events
from gateway.chat_answer import ChatAnswer, ReasoningMode
from gateway.constraints import Constraint, format_of, format_schema
from gateway.encoding import INLINE_CHARS
from gateway.errors import ApiError, invalid, missing_part
from gateway.exchange import Caller, Exchange, json_response
from gateway.generation import Generation, Job
from gateway.hosted import as_hosted, sampled_as_hosted
from gateway.schema import ChatRequest, RequestFields
from gateway.service import Gateway
from gateway.text.chat_encoding import (
    ChatOptions,
    EncodedPrompt,
    encode_chat,
    parse_messages,
    parse_tools,
    resolve_thinking,
)
from gateway.text.chat_messages import ChatError, Message, keeps_reasoning
from gateway.text.output_parser import OutputParser
from gateway.text.stop_patterns import StopPatterns, stop_search
from gateway.text.stop_strings import StopStrings
from gateway.tool_rules import ToolRule, tool_rule
from gateway.validate import (
    Sampling,
    check_ids,
    check_label,
    check_model,
    check_priority,
    check_salt,
    check_sampling,
    check_stream,
    check_top_logprobs,
    refuse_extras,
)
from meshkit.types import NO_LOGPROBS

AnswerMaker = Callable[[Gateway, ChatRequest, Generation, EncodedPrompt], WholeRenderer]
"""Makes what writes the answer of a conversation in one dialect."""


async def chat_completions(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    return await answer_chat(gateway, exchange, await gateway.body(exchange, ChatRequest), _answer)


async def answer_chat(
    gateway: Gateway, exchange: Exchange, body: ChatRequest, answers: AnswerMaker
) -> web.StreamResponse:
    """Answer a conversation in the words of whichever dialect makes `answers`."""
    job, prompt = await chat_job(gateway, exchange, body)
    with gateway.generation(exchange, [job]) as generation:
        answer = answers(gateway, body, generation, prompt)
        generation.start()
        if body.stream:
            return await send_events(gateway, exchange, generation, answer)
        async for updates in generation.updates():
            answer.collect(updates)
        return json_response(exchange, answer.message())


async def chat_job(gateway: Gateway, caller: Caller, body: ChatRequest) -> tuple[Job, EncodedPrompt]:
    """Check and encode a conversation. Raises ApiError before anything is started."""
    hosted = gateway.config.api_profile == "deepseek"
    if hosted:
        body = as_hosted(body, gateway.model)
    check_model(body.model, gateway.model)
    conversation = conversation_of(gateway, body)
    if hosted:
        body = sampled_as_hosted(body, conversation.options)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs with stream: they are told in whole answers only")
    label = check_label("rid", body.rid if body.rid is not None else body.request_id, gateway.limits)
    caller.conversation = check_label("session_id", body.session_id, gateway.limits) or caller.conversation
    salt, priority = salt_of(gateway, body), check_priority(body.priority)
    given = _given_ids(gateway, body)
    sampling = _check(gateway, body)
    constraint = conversation.constraint(body, sampling.constraint)
    _refuse_missing(body)
    gateway.check_ready()
    prompt = await conversation.encode(gateway, bounded=sampling.cut_to is None)
    ids = prompt.ids if given is None else given
    stops = stop_search(sampling.stops, sampling.stop_patterns)
    job = gateway.job(
        caller,
        sampling,
        ids,
        lambda terminals: _parser(gateway, conversation.options, body, prompt, sampling, constraint, stops, terminals),
        param="messages" if given is None else "input_ids",
        salt=salt,
        priority=priority,
        rid=label,
        constraint=constraint,
        thinking=prompt.starts_in == "reasoning",
    )
    return job, prompt


def _answer(gateway: Gateway, body: ChatRequest, generation: Generation, prompt: EncodedPrompt) -> ChatAnswer:
    return ChatAnswer(
        generation,
        gateway.tokenizer,
        name=generation.named("chatcmpl-"),
        created=int(time.time()),
        model=body.model or gateway.model.name,
        fingerprint=gateway.fingerprint,
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
        reasoning=_reasoning_mode(body),
        thinking=prompt.starts_in == "reasoning",
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        last_usage=gateway.config.api_profile == "deepseek",
        prompt_top=body.prompt_logprobs,
    )


def _parser(
    gateway: Gateway,
    options: ChatOptions,
    body: ChatRequest,
    prompt: EncodedPrompt,
    sampling: Sampling,
    constraint: Constraint | None,
    stops: StopStrings | StopPatterns,
    terminals: frozenset[int],
) -> OutputParser:
    """The parser of one choice. A quick task's answer is content alone, whatever tools its prompt shows."""
    return OutputParser(
        gateway.tokenizer,
        starts_in=prompt.starts_in,
        fresh_turn=prompt.fresh_turn,
        stop=stops,
        include_stop=sampling.keep_stop,
        stop_ids=terminals,
        skip_special_tokens=sampling.skip_special,
        min_tokens=sampling.params.min_tokens,
        tools=options.tools if options.tools_active and options.task is None else (),
        parallel_calls=body.parallel_tool_calls is not False,
        exact=sampling.constraint is not None,
        spelled_calls=constraint is not None,
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, options and which tools may be called, checked; `encode` makes the prompt."""

    messages: tuple[Message, ...]
    options: ChatOptions
    rule: ToolRule

    def constraint(self, body: ChatRequest, answer: Constraint | None) -> Constraint | None:
        """What the whole output must look like; `answer`, what its content must where no tool is called."""
        if self.options.task is not None:  # a quick task's answer never is a call
            if self.rule.forced:
                raise invalid("tool_choice", "tool_choice asks for a call, but the answer of a task is text alone")
            return answer
        return self.rule.constraint(parallel=body.parallel_tool_calls is not False, answer=answer)

    async def encode(self, gateway: Gateway, *, bounded: bool = True) -> EncodedPrompt:
        """`bounded`: 400 for more than the context holds, without encoding the rest."""
        tokenizer, limit = gateway.tokenizer, gateway.model.max_context - 1 if bounded else None
        chars = sum(len(message.content) + len(message.reasoning or "") for message in self.messages)
        if self.options.tools_active:
            chars += INLINE_CHARS  # a list of schemas is seldom short, and measuring it is as much work as writing it
        return await gateway.encoder.run(
            chars, "messages", lambda: encode_chat(tokenizer, self.messages, self.options, limit=limit)
        )


def conversation_of(gateway: Gateway, body: ChatRequest) -> Conversation:
    """Check messages and everything that shapes the prompt."""
    model = gateway.model
    if body.messages is None:
        raise invalid("messages", "messages is required: a list of at least one message")
    if len(body.messages) > gateway.limits.messages:
        raise invalid("messages", f"messages has {len(body.messages)} entries; allowed are {gateway.limits.messages}")
    for index, message in enumerate(body.messages):
        parts = message.get("content")
        if isinstance(parts, list) and len(parts) > gateway.limits.content_parts:
            where = f"messages[{index}].content"
            raise invalid(where, f"{where} has {len(parts)} parts; allowed are {gateway.limits.content_parts}")
    if body.chat_template is not None:
        raise invalid("chat_template", "chat_template cannot be replaced: the model's own encoding is used")
    if body.add_generation_prompt is False and not (
        body.continue_final_message or (body.messages[-1:] and body.messages[-1].get("prefix"))
    ):
        text = "add_generation_prompt = False: the model's turn is always opened; leave it out, or continue a message"
        raise invalid("add_generation_prompt", text)
    try:
        messages = parse_messages(body.messages, gateway.config.api_profile)
        tools = parse_tools(body.tools)
        kept = keeps_reasoning(body.chat_template_kwargs)
        mode = resolve_thinking(
            thinking=body.thinking,
            reasoning_effort=body.reasoning_effort,
            reasoning=body.reasoning,
            template_kwargs=body.chat_template_kwargs,
            default_thinking=model.default_thinking,
            default_effort=model.default_effort,
        )
    except ChatError as error:
        raise invalid(error.param, error.message) from None
    rule = tool_rule(body.tool_choice, tools)
    wanted = body.response_format
    kind = "text" if wanted is None else format_of(wanted)
    options = ChatOptions(
        thinking=mode.thinking,
        effort=mode.effort,
        effort_revision=model.effort_revision,
        tools=tools,
        tool_choice=rule.choice,
        response_format=kind,
        response_schema=format_schema(wanted) if kind == "json_schema" else None,
        continue_final_message=bool(body.continue_final_message),
        keep_reasoning=kept,
        task=body.task,
        profile=gateway.config.api_profile,
    )
    return Conversation(messages, options, rule)


def _check(gateway: Gateway, body: ChatRequest) -> Sampling:
    """Everything that needs no text."""
    if body.modalities and body.modalities != ["text"]:
        raise invalid("modalities", f"modalities = {body.modalities}: this model writes text only")
    if body.audio is not None:
        raise invalid("audio", "audio: this model writes text only")
    check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs without logprobs: set logprobs to true or leave it out")
    top = check_top_logprobs("top_logprobs", body.top_logprobs, gateway.limits) if body.logprobs else NO_LOGPROBS
    name = "max_tokens"
    if body.max_completion_tokens is not None:
        name, body.max_tokens = "max_completion_tokens", body.max_completion_tokens
    return check_sampling(body, gateway.model, gateway.limits, top_logprobs=top, names={"max_tokens": name})


def _given_ids(gateway: Gateway, body: ChatRequest) -> list[int] | None:
    """The prompt as ids, where the client encoded it itself."""
    if body.input_ids is None:
        return None
    if not body.input_ids:
        raise invalid("input_ids", "input_ids is empty; a prompt has at least one token")
    return list(check_ids(body.input_ids, gateway.model.vocab_size, "input_ids"))


def _refuse_missing(body: ChatRequest) -> None:
    """501 for what is documented and not there."""
    if body.functions:
        raise ApiError(501, "functions: the deprecated form of tools is not supported; use tools", param="functions")
    if body.web_search_options is not None:
        raise missing_part("web_search_options", "searching the web", "a search tool")
    if body.documents:
        raise missing_part("documents", "passages beside the conversation", "an encoding for them")
    if body.echo:
        raise missing_part("echo", "repeating the last message", "an answer that holds it")
    refuse_extras(body)


def _reasoning_mode(body: ChatRequest) -> ReasoningMode:
    if body.include_reasoning is False:
        return "dropped"
    return "inline" if body.separate_reasoning is False else "separate"


def salt_of(gateway: Gateway, body: RequestFields) -> str:
    """What separates this caller's prefixes from others' beside the tenant."""
    given = {param: getattr(body, param) for param in ("cache_salt", "extra_key", "user_id", "user")}
    return check_salt(gateway.limits, **given)
