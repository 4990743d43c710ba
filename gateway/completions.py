"""POST /v1/completions: raw prompts, several at once, without chat encoding or parsing.

Also the raw prompts of /generate and /tokenize: their shapes, their encoding, their output parsers. The answer's JSON
is `completion_answer`'s.
"""

import time
from collections.abc import Callable, Sequence

from aiohttp import web

from gateway.answer import send_events
from gateway.chat import salt_of
from gateway.completion_answer import CompletionAnswer
from gateway.errors import invalid, missing_part
from gateway.exchange import Exchange, json_response
from gateway.generation import Job
from gateway.hosted import completion_as_hosted
from gateway.schema import CompletionRequest
from gateway.scores import ScoreRequest
from gateway.service import Gateway
from gateway.text.chat_encoding import MissingMarkerError, encode_fim
from gateway.text.output_parser import OutputParser
from gateway.text.stop_patterns import stop_search
from gateway.validate import (
    Sampling,
    check_ids,
    check_label,
    check_model,
    check_priority,
    check_sampling,
    check_stream,
    check_top_logprobs,
    refuse_extras,
)
from meshkit.types import NO_LOGPROBS

DEFAULT_MAX_TOKENS = 16
Prompt = str | list[int]


async def completions(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, CompletionRequest)
    if gateway.config.api_profile == "deepseek":
        body = completion_as_hosted(body, gateway.model)
    check_model(body.model, gateway.model)
    sampling = _check(gateway, body)
    prompts = prompts_of(gateway, body.prompt)
    label = check_label("rid", body.rid if body.rid is not None else body.request_id, gateway.limits)
    exchange.conversation = check_label("session_id", body.session_id, gateway.limits) or exchange.conversation
    salt, priority = salt_of(gateway, body), check_priority(body.priority)
    refuse_extras(body)
    gateway.check_ready()
    parsers = raw_parsers(gateway, sampling)
    score = _score(body, sampling)
    jobs: list[Job] = []
    for number, prompt in enumerate(prompts):
        ids = await encode_raw(gateway, prompt, body.suffix, bounded=sampling.cut_to is None)
        first = number * sampling.n
        jobs.append(
            gateway.job(
                exchange,
                sampling,
                ids,
                parsers,
                param="prompt",
                first_index=first,
                salt=salt,
                priority=priority,
                rid=label,
                constraint=sampling.constraint,
                score=score,
            )
        )
    with gateway.generation(exchange, jobs) as generation:
        answer = CompletionAnswer(
            generation,
            gateway.tokenizer,
            name=generation.named("cmpl-"),
            created=int(time.time()),
            model=body.model or gateway.model.name,
            fingerprint=gateway.fingerprint,
            logprobs=sampling.params.top_logprobs >= 0,
            token_ids=bool(body.return_token_ids),
            echoes=_echoes(gateway, prompts, jobs, cut=sampling.cut_to is not None) if body.echo else [],
            prompt_top=body.prompt_logprobs,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
            last_usage=gateway.config.api_profile == "deepseek",
        )
        generation.start()
        if body.stream:
            return await send_events(gateway, exchange, generation, answer)
        async for updates in generation.updates():
            answer.collect(updates)
        return json_response(exchange, answer.whole())


def prompts_of(gateway: Gateway, value: object, param: str = "prompt") -> list[Prompt]:
    """The four shapes of a prompt as a list of prompts, none of them empty, ids within the vocabulary."""
    if value is None or value == "" or value == []:
        raise invalid(param, f"{param} is required and must not be empty")
    if isinstance(value, str):
        return [value]
    assert isinstance(value, list)
    if all(isinstance(item, int) for item in value):
        return [list(check_ids(value, gateway.model.vocab_size, param))]
    if len(value) > gateway.limits.prompts:
        raise invalid(param, f"{param} has {len(value)} entries; allowed are {gateway.limits.prompts}")
    if len({type(item) for item in value}) > 1:
        raise invalid(param, f"{param} mixes strings and token ids; send one kind")
    for index, item in enumerate(value):
        if not item:
            raise invalid(param, f"{param}[{index}] is empty; a prompt has at least one token")
        if isinstance(item, list):
            check_ids(item, gateway.model.vocab_size, f"{param}[{index}]")
    return value


