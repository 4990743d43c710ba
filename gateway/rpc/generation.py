"""Generation: raw and chat generations over gRPC, many at once over one stream, and what goes with them.

Requests become the bodies that REST requests decode to and take the same way from there. A client that reads too
slowly is cut off after the same patience as a slow SSE client; what is generated meanwhile travels in one message.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from meshpb.v1 import generation_pb2 as pb
from meshpb.v1 import generation_pb2_grpc, scheduler_pb2

from gateway.chat import chat_job, conversation_of
from gateway.completions import Prompt, encode_raw, raw_parsers
from gateway.errors import ApiError, invalid
from gateway.exchange import Caller
from gateway.generation import Generation, Job, Update
from gateway.rpc import reads
from gateway.rpc.entry import Context, Entry, retry_after_ms
from gateway.rpc.writes import Writer
from gateway.scores import ScoreRequest
from gateway.validate import (
    check_ids,
    check_label,
    check_model,
    check_priority,
    check_salt,
    check_sampling,
    check_top_logprobs,
)
from meshkit import wire
from meshkit.build import build_id
from meshkit.types import NO_LOGPROBS

NAME: Final = pb.DESCRIPTOR.services_by_name["Generation"].full_name
BATCH_OPEN: Final = 256  # requests of one GenerateBatch stream at once; further ones wait to be read
DEFAULT_MAX_TOKENS: Final = 128  # of raw requests, as on /generate

Send = Callable[[Any], Any]


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Registered by the listener."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._gateway = entry.gateway

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        async def work(caller: Caller) -> None:
            await self._generate(caller, request, self._sender(context))

        await self._entry.answer(context, "Generate", work, operation="text_completion")

    async def GenerateBatch(  # type: ignore[override]
        self, requests: AsyncIterator[pb.GenerateRequest], context: Context
    ) -> None:
        async def work(caller: Caller) -> None:
            await self._batch(caller, requests, self._sender(context))

        await self._entry.answer(context, "GenerateBatch", work, operation="text_completion")

    async def ChatCompletion(self, request: pb.ChatCompletionRequest, context: Context) -> None:  # type: ignore[override]
        async def work(caller: Caller) -> None:
            await self._chat(caller, request, self._sender(context))

        await self._entry.answer(context, "ChatCompletion", work, operation="chat")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async def work(caller: Caller) -> pb.AbortResponse:
            if request.all or request.request_id:
                await self._gateway.abort_everywhere(caller.tenant, "" if request.all else request.request_id)
            return pb.AbortResponse()

        return await self._entry.answer(context, "Abort", work)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async def work(caller: Caller) -> pb.TokenizeResponse:
            gateway = self._gateway
            check_model(request.model, gateway.model)
            match request.WhichOneof("input"):
                case "text":
                    ids = await encode_raw(gateway, request.text, param="text", bounded=False)
                case "chat":
                    body = reads.chat_request(request.chat, gateway.limits)
                    ids = (await conversation_of(gateway, body).encode(gateway, bounded=False)).ids
                case _:
                    raise invalid("input", "one of text and chat must be given")
            return pb.TokenizeResponse(ids=ids, max_context=gateway.model.max_context)

        return await self._entry.answer(context, "Tokenize", work)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async def work(caller: Caller) -> pb.DetokenizeResponse:
            gateway = self._gateway
            check_model(request.model, gateway.model)
            ids = check_ids(request.ids, gateway.model.vocab_size, "ids")
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            return pb.DetokenizeResponse(text=gateway.tokenizer.decode(ids, skip_special_tokens=skip))

        return await self._entry.answer(context, "Detokenize", work)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async def work(caller: Caller) -> pb.ListModelsResponse:
            model = self._gateway.model
            known = pb.Model(
                id=model.name,
                max_context=model.max_context,
                vocab_size=model.vocab_size,
                revision=model.revision,
                aliases=model.aliases,
            )
            return pb.ListModelsResponse(models=[known])

        return await self._entry.answer(context, "ListModels", work)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        async def work(caller: Caller) -> pb.GetServerInfoResponse:
            gateway = self._gateway
            status = gateway.mesh.status
            return pb.GetServerInfoResponse(
                version=build_id(),
                model=gateway.model.name,
                max_context=gateway.model.max_context,
                ready=gateway.trouble() is None,
                open_requests=gateway.admission.streams,
                scheduler=None if status is None else wire.put_status(status),
            )

        return await self._entry.answer(context, "GetServerInfo", work, operator=True)

    async def FlushCache(
        self, request: scheduler_pb2.FlushCacheRequest, context: Context
    ) -> scheduler_pb2.FlushCacheReply:
        async def work(caller: Caller) -> scheduler_pb2.FlushCacheReply:
            self._gateway.check_ready()
            pages, open_requests = await self._gateway.mesh.flush_cache()
            return scheduler_pb2.FlushCacheReply(pages=pages, open=open_requests)

        return await self._entry.answer(context, "FlushCache", work, operator=True)

    # ---- generations ------------------------------------------------------------------------------------------------

    def _sender(self, context: Context) -> Send:
        """Writes one message, within the patience for slow clients."""
        patience = self._gateway.limits.stream_stall_seconds

        async def send(message: Any) -> None:
            try:
                async with asyncio.timeout(patience):
                    await context.write(message)
            except TimeoutError:
                raise ApiError(429, f"the client has read nothing for {patience:g} s", code="slow_client") from None

        return send

    async def _generate(self, caller: Caller, request: pb.GenerateRequest, send: Send) -> None:
        job = await self._raw_job(caller, request)
        with self._gateway.generation(caller, [job]) as generation:
            writer = self._writer(generation, job, request.request_id, stream=reads.wants_stream(request))
            await self._run(generation, writer.raw, send)

    async def _chat(self, caller: Caller, request: pb.ChatCompletionRequest, send: Send) -> None:
        if request.logprobs.HasField("prompt_start"):
            raise invalid("logprobs.prompt_start", "logprobs.prompt_start: prompts are scored by Generate only")
        body = reads.chat_request(request, self._gateway.limits)
        reasoning = body.include_reasoning is not False
        job, _ = await chat_job(self._gateway, caller, body)
        with self._gateway.generation(caller, [job]) as generation:
            writer = self._writer(generation, job, request.request_id, stream=reads.wants_stream(request))
            await self._run(generation, lambda updates: writer.chat(updates, reasoning=reasoning), send)

    async def _run(self, generation: Generation, messages: Callable[[list[Update]], Iterator[Any]], send: Send) -> None:
        generation.start()
        backlog = self._gateway.limits.stream_backlog
        async for updates in generation.updates():
            if len(generation.mailbox) > backlog:
                raise ApiError(429, f"the client is more than {backlog} steps behind", code="slow_client")
            for message in messages(updates):
                await send(message)

    def _writer(self, generation: Generation, job: Job, name: str, *, stream: bool) -> Writer:
        return Writer(generation, self._gateway.tokenizer, {id(job): name or uuid.uuid4().hex}, stream=stream)

    async def _raw_job(self, caller: Caller, request: pb.GenerateRequest) -> Job:
        gateway = self._gateway
        check_model(request.model, gateway.model)
        param, prompt = _prompt(request)
        if isinstance(prompt, list):
            check_ids(prompt, gateway.model.vocab_size, param)
        asked = request.logprobs
        if asked.top_k and not asked.sampled:
            raise invalid("logprobs.top_k", "logprobs.top_k without logprobs.sampled: set it or leave top_k out")
        top = check_top_logprobs("logprobs.top_k", asked.top_k, gateway.limits) if asked.sampled else NO_LOGPROBS
        sampling = check_sampling(
            reads.sampling_fields(request.sampling, gateway.limits),
            gateway.model,
            gateway.limits,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            top_logprobs=top,
        )
        score = None
        if asked.HasField("prompt_start"):
            score = ScoreRequest(asked.prompt_start, top if asked.sampled else 0, "logprobs.prompt_start")
        label = check_label("request_id", request.request_id or None, gateway.limits)
        salt = check_salt(gateway.limits, cache_salt=request.cache_salt or None)
        priority = check_priority(request.priority)
        gateway.check_ready()
        ids = await encode_raw(gateway, prompt, param=param)
        parsers = raw_parsers(gateway, sampling)
        return gateway.job(
            caller,
            sampling,
            ids,
            parsers,
            param=param,
            salt=salt,
            priority=priority,
            rid=label,
            constraint=sampling.constraint,
            score=score,
        )

    async def _batch(self, caller: Caller, requests: AsyncIterator[pb.GenerateRequest], send: Send) -> None:
        """Every request in a task of its own; a failed one is answered by a Failure and harms no other."""
        writing, room = asyncio.Lock(), asyncio.Semaphore(BATCH_OPEN)

        async def send_alone(message: Any) -> None:
            async with writing:
                await send(message)

        async def one(request: pb.GenerateRequest) -> None:
            mine = replace(caller, notes={}, headers={}, stages={}, span={})
            try:
                await self._generate(mine, request, send_alone)
            except ApiError as error:
                if error.code == "slow_client":
                    raise
                await send_alone(pb.GenerateResponse(request_id=request.request_id, failure=_failure(error)))
            finally:
                room.release()
                for count in ("prompt_tokens", "output_tokens"):
                    caller.notes[count] = caller.notes.get(count, 0) + mine.notes.get(count, 0)

        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    tasks.create_task(one(request))
        except* ApiError as group:  # the stream's own fault: its client does not read
            slow = group.exceptions[0]
        else:
            return
        raise slow


def _prompt(request: pb.GenerateRequest) -> tuple[str, Prompt]:
    """The field's name and what it holds."""
    match request.WhichOneof("prompt"):
        case "text" if request.text:
            return "text", request.text
        case "token_ids" if request.token_ids.ids:
            return "token_ids", list(request.token_ids.ids)
        case None:
            raise invalid("text", "exactly one of text and token_ids must be given")
        case str(name):
            raise invalid(name, f"{name} is empty; a prompt has at least one token")


def _failure(error: ApiError) -> pb.Failure:
    return pb.Failure(
        code=error.code,
        message=error.message,
        param=error.param or "",
        status=error.status,
        retry_after_ms=retry_after_ms(error),
    )
