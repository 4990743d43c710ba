"""Range checks: from request structs to resolved sampling parameters, or a 400 that names the field.

Everything here is decided before any work is done for a request: no text is encoded and nothing is sent. Features
that are documented but not there yet are refused with 501, naming the part that is missing.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.constraints import Constraint, constraint_of
from gateway.errors import ApiError, context_exceeded, invalid, missing_part, out_of_range
from gateway.limits import Limits
from gateway.models import ServedModel
from gateway.schema import RequestFields, SamplingFields
from gateway.scores import ScoreRequest
from gateway.text.pattern_parser import PatternError, StopPattern, check_together, parse_pattern
from meshkit.types import NO_LOGPROBS, SamplingParams

_RANDOM = random.SystemRandom()
_I64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A request's sampling, checked. `params.max_tokens` is filled in by `for_prompt`, once the prompt is known."""

    params: SamplingParams
    max_tokens: int | None  # as asked; None: what the context leaves
    n: int
    seed: int
    stops: tuple[str, ...]
    keep_stop: bool
    skip_special: bool
    seeded: bool = False  # the client chose the seed
    stop_patterns: tuple[StopPattern, ...] = ()
    bad_words: tuple[str, ...] = ()
    cut_to: int | None = None  # tokens of the prompt's end that are kept, -1: as many as fit; None: all
    score: ScoreRequest | None = None  # of the prompt's tokens
    constraint: Constraint | None = None  # as one of its fields says

    def cut(self, prompt: Sequence[int], model: ServedModel) -> Sequence[int]:
        """The prompt, or what is kept of its end."""
        if self.cut_to is None:
            return prompt
        keep = self.cut_to if self.cut_to > 0 else max(1, model.max_context - max(1, self.max_tokens or 1))
        return prompt[-keep:]

    def for_prompt(
        self, prompt_tokens: int, model: ServedModel, cap: int | None, param: str
    ) -> tuple[SamplingParams, bool]:
        """Parameters that fit the context, and whether the client's max_tokens had to be lowered for it."""
        room = model.max_context - prompt_tokens
        if room < 1:
            raise context_exceeded(prompt_tokens, model.max_context, param)
        if cap is not None:
            room = min(room, cap)
        asked = self.max_tokens
        tokens = room if asked is None else min(asked, room)
        low = min(self.params.min_tokens, tokens)
        return replace(self.params, max_tokens=tokens, min_tokens=low), asked is not None and asked > room