async def encode_raw(
    gateway: Gateway, prompt: Prompt, suffix: str | None = None, *, param: str = "prompt", bounded: bool = True
) -> list[int]:
    """Ids of a raw prompt, in which spellings of added tokens count; with a suffix, the prompt that fills the gap.

    `bounded`: 400 for more than the context holds, without encoding the rest.
    """
    tokenizer, limit = gateway.tokenizer, gateway.model.max_context - 1 if bounded else None
    if isinstance(prompt, list):
        return prompt
    text: str = prompt
    job: Callable[[], list[int]]
    if suffix is None:
        job = lambda: tokenizer.encode(text, limit=limit)  # noqa: E731 - one of two jobs, each one line
        return await gateway.encoder.run(len(text), param, job)

    def fill() -> list[int]:
        try:
            return encode_fim(tokenizer, text, suffix, limit=limit)
        except MissingMarkerError as error:
            raise missing_part("suffix", "filling a gap", f"the token {error.token}") from None

    return await gateway.encoder.run(len(text) + len(suffix), param, fill)


def raw_parsers(gateway: Gateway, sampling: Sampling) -> Callable[[frozenset[int]], OutputParser]:
    """Parsers of raw output: everything is content."""
    tokenizer, stops = gateway.tokenizer, stop_search(sampling.stops, sampling.stop_patterns)
    return lambda terminals: OutputParser(
        tokenizer,
        raw=True,
        stop=stops,
        include_stop=sampling.keep_stop,
        stop_ids=terminals,
        skip_special_tokens=sampling.skip_special,
        min_tokens=sampling.params.min_tokens,
    )


def _check(gateway: Gateway, body: CompletionRequest) -> Sampling:
    check_stream(body)
    top = NO_LOGPROBS
    if body.logprobs is not None and body.logprobs is not False:
        top = check_top_logprobs("logprobs", int(body.logprobs), gateway.limits)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs with stream: echo and logprobs stream them")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", f"best_of = {body.best_of} is out of range: it must equal n = {body.n or 1}")
    if body.suffix is not None and not isinstance(body.prompt, str):
        raise invalid("suffix", "suffix needs a prompt that is one string")
    name = "max_tokens"
    if body.max_completion_tokens is not None:
        name, body.max_tokens = "max_completion_tokens", body.max_completion_tokens
    return check_sampling(
        body,
        gateway.model,
        gateway.limits,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        least_max_tokens=0 if body.echo else 1,
        top_logprobs=top,
        names={"max_tokens": name},
    )


def _score(body: CompletionRequest, sampling: Sampling) -> ScoreRequest | None:
    """What is wanted of the prompts' own tokens: echo with logprobs shows them too."""
    score, top = sampling.score, sampling.params.top_logprobs
    if body.echo and top != NO_LOGPROBS:
        if body.suffix is not None:
            raise invalid("echo", "echo with logprobs and suffix: the prompt that fills a gap is not the text echoed")
        score = ScoreRequest(
            0, top if score is None else max(top, score.top), "logprobs" if score is None else score.param
        )
    return score


def _echoes(gateway: Gateway, prompts: Sequence[Prompt], jobs: Sequence[Job], *, cut: bool) -> list[str]:
    """Texts of the prompts, as they were sent or, cut, as they are read."""
    decode = gateway.tokenizer.decode
    return [
        prompt if isinstance(prompt, str) and not cut else decode(job.prompt, skip_special_tokens=False)
        for prompt, job in zip(prompts, jobs, strict=True)
    ]
