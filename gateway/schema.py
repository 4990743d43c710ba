"""Request bodies as msgspec structs: types only, no ranges.

Unknown fields are ignored, `null` is the same as absent, nothing is coerced from strings. Fields typed `Any` have
several shapes or are refused; `gateway.constraints` and `gateway.validate` decide. A body of the wrong shape becomes a
400 that names the field and the value found there.
"""

import json
import re
from typing import Any, TypeVar

import msgspec

from gateway.errors import ApiError, invalid
from gateway.limits import Limits, check_structure


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling as every dialect writes it, in OpenAI's and vLLM's names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float | None] | None = None
    seed: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    # At most one of these constrains the output; `gateway.constraints` reads them.
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    choice: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    # Not there yet: refused when they ask for something.
    use_beam_search: Any = None
    logits_processors: Any = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(SamplingFields, kw_only=True):
    """What chat and completions share beside sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    user_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    rid: str | None = None
    request_id: str | None = None
    session_id: str | None = None  # for the trace alone
    return_token_ids: bool | None = None
    lora_path: Any = None  # this and what follows: refused when it asks for something
    custom_logit_processor: Any = None
    return_hidden_states: Any = None


class ChatRequest(RequestFields, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: Any = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    task: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    input_ids: list[int] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    documents: Any = None
    echo: Any = None
    add_generation_prompt: bool | None = None


class CompletionRequest(RequestFields, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    max_completion_tokens: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | bool | None = None


class NativeSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float | None] | None = None
    sampling_seed: int | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    choice: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    require_reasoning: bool | None = None
    json_schema: Any = None
    regex: Any = None
    image_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None


class TokenizeRequest(ChatRequest, kw_only=True):
    """A raw prompt, or a conversation as /v1/chat/completions takes it."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None


class ExplainRequest(TokenizeRequest, kw_only=True):
    """A prompt as for /tokenize; cache_salt as in the request it stands for."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None
    skip_special_tokens: bool | None = None


class ReadingRequest(msgspec.Struct, kw_only=True):
    """A text that a model wrote. Names of parsers, which other servers have several of, mean nothing here."""

    text: str | None = None
    tools: list[Any] | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.?(?P<key>[^.\[\]]+)|\[(?P<index>\d+)\]")


class BodyDecoder:
    """Decodes bodies of one type within the size limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}

    def decode(self, body: bytes, kind: type[Body]) -> Body:
        check_structure(body, self._limits)
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        try:
            decoded: Body = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explained(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(None, f"the body is not valid JSON: {error}") from None
        return decoded


def _explained(text: str, body: bytes) -> ApiError:
    """Turn msgspec's complaint into field, value and expected type."""
    match = _PATH.search(text)
    if match is None:
        return invalid(None, f"the body must be a JSON object: {text}")
    path = match["path"].lstrip(".").replace("[...]", "")
    message = f"{path}: {text[: match.start()]}"
    try:
        value = _value_at(path, json.loads(body))
    except (ValueError, LookupError, TypeError):  # broken behind the complaint, or a key that stands there twice
        return invalid(path.split("[")[0], message)
    shown = json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict | list):
        shown = f"{type(value).__name__} {shown}"
    return invalid(path.split("[")[0], f"{message}; the value is {shown[:80]}")


def _value_at(path: str, value: Any) -> Any:
    for step in _STEP.finditer(path):
        value = value[int(step["index"])] if step["index"] is not None else value[step["key"]]
    return value
