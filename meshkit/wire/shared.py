"""Messages of common.proto: sampling parameters, model info, log-probability columns, heartbeat, bye."""

import math
from typing import Final

import numpy as np
from meshpb.v1 import common_pb2 as pb

from meshkit.errors import WireError
from meshkit.frames import Bye, Heartbeat, LogprobColumns
from meshkit.types import NO_LOGPROBS, GrammarKind, GrammarSource, ModelInfo, SamplingParams
from meshkit.wire import columns as c

MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_IDS = 128  # with the alternatives and the token itself fewer than the 255 that an entry can hold
MAX_GRAMMAR_BYTES = 1 << 20  # the grammar service's own limits are lower and say what to do


def put_params(params: SamplingParams) -> pb.SamplingParams:
    """Floats travel as float32: what the worker's sampler computes with."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_ids=c.put_i32(params.stop_ids),
        bias_ids=c.put_i32([token for token, _ in params.bias]),
        bias_values=c.put_f32([value for _, value in params.bias]),
        top_logprobs=params.top_logprobs,
        logprob_ids=c.put_i32(params.logprob_ids),
        allowed_ids=c.put_i32(params.allowed_ids),
        bad_word_lengths=c.put_u8(np.array([len(word) for word in params.bad_words], np.uint8)),
        bad_word_ids=c.put_i32([token for word in params.bad_words for token in word]),
        given_ids=c.put_i32(params.given_ids),
    )


def get_params(message: pb.SamplingParams) -> SamplingParams:
    bias_ids = c.get_i32(message.bias_ids, "params.bias_ids")
    bias_values = c.get_f32(message.bias_values, "params.bias_values", length=len(bias_ids))
    return SamplingParams(
        temperature=_finite(message.temperature, "params.temperature", low=0.0),
        top_k=c.get_int(message.top_k, "params.top_k"),
        top_p=_finite(message.top_p, "params.top_p", low=0.0),
        min_p=_finite(message.min_p, "params.min_p", low=0.0),
        presence_penalty=_finite(message.presence_penalty, "params.presence_penalty"),
        frequency_penalty=_finite(message.frequency_penalty, "params.frequency_penalty"),
        repetition_penalty=_finite(message.repetition_penalty, "params.repetition_penalty", low=0.0),
        max_tokens=c.get_int(message.max_tokens, "params.max_tokens"),
        min_tokens=c.get_int(message.min_tokens, "params.min_tokens"),
        ignore_eos=message.ignore_eos,
        stop_ids=c.get_ints(message.stop_ids, "params.stop_ids"),
        bias=tuple(zip(bias_ids.tolist(), bias_values.tolist(), strict=True)),
        top_logprobs=c.get_int(message.top_logprobs, "params.top_logprobs", low=NO_LOGPROBS, high=MAX_TOP_LOGPROBS),
        logprob_ids=_bounded(c.get_ints(message.logprob_ids, "params.logprob_ids"), MAX_LOGPROB_IDS),
        allowed_ids=c.get_ints(message.allowed_ids, "params.allowed_ids"),
        bad_words=_words(message),
        given_ids=c.get_ints(message.given_ids, "params.given_ids"),
    )


def _words(message: pb.SamplingParams) -> tuple[tuple[int, ...], ...]:
    if not message.bad_word_lengths and not message.bad_word_ids:
        return ()
    lengths = c.get_u8(message.bad_word_lengths, "params.bad_word_lengths", low=1)
    ids = c.get_ints(message.bad_word_ids, "params.bad_word_ids")
    c.check_sum(lengths, len(ids), "params.bad_word_lengths", "params.bad_word_ids")
    ends = lengths.cumsum(dtype=int).tolist()
    return tuple(ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True))


def _bounded(ids: tuple[int, ...], most: int) -> tuple[int, ...]:
    if len(ids) > most:
        raise WireError(f"params.logprob_ids: {len(ids)} ids; allowed are {most}")
    return ids


def put_grammar(grammar: GrammarSource | None) -> pb.GrammarSource | None:
    if grammar is None:
        return None
    return pb.GrammarSource(
        kind=pb.GrammarKind.ValueType(int(grammar.kind)),
        text=grammar.text,
        thinking=grammar.thinking,
        grammar_rev=grammar.grammar_rev,
    )


def get_grammar(message: pb.GrammarSource) -> GrammarSource:
    if len(message.text.encode()) > MAX_GRAMMAR_BYTES:
        raise WireError(f"grammar.text: more than {MAX_GRAMMAR_BYTES} bytes")
    return GrammarSource(
        kind=GrammarKind(c.get_int(message.kind, "grammar.kind", low=1, high=max(GrammarKind))),
        text=message.text,
        thinking=message.thinking,
        grammar_rev=c.get_text(message.grammar_rev, "grammar.grammar_rev"),
    )


def put_model(model: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        revision=model.revision,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        eos_ids=c.put_i32(model.eos_ids),
        kv_layout_id=model.kv_layout_id,
        layers=model.layers,
    )


def get_model(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=c.get_text(message.name, "model.name"),
        revision=c.get_text(message.revision, "model.revision"),
        vocab_size=c.get_int(message.vocab_size, "model.vocab_size", low=1),
        max_context=c.get_int(message.max_context, "model.max_context", low=1),
        eos_ids=c.get_ints(message.eos_ids, "model.eos_ids"),
        kv_layout_id=c.get_text(message.kv_layout_id, "model.kv_layout_id"),
        layers=c.get_int(message.layers, "model.layers"),
    )


def put_logprobs(columns: LogprobColumns) -> pb.Logprobs | None:
    """None when no row asked: the message then has no such field at all."""
    if not len(columns.rows):
        return None
    return pb.Logprobs(
        rows=c.put_i32(columns.rows),
        widths=c.put_u8(columns.widths),
        ids=c.put_i32(columns.ids),
        values=c.put_f32(columns.values),
    )


_NO_LOGPROBS: Final = LogprobColumns()  # empty arrays: nobody can write into them


def get_logprobs(message: pb.Logprobs, num_rows: int) -> LogprobColumns:
    """`rows` index a frame of `num_rows` rows; each entry holds at least the sampled token."""
    if not (message.rows or message.widths or message.ids or message.values):
        return _NO_LOGPROBS
    rows = c.get_i32(message.rows, "logprobs.rows", high=num_rows - 1)
    widths = c.get_u8(message.widths, "logprobs.widths", low=1, length=len(rows))
    ids = c.get_i32(message.ids, "logprobs.ids")
    c.check_sum(widths, len(ids), "logprobs.widths", "logprobs.ids")
    return LogprobColumns(rows, widths, ids, c.get_f32(message.values, "logprobs.values", length=len(ids)))


def put_heartbeat(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(step=heartbeat.step, step_age_ms=heartbeat.step_age_ms)


def get_heartbeat(message: pb.Heartbeat) -> Heartbeat:
    return Heartbeat(message.step, message.step_age_ms)


def put_bye(bye: Bye) -> pb.Bye:
    return pb.Bye(reason=c.clip(bye.reason))


def get_bye(message: pb.Bye) -> Bye:
    return Bye(c.get_text(message.reason, "bye.reason"))


def _finite(value: float, field: str, low: float = -math.inf) -> float:
    if not math.isfinite(value) or value < low:
        raise WireError(f"{field}: {value} is not a finite number >= {low}")
    return value
