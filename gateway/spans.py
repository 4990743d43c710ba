"""The spans of one finished request, whichever transport it came by, in OpenTelemetry's GenAI words.

One server span, and under it what the gateway itself did: read, tokenize, parse (from the first token on: detokenise,
parse, write). Scheduler, worker and grammar service hang theirs under the same one. All are recorded after the fact;
sizes and names only, never prompts or answers.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from gateway.exchange import Caller
from gateway.generation import Generation, Job
from gateway.validate import Sampling
from meshkit.obs import Attribute, Tracing
from meshkit.traceparent import is_sampled

# gateway stage -> its first and last stamp; "received" and "ended" are always there
_STAGES: Final = {
    "gateway.read": ("received", "read"),
    "gateway.tokenize": ("read", "encoded"),
    "gateway.parse": ("first_token", "ended"),
}


def record_request(tracing: Tracing, caller: Caller, model: str, operation: str, status: int, seconds: float) -> None:
    """`seconds` is how long the request took until now; `operation` as in gen_ai.operation.name."""
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "deepseek",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": caller.label,
        "gen_ai.usage.input_tokens": caller.notes.get("prompt_tokens", 0),
        "gen_ai.usage.output_tokens": caller.notes.get("output_tokens", 0),
        "gen_ai.latency.e2e": seconds,
        "http.response.status_code": status,
        **caller.span,
    }
    if "error" in caller.notes:
        attributes["error.type"] = str(caller.notes["error"])
    stamps = {"received": caller.received_s, "ended": caller.received_s + seconds, **caller.stages}
    at_ns = {name: int(stamp * 1e9) for name, stamp in stamps.items()}
    events = [("first token", at_ns["first_token"])] if "first_token" in at_ns else []
    if events:
        attributes["gen_ai.latency.time_to_first_token"] = stamps["first_token"] - stamps["received"]
    for name, (first, last) in _STAGES.items():
        if first in at_ns and last in at_ns:
            tracing.record(name, caller.traceparent, at_ns[first], at_ns[last])
    name = f"{operation} {model}"
    tracing.record(
        name,
        caller.parent,
        at_ns["received"],
        at_ns["ended"],
        attributes,
        own=caller.traceparent,
        events=events,
    )


def note_server(caller: Caller, transport: asyncio.BaseTransport | None) -> None:
    """Where a sampled request came in; a transport that is closed by then no longer says."""
    if transport is None or not is_sampled(caller.traceparent):
        return
    address = transport.get_extra_info("sockname")
    if isinstance(address, tuple):
        caller.span |= {"server.address": str(address[0]), "server.port": int(address[1])}
    elif address:
        caller.span["server.address"] = str(address)


def note_sampling(caller: Caller, sampling: Sampling) -> None:
    """What of it is no number of the worker's."""
    if not is_sampled(caller.traceparent):
        return
    if sampling.stops:
        caller.span["gen_ai.request.stop_sequences"] = list(sampling.stops)
    if sampling.seeded:
        caller.span["gen_ai.request.seed"] = sampling.seed - (sampling.seed >> 63 << 64)  # as it came: signed


def note_jobs(caller: Caller, jobs: Sequence[Job]) -> None:
    """What was asked for, as attributes of a sampled request's span."""
    if not jobs or not is_sampled(caller.traceparent):
        return
    if caller.conversation:
        caller.span["gen_ai.conversation.id"] = caller.conversation
    params = jobs[0].params
    caller.span |= {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": sum(len(job.choices) for job in jobs),
        "gen_ai.output.type": "json" if (asked := jobs[0].constraint) is not None and asked.is_json else "text",
    }


def note_answer(caller: Caller, generation: Generation) -> None:
    """What came of it: counts, the first token's time, how the choices ended."""
    caller.notes["output_tokens"] = generation.output_tokens
    if generation.first_token_s is not None:
        caller.stages["first_token"] = caller.received_s + generation.first_token_s
    if not is_sampled(caller.traceparent):
        return
    if generation.answer_id:
        caller.span["gen_ai.response.id"] = generation.answer_id
    choices = [choice for job in generation.jobs for choice in job.choices]
    times = generation.jobs[0].times
    if times.told:
        caller.span |= {
            "gen_ai.latency.time_in_queue": times.queued_s,
            "gen_ai.latency.time_in_model_prefill": times.prefill_s,
            "gen_ai.latency.time_in_model_decode": times.decode_s,
            "gen_ai.latency.time_in_model_inference": times.prefill_s + times.decode_s,
        }
    caller.span["gen_ai.usage.cache_read.input_tokens"] = generation.cached_tokens
    caller.span["gen_ai.response.finish_reasons"] = [choice.finish or "aborted" for choice in choices]


def stamp(caller: Caller, stage: str) -> None:
    """The stage has just ended; of several, the last one counts."""
    caller.stages[stage] = time.monotonic()