def check_sampling(
    fields: SamplingFields,
    model: ServedModel,
    limits: Limits,
    *,
    default_max_tokens: int | None = None,
    least_max_tokens: int = 1,
    top_logprobs: int = NO_LOGPROBS,
    names: Mapping[str, str] | None = None,
) -> Sampling:
    """Check ranges and fill in defaults. `names` maps our field names to the dialect's, for messages."""
    check = _Checker(names or {})
    constraint = constraint_of(fields, names or {})
    max_tokens = check.integer("max_tokens", fields.max_tokens, None, least_max_tokens)
    if max_tokens is None:
        max_tokens = default_max_tokens
    min_tokens = check.integer("min_tokens", fields.min_tokens, 0, 0)
    assert min_tokens is not None
    if max_tokens is not None and min_tokens > max_tokens:
        raise out_of_range(check.name("min_tokens"), min_tokens, f"0 to {check.name('max_tokens')} = {max_tokens}")
    params = SamplingParams(
        temperature=check.number("temperature", fields.temperature, 1.0, 0.0, 2.0),
        top_k=check.top_k(fields.top_k, model.vocab_size),
        top_p=check.number("top_p", fields.top_p, 1.0, 0.0, 1.0, low_open=True),
        min_p=check.number("min_p", fields.min_p, 0.0, 0.0, 1.0),
        presence_penalty=check.number("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=check.number("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=check.number("repetition_penalty", fields.repetition_penalty, 1.0, 0.0, 2.0, low_open=True),
        max_tokens=0,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop_ids=check.stop_ids(fields.stop_token_ids, model.vocab_size, limits),
        bias=check.bias(fields.logit_bias, model.vocab_size, limits),
        top_logprobs=top_logprobs,
        allowed_ids=check.allowed_ids(fields.allowed_token_ids, model.vocab_size, limits),
    )
    n = check.integer("n", fields.n, 1, 1, limits.choices)
    assert n is not None
    seed, stops = check.seed(fields.seed), check.stops(fields.stop, limits)
    patterns = check.stop_patterns(fields.stop_regex, limits)
    bad_words = check.bad_words(fields.bad_words, limits)
    cut_to = check.truncation(fields.truncate_prompt_tokens, model.max_context)
    score = None
    if fields.prompt_logprobs is not None:
        score = ScoreRequest(
            0, check_top_logprobs("prompt_logprobs", fields.prompt_logprobs, limits), "prompt_logprobs"
        )
    check.refuse_missing(fields)  # last: what is wrong in itself is a 400, whatever else is asked for
    return Sampling(
        params=params,
        max_tokens=max_tokens,
        n=n,
        seed=seed,
        stops=stops,
        stop_patterns=patterns,
        keep_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        skip_special=fields.skip_special_tokens is not False,
        seeded=fields.seed is not None,
        bad_words=bad_words,
        cut_to=cut_to,
        score=score,
        constraint=constraint,
    )


class _Checker:
    """Checks of single fields under the names of one dialect."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def name(self, field: str) -> str:
        return self._names.get(field, field)

    def number(
        self, field: str, value: float | None, default: float, low: float, high: float, *, low_open: bool = False
    ) -> float:
        if value is None:
            return default
        if not (low < value if low_open else low <= value) or value > high:
            shown = f"more than {low:g} and at most {high:g}" if low_open else f"{low:g} to {high:g}"
            raise out_of_range(self.name(field), value, shown)
        return float(value)

    def integer(self, field: str, value: int | None, default: int | None, low: int, high: int = _I64 - 1) -> int | None:
        if value is None:
            return default
        if not low <= value <= high:
            raise out_of_range(self.name(field), value, f"{low} or more" if high == _I64 - 1 else f"{low} to {high}")
        return value

    def top_k(self, value: int | None, vocab_size: int) -> int:
        if value is None or value in (-1, 0):
            return 0
        if value < 1:
            raise out_of_range(self.name("top_k"), value, "-1 or 0 for off, else 1 or more")
        return 0 if value >= vocab_size else value

    def seed(self, value: int | None) -> int:
        """The seed, as unsigned 64 bits; drawn from the system's entropy when the client gave none."""
        if value is None:
            return _RANDOM.getrandbits(64)
        if not -_I64 <= value < _I64:
            raise out_of_range(self.name("seed"), value, f"{-_I64} to {_I64 - 1}")
        return value & (2 * _I64 - 1)

    def stops(self, value: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        name = self.name("stop")
        if len(stops) > limits.stops:
            raise invalid(name, f"{name} has {len(stops)} strings; allowed are {limits.stops}")
        for stop in stops:
            size = len(stop.encode(errors="replace"))
            if not 1 <= size <= limits.stop_length:
                raise invalid(name, f"{name}: a string of {size} bytes; allowed are 1 to {limits.stop_length}")
        return tuple(stops)

    def stop_patterns(self, value: str | list[str] | None, limits: Limits) -> tuple[StopPattern, ...]:
        """Regular expressions to stop at, parsed; all of them together are of bounded size."""
        name, texts = self.name("stop_regex"), [value] if isinstance(value, str) else value or []
        if len(texts) > limits.stops:
            raise invalid(name, f"{name} has {len(texts)} expressions; allowed are {limits.stops}")
        patterns = []
        for text in texts:
            size = len(text.encode(errors="replace"))
            if not 1 <= size <= limits.stop_length:
                raise invalid(name, f"{name}: an expression of {size} bytes; allowed are 1 to {limits.stop_length}")
            try:
                patterns.append(parse_pattern(text))
            except PatternError as error:
                raise invalid(name, f"{name}: {text[:60]!r}: {error}") from None
        try:
            check_together(patterns)
        except PatternError as error:
            raise invalid(name, f"{name}: {error}") from None
        return tuple(patterns)

    def stop_ids(self, value: list[int] | None, vocab_size: int, limits: Limits) -> tuple[int, ...]:
        ids = value or []
        name = self.name("stop_token_ids")
        if len(ids) > limits.stop_ids:
            raise invalid(name, f"{name} has {len(ids)} ids; allowed are {limits.stop_ids}")
        return check_ids(ids, vocab_size, name)

    def allowed_ids(self, value: list[int] | None, vocab_size: int, limits: Limits) -> tuple[int, ...]:
        """No ids at all would leave nothing to say, so an empty list is refused; vLLM does so too."""
        name = self.name("allowed_token_ids")
        if value is not None and not 1 <= len(value) <= limits.allowed_ids:
            raise invalid(name, f"{name} has {len(value)} ids; allowed are 1 to {limits.allowed_ids}")
        return tuple(sorted(set(check_ids(value or (), vocab_size, name))))

    def bad_words(self, value: list[str] | None, limits: Limits) -> tuple[str, ...]:
        name, words = self.name("bad_words"), value or []
        if len(words) > limits.bad_words:
            raise invalid(name, f"{name} has {len(words)} strings; allowed are {limits.bad_words}")
        for word in words:
            size = len(word.encode(errors="replace"))
            if not 1 <= size <= limits.bad_word_length or not word.strip():
                text = f"{name}: a string of {size} bytes; allowed are 1 to {limits.bad_word_length}, not all blanks"
                raise invalid(name, text)
        return tuple(words)

    def truncation(self, value: int | None, max_context: int) -> int | None:
        name = self.name("truncate_prompt_tokens")
        if value is None or value == -1:
            return value
        if not 1 <= value < max_context:
            raise out_of_range(name, value, f"1 to {max_context - 1}, or -1 for what the context leaves")
        return value

    def bias(
        self, value: Mapping[str, float | None] | None, vocab_size: int, limits: Limits
    ) -> tuple[tuple[int, float], ...]:
        name = self.name("logit_bias")
        entries = {key: bias for key, bias in (value or {}).items() if bias is not None}
        if len(entries) > limits.biases:
            raise invalid(name, f"{name} has {len(entries)} entries; allowed are {limits.biases}")
        pairs: dict[int, float] = {}
        for key, bias in entries.items():
            if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
                raise invalid(name, f"{name}: {key[:40]!r} is not a token id; allowed are 0 to {vocab_size - 1}")
            if not -100.0 <= bias <= 100.0:
                raise invalid(name, f"{name}[{key}] = {bias:g} is out of range: allowed is -100 to 100")
            pairs[int(key)] = float(bias)
        return tuple(pairs.items())

    def refuse_missing(self, fields: SamplingFields) -> None:
        """501 for what is documented but not there; values that ask for nothing pass."""
        if fields.use_beam_search:
            raise missing_part("use_beam_search", "searching with beams", "a beam search")
        if fields.logits_processors:
            raise missing_part("logits_processors", "code of the client's", "a place to run it")


class Extras(Protocol):
    """What a request may carry beside prompt and sampling that no part of this mesh does."""

    lora_path: Any
    custom_logit_processor: Any
    return_hidden_states: Any


def refuse_extras(body: Extras) -> None:
    """501 where ignoring it would answer something else than was asked; values that ask for nothing pass."""
    if body.lora_path:
        raise missing_part("lora_path", "an adapter", "a worker that loads them")
    if body.custom_logit_processor:
        raise missing_part("custom_logit_processor", "code of the client's", "a place to run it")
    if body.return_hidden_states:
        raise missing_part("return_hidden_states", "hidden states in the answer", "a worker that returns them")


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids within the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise out_of_range(param, wrong, f"token ids 0 to {vocab_size - 1}")
    return tuple(ids)


def check_stream(fields: RequestFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options without stream: set stream to true or leave it out")


def check_salt(limits: Limits, **given: str | None) -> str:
    """One text for the labels that separate a caller's prefixes from others'; empty when there is none of them.

    Any text of bounded size is a label. Different labels give different texts: what they hold is escaped.
    """
    for param, value in given.items():
        size = len(value.encode()) if value else 0
        if size > limits.label:
            raise invalid(param, f"{param} has {size} bytes; allowed are {limits.label}")
    return json.dumps(list(given.values())) if any(given.values()) else ""


def check_label(param: str, value: str | None, limits: Limits) -> str:
    """A client's request id, which is an abort handle: bounded, printable ASCII; absent is empty."""
    if value is None:
        return ""
    if len(value) > limits.label or not (value.isascii() and value.isprintable()):
        raise invalid(param, f"{param} must be at most {limits.label} printable ASCII characters")
    return value


def check_model(name: str | None, model: ServedModel) -> None:
    if not model.answers_to(name):
        raise ApiError(
            404,
            f"the model {name!r} does not exist here; this server has {model.name!r}",
            param="model",
            code="model_not_found",
        )


def check_priority(value: int | None) -> int:
    if value is None:
        return 0
    if not -(1 << 31) <= value < 1 << 31:
        raise out_of_range("priority", value, f"{-(1 << 31)} to {(1 << 31) - 1}")
    return value


def check_top_logprobs(param: str, value: int | None, limits: Limits) -> int:
    if value is None:
        return 0
    if not 0 <= value <= limits.top_logprobs:
        raise out_of_range(param, value, f"0 to {limits.top_logprobs}")
    return value
