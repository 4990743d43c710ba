"""One HTTP request's generations, from checked prompts to deltas of text, whatever dialect asked.

A `Job` is one prompt with its n choices, a `Generation` all jobs of one HTTP request. It starts them, turns the mesh's
answers into `Update`s, notices stop ids and stop strings, keeps counts and timings, and cancels what is open when the
client leaves. It knows neither JSON nor HTTP.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from gateway.constraints import Constraint
from gateway.errors import ApiError, ended, refused, unavailable
from gateway.journal.events import Emit, Ended, Refused, Start
from gateway.limits import Admission, Limits
from gateway.mesh import Answer, Mailbox, Mesh
from gateway.metrics import GatewayMetrics
from gateway.scores import PromptScores
from gateway.text.output_parser import Delta, OutputParser
from meshkit.frames import Verdict
from meshkit.types import FinishReason, GrammarSource, RequestId, SamplingParams, TokenLogprobs

KEEP_ALIVE_SECONDS = 15.0
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass(slots=True)
class Choice:
    """One of the n answers to a prompt."""

    index: int  # in the HTTP answer
    output: OutputParser
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    matched: str | int | None = None  # the stop string or stop id that ended it
    matched_eos: bool = False
    last_emit_s: float = 0.0  # 0: nothing yet

    def catch_up(self) -> None:
        """Tell the parser of ids that it was not asked about."""
        if unasked := len(self.ids) - self.output.kept_ids:
            self.output.took(unasked)

    @property
    def stop_reason(self) -> str | int | None:
        """What vLLM's clients read: like `matched`, but None when the model ended by itself."""
        return None if self.matched_eos else self.matched


@dataclass(slots=True)
class Times:
    """Of one job; monotonic seconds, 0 = not yet."""

    started_s: float = 0.0
    queued_s: float = -1.0  # as its scheduler said; -1: it has not
    first_s: float = 0.0
    last_s: float = 0.0

    def token(self, now_s: float, waited_ms: int) -> None:
        """One has come; `waited_ms` as in Emit."""
        if not self.first_s:
            self.first_s = now_s
            self.queued_s = waited_ms / 1000

    @property
    def told(self) -> bool:
        """Whether the stages can be told apart."""
        return self.queued_s >= 0

    @property
    def prefill_s(self) -> float:
        """From the end of the queue to the first token."""
        return max(0.0, self.first_s - self.started_s - self.queued_s)

    @property
    def decode_s(self) -> float:
        return self.last_s - self.first_s


@dataclass(slots=True, kw_only=True)
class Job:
    """One prompt."""

    request_id: RequestId
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    choices: list[Choice]
    terminals: frozenset[int]  # ids that end a choice
    eos_ids: frozenset[int]
    rid: str = ""
    tenant: str = ""
    priority: int = 0
    page_keys: tuple[bytes, ...] = ()
    namespace: bytes = b""
    constraint: Constraint | None = None
    thinking: bool = False  # the output begins with reasoning, which no constraint touches
    scores: PromptScores | None = None  # the prompt's own values, where they are wanted
    cached_tokens: int = 0
    waiting: bool = True
    times: Times = field(default_factory=Times)
    closed: bool = False  # given back to admission

    @property
    def open(self) -> bool:
        return any(choice.finish is None for choice in self.choices)

    @property
    def sent_prompt(self) -> Sequence[int]:
        """What the mesh gets as prompt: all of it, unless the rest comes as given output."""
        return self.prompt if self.scores is None else self.prompt[: self.scores.start]

    @property
    def grammar(self) -> GrammarSource | None:
        return None if self.constraint is None else self.constraint.source(thinking=self.thinking)


class Update(msgspec.Struct):
    """What is new of a choice. `ids` are its new output ids, `logprobs` one each when asked for."""

    job: Job
    choice: Choice
    deltas: list[Delta]
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    ended: bool = False

    def add(self, later: "Update") -> None:
        """Join what came after; neighbouring texts of a part become one."""
        deltas = list(later.deltas)
        if self.deltas and deltas and (joined := self.deltas[-1].joined(deltas[0])) is not None:
            self.deltas.pop()
            deltas[0] = joined
        self.deltas = [*self.deltas, *deltas]
        self.ids = [*self.ids, *later.ids]
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.ended = self.ended or later.ended


