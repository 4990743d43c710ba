"""What is new of a generation as public protobuf messages: raw chunks, chat deltas, and the end of a choice."""

from collections.abc import Iterator, Sequence

from meshpb.v1 import generation_pb2 as pb

from gateway.chat_answer import finite
from gateway.generation import Choice, Generation, Job, Update
from gateway.text.deltas import Delta
from gateway.text.tokenizer import Tokenizer
from meshkit.types import TokenLogprobs

_FINISH = {
    "stop": pb.FINISH_STOP,
    "length": pb.FINISH_LENGTH,
    "tool_calls": pb.FINISH_TOOL_CALLS,
    "abort": pb.FINISH_ABORT,
}


class Writer:
    """Messages of one generation. Without `stream`, what comes is kept until its choice has ended."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, names: dict[int, str], *, stream: bool) -> None:
        """`names`: the client's request_id by id() of the job."""
        self._generation = generation
        self._tokenizer = tokenizer
        self._names = names
        self._stream = stream
        self._kept: dict[int, Update] = {}
        self._told: set[int] = set()  # id() of jobs whose prompt's values are sent

    def raw(self, updates: list[Update]) -> Iterator[pb.GenerateResponse]:
        for update in self._ready(updates):
            name, index = self._names[id(update.job)], update.choice.index
            scores = update.job.scores
            if scores is not None and id(update.job) not in self._told:
                self._told.add(id(update.job))
                told = pb.PromptLogprobs(start=scores.start, logprobs=self._logprobs(scores.entries))
                yield pb.GenerateResponse(request_id=name, index=index, prompt=told)
            text = "".join(delta.text for delta in update.deltas)
            if text or update.ids:
                chunk = pb.Chunk(token_ids=update.ids, text=text, logprobs=self._logprobs(update.logprobs))
                yield pb.GenerateResponse(request_id=name, index=index, chunk=chunk)
            if update.ended:
                end = self._complete(update.job, update.choice)
                yield pb.GenerateResponse(request_id=name, index=index, complete=end)

    def chat(self, updates: list[Update], *, reasoning: bool) -> Iterator[pb.ChatCompletionChunk]:
        """`reasoning`: whether the caller wants to see it."""
        for update in self._ready(updates):
            name, index = self._names[id(update.job)], update.choice.index
            delta = pb.ChatDelta(token_ids=update.ids, logprobs=self._logprobs(update.logprobs))
            for piece in update.deltas:
                _add(delta, piece, reasoning)
            if delta.ByteSize():
                yield pb.ChatCompletionChunk(request_id=name, index=index, delta=delta)
            if update.ended:
                end = self._complete(update.job, update.choice)
                yield pb.ChatCompletionChunk(request_id=name, index=index, complete=end)

    def _ready(self, updates: list[Update]) -> Iterator[Update]:
        if self._stream:
            yield from updates
            return
        for update in updates:
            known = self._kept.setdefault(update.choice.index, update)
            if known is not update:
                known.add(update)
            if known.ended:
                yield self._kept.pop(update.choice.index)

    def _complete(self, job: Job, choice: Choice) -> pb.Complete:
        usage = pb.Usage(
            prompt_tokens=len(job.prompt),
            completion_tokens=len(choice.ids),
            cached_tokens=job.cached_tokens,
            reasoning_tokens=choice.output.reasoning_tokens,
            ttft_seconds=self._generation.first_token_s,
            e2e_seconds=self._generation.elapsed_s(),
            queue_seconds=job.times.queued_s if job.times.told else None,
        )
        end = pb.Complete(finish_reason=_FINISH[choice.finish or "abort"], usage=usage)
        match choice.stop_reason:
            case int(token):
                end.matched_token_id = token
            case str(text):
                end.matched_text = text
        return end

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[pb.TokenLogprob]:
        return [
            pb.TokenLogprob(
                token_id=entry.ids[0],
                logprob=finite(entry.values[0]),
                token=self._tokenizer.token_bytes(entry.ids[0]),
                top=[
                    pb.TokenLogprob(token_id=token, logprob=finite(value), token=self._tokenizer.token_bytes(token))
                    for token, value in zip(entry.ids[1:], entry.values[1:], strict=True)
                ],
            )
            for entry in entries
        ]


def _add(message: pb.ChatDelta, delta: Delta, reasoning: bool) -> None:
    if delta.call is not None:
        call = delta.call
        new = pb.ToolCallDelta(index=call.index, arguments=delta.text)
        if call.opens:
            new.id, new.name = call.id, call.name
        message.tool_calls.append(new)
    elif delta.kind == "content":
        message.content += delta.text
    elif reasoning:
        message.reasoning_content += delta.text
