"""The `deepseek` profile: a request of chat or completions as the hosted service would take it.

Fields it ignores are dropped here, what it refuses is a 400. Refusals that depend on the conversation are the
encoder's (`text.chat_encoding`). The `open` profile honours everything that was sent.
"""

from typing import TypeVar

import msgspec

from gateway.errors import ApiError, invalid
from gateway.models import ServedModel
from gateway.schema import ChatRequest, CompletionRequest, RequestFields
from gateway.text.chat_encoding import ChatOptions

STOPS = 16
COMPLETION_TOKENS = 4_096
THINKING_TOP_P = 0.95  # where tools may be called
_IGNORED = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_completion_tokens",
    "min_tokens",
    "stop_token_ids",
    "stop_regex",
    "include_stop_str_in_output",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
    "choice",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "chat_template",
    "separate_reasoning",
    "include_reasoning",
    "continue_final_message",
    "task",
    "user",
    "cache_salt",
    "extra_key",
    "priority",
    "rid",
    "request_id",
    "input_ids",
    "return_token_ids",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "bad_words",
    "use_beam_search",
    "logits_processors",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
    "documents",
    "add_generation_prompt",
)
_IGNORED_THINKING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


Request = TypeVar("Request", bound=RequestFields)


def as_hosted(body: Request, model: ServedModel) -> Request:
    """The request without what the hosted service ignores. Raises 400 for what it refuses."""
    if not model.answers_to(body.model):
        raise ApiError(400, f"Model Not Exist: {str(body.model)[:80]!r}; this server has {model.name!r}", param="model")
    if body.n not in (None, 1):
        raise invalid("n", f"n = {body.n} is out of range: allowed is 1")
    if isinstance(body.stop, list) and len(body.stop) > STOPS:
        raise invalid("stop", f"stop has {len(body.stop)} strings; allowed are {STOPS}")
    if isinstance(body.response_format, dict) and body.response_format.get("type") == "structural_tag":
        raise invalid("response_format", "response_format.type is 'structural_tag', which the hosted service lacks")
    dropped = [name for name in _IGNORED if name in body.__struct_fields__]
    return msgspec.structs.replace(body, **dict.fromkeys(dropped))


def completion_as_hosted(body: CompletionRequest, model: ServedModel) -> CompletionRequest:
    """The same for completions, whose answers are short there."""
    body = as_hosted(body, model)
    if body.max_tokens is not None:
        body.max_tokens = min(body.max_tokens, COMPLETION_TOKENS)
    return body


def sampled_as_hosted(body: ChatRequest, options: ChatOptions) -> ChatRequest:
    """In thinking mode the service samples its own way."""
    if not options.thinking:
        return body
    changes: dict[str, float | None] = dict.fromkeys(_IGNORED_THINKING)
    if options.tools_active:
        changes["top_p"] = THINKING_TOP_P
    return msgspec.structs.replace(body, **changes)