class Generation:
    """All jobs of one HTTP request; use as a context manager, so that leaving it cancels what is still open."""

    def __init__(
        self,
        jobs: list[Job],
        *,
        mesh: Mesh,
        admission: Admission,
        metrics: GatewayMetrics,
        limits: Limits,
        received_s: float,
        deadline_s: float | None = None,
        tenant: str = "",
        traceparent: str = "",
        on_close: Callable[["Generation"], None] = lambda _: None,
    ) -> None:
        """`received_s` is the monotonic time at which the HTTP request came in; `tenant` as admission counts it.

        `on_close` is handed this object and must not hold it: all of a request would be garbage for the collector.
        """
        self.jobs = jobs
        self._mesh = mesh
        self._admission = admission
        self._metrics = metrics
        self._limits = limits
        self._received_s = received_s
        self._deadline_s = limits.deadline_seconds if deadline_s is None else min(deadline_s, limits.deadline_seconds)
        self._tenant = tenant
        self._traceparent = traceparent
        self._on_close = on_close
        self._by_id = {job.request_id: job for job in jobs}
        self._open = sum(len(job.choices) for job in jobs)  # choices that have not ended
        self.gaps = metrics.inter_token
        self.mailbox = Mailbox(KEEP_ALIVE_SECONDS)
        self.first_token_s: float | None = None
        self.answer_id = ""  # as the client reads it
        self._started = False
        self._settled = False
        self._failed = False

    def __enter__(self) -> "Generation":
        try:
            self._admission.open(len(self.jobs), self._tenant)
        except ApiError:
            self._on_close(self)
            raise
        self._started = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel what is open: the client left, or an error ends the request."""
        self.mailbox.close()
        for job in self.jobs:
            if job.open:
                self._mesh.client_gone(job.request_id)
            self._give_back(job)
        self._settle()
        self._on_close(self)

    def start(self) -> None:
        """Hand every job to the mesh; a job that asks for no token is answered here."""
        deadline_ms = max(1, int(self._deadline_s * 1000))
        for job in self.jobs:
            if job.params.max_tokens == 0:
                for number in range(len(job.choices)):
                    self.mailbox.put(Ended(job.request_id, number, FinishReason.LENGTH))
                continue
            start = Start(
                request_id=job.request_id,
                prompt=np.asarray(job.sent_prompt, np.int32),
                page_keys=job.page_keys,
                params=job.params,
                seed=job.seed,
                n=len(job.choices),
                tenant=job.tenant,
                priority=job.priority,
                deadline_ms=deadline_ms,
                traceparent=self._traceparent,
                namespace=job.namespace,
                grammar=job.grammar,
            )
            job.times.started_s = time.monotonic()
            self._metrics.processing.observe(job.times.started_s - self._received_s)
            self._mesh.start(start, self.mailbox.put)

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Batches of what is new until every choice has ended, one update per choice; empty when a keep-alive is due.

        None is due while a constraint may still be refused: that answer must not find a stream started.
        Raises ApiError when a job is refused or a choice ends with an error.
        """
        while self._open:
            answers = await self.mailbox.take()
            if answers is None:
                self._check_patience()
                if not self._verdict_due():
                    yield []
                continue
            if len(answers) == 1:
                if (update := self.take_in(answers[0])) is not None:
                    yield [update]
                continue
            fresh: dict[int, Update] = {}
            try:
                for answer in answers:
                    if (update := self.take_in(answer)) is None:
                        continue
                    if (known := fresh.get(update.choice.index)) is None:
                        fresh[update.choice.index] = update
                    else:
                        known.add(update)
            except ApiError:
                if fresh:
                    yield list(fresh.values())
                raise
            if fresh:
                yield list(fresh.values())

    def named(self, prefix: str) -> str:
        """A fresh id for the answer, which the request's span will have too."""
        self.answer_id = f"{prefix}{uuid.uuid4().hex}"
        return self.answer_id

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return not self._open

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.ids) for job in self.jobs for choice in job.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(job.cached_tokens for job in self.jobs)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.output.reasoning_tokens for job in self.jobs for choice in job.choices)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._received_s

    def usage(self) -> dict[str, object]:
        """Usage as every OpenAI dialect writes it, of what has been sampled so far."""
        prompt, output, cached = self.prompt_tokens, self.output_tokens, self.cached_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "prompt_cache_hit_tokens": cached,
            "prompt_cache_miss_tokens": prompt - cached,
        }

    def _check_patience(self) -> None:
        """503 when a job has waited too long for its first token."""
        if self.elapsed_s() > self._limits.first_token_seconds and any(job.waiting for job in self.jobs):
            self._failed = True
            raise unavailable("the request waited too long for its first token", retry_after_s=5)

    def _verdict_due(self) -> bool:
        return any(job.constraint and job.waiting and not self._mesh.accepted(job.request_id) for job in self.jobs)

    def take_in(self, answer: Answer) -> Update | None:
        """Book one answer; None if it says nothing new. `updates` does it for answers that nobody else took."""
        job = self._by_id[answer.request_id]
        if isinstance(answer, Refused):  # the mesh keeps nothing of this job
            for choice in job.choices:
                choice.finish = "error"
            self._failed = True
            if job.constraint is not None and answer.verdict is Verdict.BAD_GRAMMAR:
                raise job.constraint.refused(answer.message, answer.place)
            raise refused(answer.verdict, answer.message, answer.retry_after_ms)
        choice = job.choices[answer.choice]
        if choice.finish is not None:
            return None
        if isinstance(answer, Emit):
            if job.scores is not None and not (answer := self._scored(job, job.scores, answer)).ids:
                return None
            return self._emitted(job, choice, answer)
        return self._ended(job, choice, answer)

    def _scored(self, job: Job, scores: PromptScores, emit: Emit) -> Emit:
        """What of it is output, and not the prompt's own tokens."""
        if job.waiting:
            self._leave_queue(job)
            job.cached_tokens = emit.cached_tokens
            job.times.token(time.monotonic(), emit.waited_ms)
        return scores.take(emit)

    def _emitted(self, job: Job, choice: Choice, emit: Emit) -> Update:
        if job.waiting:  # who prefilled the prompt answers first; a later place in the mesh may have found more of it
            self._leave_queue(job)
            job.cached_tokens = emit.cached_tokens
        now = time.monotonic()
        job.times.token(now, emit.waited_ms)
        ids: Sequence[int] = emit.ids
        logprobs = emit.logprobs
        parser = choice.output
        choice.catch_up()
        deltas = parser.push(ids, logprobs or None)
        if parser.matched_stop is not None:
            keep = parser.kept_ids
            ids = ids[: keep - len(choice.ids)]
            logprobs = logprobs[: len(ids)]
            choice.matched = parser.matched_stop
            # Later, for the mesh may be in the middle of handing answers over.
            number = job.choices.index(choice)
            keep += 0 if job.scores is None else job.scores.given
            asyncio.get_running_loop().call_soon(self._mesh.stop_choice, job.request_id, number, keep)
        elif ids and ids[-1] in job.terminals:  # only the last can be one: the mesh ends the choice there
            choice.matched, choice.matched_eos = ids[-1], ids[-1] in job.eos_ids
        self._time_tokens(choice, len(ids), now, text=bool(deltas))
        choice.ids += ids
        choice.logprobs += logprobs
        if parser.matched_stop is not None:
            self._finish(job, choice, "stop")
        return Update(job, choice, deltas, ids, logprobs, ended=choice.finish is not None)

    def _ended(self, job: Job, choice: Choice, answer: Ended) -> Update:
        if answer.reason == FinishReason.ERROR:
            choice.finish = "error"
            self._failed = True
            raise ended(answer.error_code, answer.error_message)
        choice.catch_up()
        deltas = choice.output.finish()
        finish = _FINISH[answer.reason]
        if (
            late := choice.output.matched_stop
        ) is not None and answer.reason != FinishReason.ABORT:  # the end let go of text that was held back
            choice.matched, choice.matched_eos, finish = late, False, "stop"
        elif answer.reason != FinishReason.STOP:
            choice.matched, choice.matched_eos = None, False
        elif choice.output.complete_calls:
            finish = "tool_calls"
        self._finish(job, choice, finish)
        return Update(job, choice, deltas, ended=True)

    def _finish(self, job: Job, choice: Choice, reason: str) -> None:
        choice.finish = reason
        self._metrics.finished[reason] += 1
        self._open -= 1
        if not job.open:
            self._give_back(job)

    def _time_tokens(self, choice: Choice, count: int, now: float, *, text: bool) -> None:
        """Time to the first text once per request, then the gap per token of each choice."""
        if self.first_token_s is None and text:
            self.first_token_s = now - self._received_s
            self._metrics.first_token.observe(self.first_token_s)
        if choice.last_emit_s and count:
            self._metrics.inter_token.observe((now - choice.last_emit_s) / count, count)
        choice.last_emit_s = now

    def _leave_queue(self, job: Job) -> None:
        job.waiting = False
        self._admission.first_token()

    def _give_back(self, job: Job) -> None:
        """Return what admission lent to this job; once."""
        if job.closed or not self._started:
            return
        job.closed = True
        if job.waiting:
            self._leave_queue(job)
        self._admission.close(self._tenant)
        times = job.times
        times.last_s = max(times.first_s, *[choice.last_emit_s for choice in job.choices])
        if times.told:
            self._metrics.queue.observe(times.queued_s)
            self._metrics.prefill.observe(times.prefill_s)
            self._metrics.decode.observe(times.decode_s)
            self._metrics.inference.observe(times.prefill_s + times.decode_s)

    def _settle(self) -> None:
        """Book the request's totals; once."""
        if self._settled:
            return
        self._settled = True
        metrics, elapsed = self._metrics, self.elapsed_s()
        metrics.requests += 1
        metrics.prompt_tokens += self.prompt_tokens
        metrics.output_tokens += self.output_tokens
        metrics.cached_tokens += self.cached_tokens
        if self._failed:
            metrics.finished["error"] += 1
            return
        if any(job.open for job in self.jobs):
            metrics.aborted += 1
            return
        metrics.prompt_sizes.observe(self.prompt_tokens)
        metrics.output_sizes.observe(self.output_tokens)
        metrics.end_to_end.observe(elapsed)
        if self.first_token_s is not None and self.output_tokens > 1:
            metrics.per_output_token.observe((elapsed - self.first_token_s) / (self.output_tokens - 1))


def check_choices_in_flight(count: int, limits: Limits) -> None:
    if count > limits.choices_in_flight:
        raise ApiError(
            400, f"{count} choices in one request; allowed are {limits.choices_in_flight} (prompts times n)", param="n"
        )
