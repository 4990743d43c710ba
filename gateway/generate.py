"""POST or PUT /generate: SGLang's native dialect. Raw text or ids in; text, ids and meta_info out.

Its names are mapped to the common sampling fields, so that ranges are checked once for all dialects; error messages
use the client's names. Streams are cumulative unless the gateway is told otherwise. With `require_reasoning` the prompt
ends inside a thought, and a constraint is for what follows it.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohttp import web

from gateway.answer import OpenAiEvents, send_events
from gateway.chat_answer import finite
from gateway.completions import Prompt, encode_raw, prompts_of, raw_parsers
from gateway.errors import invalid, out_of_range
from gateway.exchange import Exchange, json_response
from gateway.generation import Choice, Generation, Job, Update
from gateway.prompt_answer import scored
from gateway.schema import GenerateRequest, NativeSampling, SamplingFields
from gateway.scores import ScoreRequest
from gateway.service import Gateway
from gateway.sse import DONE, event
from gateway.text.tokenizer import Tokenizer
from gateway.validate import (
    Sampling,
    check_ids,
    check_label,
    check_priority,
    check_salt,
    check_sampling,
    check_top_logprobs,
    refuse_extras,
)
from meshkit.types import NO_LOGPROBS, TokenLogprobs

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "logit_bias",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "choice",
)
_NAMES = {name: f"sampling_params.{name}" for name in _SAME} | {
    ours: f"sampling_params.{theirs}" for ours, theirs in _RENAMED.items()
}

T = TypeVar("T")


async def generate(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, GenerateRequest)
    items = _items(gateway, body)
    priority = check_priority(body.priority)
    salt = check_salt(gateway.limits, cache_salt=body.cache_salt, extra_key=body.extra_key)
    refuse_extras(body)
    gateway.check_ready()
    jobs: list[Job] = []
    for item in items:
        first = sum(len(job.choices) for job in jobs)
        param = "text" if isinstance(item.prompt, str) else "input_ids"
        ids = await encode_raw(gateway, item.prompt, param=param)
        parsers = raw_parsers(gateway, item.sampling)
        jobs.append(
            gateway.job(
                exchange,
                item.sampling,
                ids,
                parsers,
                param=param,
                first_index=first,
                salt=salt,
                priority=priority,
                rid=item.rid,
                constraint=item.sampling.constraint,
                thinking=bool(body.require_reasoning),
                score=item.score,
            )
        )
    batched = isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))
    with gateway.generation(exchange, jobs) as generation:
        answer = NativeAnswer(
            generation,
            gateway.tokenizer,
            names=[item.rid or uuid.uuid4().hex for item in items],
            texts=bool(body.return_text_in_logprobs),
            batched=batched,
            cumulative=not gateway.config.incremental_streaming_output,
        )
        generation.start()
        if body.stream:
            return await send_events(gateway, exchange, generation, answer)
        async for updates in generation.updates():
            answer.collect(updates)
        return json_response(exchange, answer.whole())


@dataclass(frozen=True, slots=True)
class _Item:
    """One prompt with what applies to it."""

    prompt: Prompt
    sampling: Sampling
    rid: str
    score: ScoreRequest | None  # of the prompt's tokens


def _items(gateway: Gateway, body: GenerateRequest) -> list[_Item]:
    """Check everything that needs no text, and spread what is given once over the prompts."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "exactly one of text and input_ids must be given")
    for media in ("image_data", "audio_data", "input_embeds"):
        if getattr(body, media) is not None:
            raise invalid(media, f"{media}: this model reads text only")
    if body.text is not None:
        prompts = prompts_of(gateway, body.text, "text")
    else:
        prompts = prompts_of(gateway, body.input_ids, "input_ids")
    count = len(prompts)
    samplings = _spread("sampling_params", body.sampling_params, count, NativeSampling())
    asked = _spread("return_logprob", body.return_logprob, count, False)
    tops = _spread("top_logprobs_num", body.top_logprobs_num, count, 0)
    rids = [check_label("rid", rid, gateway.limits) for rid in _rids(body.rid, count)]
    starts = _spread("logprob_start_len", body.logprob_start_len, count, -1)
    chosen = _chosen_ids(gateway, body, count)
    items = []
    for index, (prompt, native) in enumerate(zip(prompts, samplings, strict=True)):
        number, start = check_top_logprobs("top_logprobs_num", tops[index], gateway.limits), starts[index]
        if start < -1:
            raise out_of_range("logprob_start_len", start, "-1 or more")
        wanted = asked[index]
        sampling = _sampling(gateway, body, native, number if wanted else NO_LOGPROBS)
        if wanted and chosen[index]:
            sampling = replace(sampling, params=replace(sampling.params, logprob_ids=chosen[index]))
        score = ScoreRequest(start, number, "logprob_start_len") if wanted and start >= 0 else None
        items.append(_Item(prompt, sampling, rids[index], score))
    return items


def _sampling(gateway: Gateway, body: GenerateRequest, native: NativeSampling, top_logprobs: int) -> Sampling:
    given = {name: getattr(native, name) for name in _SAME}
    names = dict(_NAMES)
    for name in ("json_schema", "regex"):
        outer = getattr(body, name)
        if outer is not None and given[name] is not None:
            raise invalid(name, f"{name} is given twice: beside text and in sampling_params")
        if outer is not None:
            given[name], names[name] = outer, name
    fields = SamplingFields(**given, **{ours: getattr(native, theirs) for ours, theirs in _RENAMED.items()})
    return check_sampling(
        fields,
        gateway.model,
        gateway.limits,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        least_max_tokens=0,
        top_logprobs=top_logprobs,
        names=names,
    )


def _chosen_ids(gateway: Gateway, body: GenerateRequest, count: int) -> list[tuple[int, ...]]:
    """`token_ids_logprob` of each prompt: one list is for all of them."""
    given = body.token_ids_logprob or []
    if any(isinstance(entry, list) for entry in given):
        if len(given) != count:
            raise invalid("token_ids_logprob", f"token_ids_logprob has {len(given)} entries for {count} prompts")
        lists = [entry if isinstance(entry, list) else [] if entry is None else [entry] for entry in given]
    else:
        lists = [[entry for entry in given if isinstance(entry, int)]] * count
    most = gateway.limits.logprob_ids
    for ids in lists:
        if len(ids) > most:
            raise invalid("token_ids_logprob", f"token_ids_logprob has {len(ids)} ids; allowed are {most}")
    return [check_ids(ids, gateway.model.vocab_size, "token_ids_logprob") for ids in lists]


def _rids(value: str | list[str] | None, count: int) -> list[str]:
    if isinstance(value, list):
        if len(value) != count:
            raise invalid("rid", f"rid has {len(value)} entries for {count} prompts")
        if len(set(value)) != count:
            raise invalid("rid", "rid names two prompts alike")
        return value
    if value is None:
        return [""] * count
    return [value] if count == 1 else [f"{value}_{index}" for index in range(count)]


def _spread(name: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    if isinstance(value, list):
        if len(value) != count:
            raise invalid(name, f"{name} has {len(value)} entries for {count} prompts")
        return value
    return [default if value is None else value] * count


class NativeAnswer(OpenAiEvents):
    """Builds the answer of one /generate request; a `Renderer` when streamed."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        names: Sequence[str],
        texts: bool,
        batched: bool,
        cumulative: bool,
    ) -> None:
        """`texts` puts token texts into log-probabilities; `cumulative` streams everything so far each time."""
        self._generation = generation
        self._tokenizer = tokenizer
        self._texts = texts
        self._batched = batched
        self._cumulative = cumulative
        self._names = {id(job): name for job, name in zip(generation.jobs, names, strict=True)}
        self._several = batched or sum(len(job.choices) for job in generation.jobs) > 1
        self._unsent_ids: dict[int, list[int]] = {c.index: [] for job in generation.jobs for c in job.choices}
        self._parts: dict[int, list[str]] = {c.index: [] for job in generation.jobs for c in job.choices}

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        return DONE

    def render(self, updates: list[Update]) -> bytes:
        events: list[bytes] = []
        for update in updates:
            new = "".join(delta.text for delta in update.deltas)
            self._parts[update.choice.index].append(new)
            if not self._cumulative:
                self._unsent_ids[update.choice.index] += update.ids
            if not (new or update.ended):
                continue
            if self._cumulative:
                item = self._item(update.job, update.choice, self._text(update.choice), update.choice.ids)
            else:
                ids, self._unsent_ids[update.choice.index] = self._unsent_ids[update.choice.index], []
                item = self._item(update.job, update.choice, new, ids)
            if self._several:
                item["index"] = update.choice.index
            events.append(event(item))
        return b"".join(events)

    def collect(self, updates: list[Update]) -> None:
        for update in updates:
            self._parts[update.choice.index] += [delta.text for delta in update.deltas]

    def whole(self) -> Any:
        """One object, or a list when prompts came as a list or n > 1."""
        items = [
            self._item(job, choice, self._text(choice), choice.ids)
            for job in self._generation.jobs
            for choice in job.choices
        ]
        return items if self._several else items[0]

    def _text(self, choice: Choice) -> str:
        parts = self._parts[choice.index]
        parts[:] = ["".join(parts)]
        return parts[0]

    def _item(self, job: Job, choice: Choice, text: str, ids: Sequence[int]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._names[id(job)],
            "finish_reason": _finish(choice),
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(choice.ids),
            "cached_tokens": job.cached_tokens,
            "e2e_latency": round(self._generation.elapsed_s(), 6),
        }
        if job.params.top_logprobs != NO_LOGPROBS:
            meta |= self._logprobs(job, choice.logprobs)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _logprobs(self, job: Job, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Values of the prompt, as far as they are asked for, and of the output; all lists in steps of one token."""
        prompt: Sequence[tuple[int, TokenLogprobs | None]] = () if job.scores is None else list(scored(job))
        output = [(entry.ids[0], entry) for entry in entries]
        top, chosen = job.params.top_logprobs, job.params.logprob_ids
        found: dict[str, Any] = {}
        for side, rows in (("input", prompt), ("output", output)):
            own = [self._triple(token, None if entry is None else entry.values[0]) for token, entry in rows]
            found[f"{side}_token_logprobs"] = own
            if top > 0:
                found[f"{side}_top_logprobs"] = [self._listed(entry, 1, 1 + top) for _, entry in rows]
            if chosen:
                found[f"{side}_token_ids_logprobs"] = [self._listed(entry, 1 + top, None) for _, entry in rows]
        return found

    def _listed(self, entry: TokenLogprobs | None, first: int, end: int | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        pairs = zip(entry.ids[first:end], entry.values[first:end], strict=True)
        return [self._triple(token, value) for token, value in pairs]

    def _triple(self, token: int, value: float | None) -> list[Any]:
        text = self._tokenizer.token_text(token) if self._texts else None
        return [None if value is None else finite(value), token, text]


def _finish(choice: Choice) -> dict[str, Any] | None:
    if choice.finish is None:
        return None
    if choice.finish == "stop":
        return {"type": "stop", "matched": choice.matched}
    if choice.finish == "length":
        return {"type": "length", "length": len(choice.ids)}
    return {"type": "abort", "message": "aborted by request", "status_code": None}
