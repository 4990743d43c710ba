"""The gateway as one object: what all handlers share, and how a checked request becomes a running generation.

Knows whether requests can be served, the model as the worker describes it, and the abort handles in flight. No routes,
no JSON, no gRPC.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import msgspec

from gateway.config import GatewayConfig
from gateway.constraints import Constraint
from gateway.encoding import PromptEncoder
from gateway.errors import ApiError, invalid, unavailable
from gateway.exchange import Caller, Exchange, read_body
from gateway.generation import Choice, Generation, Job, check_choices_in_flight
from gateway.limits import Admission
from gateway.mesh import Mesh
from gateway.metrics import GatewayMetrics
from gateway.models import ServedModel, read_model_folder
from gateway.schema import BodyDecoder
from gateway.scores import ScoreRequest
from gateway.spans import note_answer, note_jobs, note_sampling, stamp
from gateway.sse import StallGuard
from gateway.stored import ResponseStore, StoreLimits
from gateway.text.output_parser import OutputParser
from gateway.text.tokenizer import Tokenizer
from gateway.validate import Sampling
from meshkit.frames import SchedulerStatus
from meshkit.pages import namespace_key, page_keys
from meshkit.types import ModelInfo, RequestId

Body = TypeVar("Body", bound=msgspec.Struct)


class Siblings(Protocol):
    """Other gateway processes behind the same port, this one included in what is asked."""

    async def metrics(self) -> bytes: ...

    async def abort(self, tenant: str, rid: str) -> None:
        """An empty rid stands for all of the tenant's requests."""

    async def stored(self, tenant: str, name: str) -> bytes | None:
        """A response that one of them keeps."""

    async def forget(self, tenant: str, name: str) -> bool:
        """Whether one of them had it."""

    async def stop(self) -> None: ...


class Gateway:
    """Shared state of one gateway process. `tokenizer` may be given later; until then requests get 503."""

    def __init__(self, mesh: Mesh, tokenizer: Tokenizer | None, config: GatewayConfig) -> None:
        self.mesh = mesh
        self.config = config
        self.limits = config.limits
        self._tokenizer = tokenizer
        self._folder_model = read_model_folder(
            config.model, served_names=config.served_model_name, effort_revision=config.dsv4_effort_revision
        )
        self._model = self._folder_model
        self._told: ModelInfo | None = None
        self.admission = Admission(self.limits)
        self.stored = ResponseStore(
            StoreLimits(config.stored_responses, config.stored_response_bytes, config.stored_response_seconds)
        )
        self.metrics = GatewayMetrics(
            self._model.name,
            lambda: mesh.status,
            lambda: [it.status for it in mesh.instances],
            lambda: (len(self.stored), self.stored.bytes),
        )
        self.encoder = PromptEncoder(config.encode_threads)
        self.guard = StallGuard(self.limits.stream_stall_seconds, self.limits.stream_backlog)
        self._decoder = BodyDecoder(self.limits)
        self.siblings: Siblings | None = None  # other processes of the same port
        self._handles: dict[tuple[str, str], list[RequestId]] = {}  # (tenant, rid) of what is in flight
        self._open: dict[RequestId, str] = {}  # and its tenant

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise unavailable("the gateway is starting", retry_after_s=2)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def model(self) -> ServedModel:
        """The folder's word, corrected by the worker's once there is one."""
        status = self.mesh.status
        if status is not None and status.model is not None and status.model is not self._told:
            self._told = status.model
            self._model = self._folder_model.told_by(status.model)
        return self._model

    @property
    def fingerprint(self) -> str:
        """Changes with the weights and the meaning of their KV."""
        model = self.model
        return "fp_" + hashlib.blake2b(f"{model.revision}/{model.kv_layout_id}".encode(), digest_size=6).hexdigest()

    def trouble(self) -> ApiError | None:
        """Why this process is not ready; None when it is."""
        status = self.mesh.status
        if self.admission.draining:
            return unavailable("this gateway is shutting down", retry_after_s=2)
        refusal = self._refusal(status)
        if refusal is None and status is not None and not status.ready:
            refusal = unavailable("no worker is ready", _seconds(status.retry_after_ms))
        return refusal

    def check_ready(self) -> None:
        """503 while a request could not even be queued. A mesh that has served before takes requests while it heals.

        So does a gateway that leaves: who still has a connection to it is served there, and told to close it.
        """
        if (refusal := self._refusal(self.mesh.status)) is not None:
            raise refusal

    @property
    def is_complete(self) -> bool:
        """Whether this process has what it needs; the mesh behind it may still come up."""
        return self._tokenizer is not None and self.mesh.status is not None

    @property
    def takes_requests(self) -> bool:
        """Whether they would be queued at least."""
        return self._refusal(self.mesh.status) is None

    def _refusal(self, status: SchedulerStatus | None) -> ApiError | None:
        if self._tokenizer is None:
            return unavailable("the gateway is starting", retry_after_s=2)
        if status is None:
            return unavailable("no scheduler is attached", retry_after_s=2)
        if status.draining:
            return unavailable("the scheduler is shutting down", _seconds(status.retry_after_ms))
        if status.model is None:
            return unavailable("no worker is ready; the model may still be loading", retry_after_s=2)
        return None

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def body(self, exchange: Exchange, kind: type[Body]) -> Body:
        body = await read_body(exchange, kind, self._decoder, self.admission, self.limits)
        stamp(exchange, "read")
        return body

    def job(
        self,
        caller: Caller,
        sampling: Sampling,
        prompt: Sequence[int],
        parsers: Callable[[frozenset[int]], OutputParser],
        *,
        param: str,
        first_index: int = 0,
        salt: str = "",
        priority: int = 0,
        rid: str = "",
        constraint: Constraint | None,
        thinking: bool = False,
        score: ScoreRequest | None = None,
    ) -> Job:
        """A prompt with its n choices, within the context; lowering max_tokens is told in a header.

        `parsers` makes one choice's output parser, given the ids that end a choice. `thinking`: the output begins
        with reasoning, and `constraint` is for what follows it. `score`: values of the prompt's own tokens are wanted.
        """
        stamp(caller, "encoded")
        note_sampling(caller, sampling)
        prompt = sampling.cut(prompt, self.model)
        if not prompt:
            raise invalid(param, f"{param} is empty; a prompt has at least one token")
        model = self.model
        params, clamped = sampling.for_prompt(len(prompt), model, self.config.max_output_tokens, param)
        if clamped:
            caller.headers["x-v4mesh-clamped"] = f"max_tokens={params.max_tokens}"
        eos = frozenset(model.eos_ids)
        terminals = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else eos)
        if sampling.bad_words:
            params = replace(params, bad_words=self._words(sampling.bad_words))
        score, scores, sent = score or sampling.score, None, prompt
        if score is not None:
            params, scores = score.split(
                prompt, params, n=sampling.n, terminals=terminals, constraint=constraint, limits=self.limits
            )
            sent = prompt[: scores.start]
        namespace = namespace_key(caller.tenant, salt, model.revision, model.kv_layout_id)
        return Job(
            request_id=RequestId(os.urandom(16)),
            prompt=prompt,
            params=params,
            seed=sampling.seed,
            choices=[Choice(first_index + number, parsers(terminals)) for number in range(sampling.n)],
            terminals=terminals,
            eos_ids=eos,
            rid=rid,
            tenant=caller.tenant,
            priority=priority,
            page_keys=tuple(page_keys(sent, namespace)),
            namespace=namespace,
            constraint=constraint,
            thinking=thinking,
            scores=scores,
        )

    def _words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """As tokens: each as it stands, and as it goes on after a blank."""
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        encoded = [tuple(self.tokenizer.encode(spelling, added_tokens=False)) for spelling in spellings]
        return tuple(dict.fromkeys(encoded))

    def generation(self, caller: Caller, jobs: list[Job]) -> Generation:
        """Bind jobs to this caller. Raises 400 for an abort handle that is in flight already."""
        check_choices_in_flight(sum(len(job.choices) for job in jobs), self.limits)
        tenant = caller.tenant
        rids = list(dict.fromkeys(job.rid for job in jobs if job.rid))
        for rid in rids:
            if (tenant, rid) in self._handles:
                raise invalid("rid", f"rid {rid!r} is already in use by a request in flight")
        for rid in rids:
            self._handles[tenant, rid] = [job.request_id for job in jobs if job.rid == rid]
        self._open |= {job.request_id: tenant for job in jobs}
        caller.notes["prompt_tokens"] = sum(len(job.prompt) for job in jobs)
        note_jobs(caller, jobs)

        def release(generation: Generation) -> None:
            note_answer(caller, generation)
            for job in jobs:
                del self._open[job.request_id]
            for rid in rids:
                del self._handles[tenant, rid]

        return Generation(
            jobs,
            mesh=self.mesh,
            admission=self.admission,
            metrics=self.metrics,
            limits=self.limits,
            received_s=caller.received_s,
            deadline_s=caller.deadline_s,
            tenant=tenant if self.config.api_key_file is not None else "",
            traceparent=caller.traceparent,
            on_close=release,
        )

    async def abort_everywhere(self, tenant: str, rid: str) -> None:
        """In all processes of this port; an empty rid stands for all of the tenant's requests."""
        if self.siblings is not None:
            await self.siblings.abort(tenant, rid)
        elif rid:
            self.abort(tenant, rid)
        else:
            self.abort_all(tenant)

    async def stored_response(self, tenant: str, name: str) -> bytes | None:
        """A kept response, wherever on this port it was made."""
        found = self.stored.get(tenant, name)
        return found if found is not None or self.siblings is None else await self.siblings.stored(tenant, name)

    async def forget_response(self, tenant: str, name: str) -> bool:
        """False if no process of this port keeps it."""
        if self.stored.drop(tenant, name):
            return True
        return self.siblings is not None and await self.siblings.forget(tenant, name)

    def abort(self, tenant: str, rid: str) -> None:
        """Abort the requests under a tenant's handle; an unknown one does nothing."""
        for request_id in self._handles.get((tenant, rid), ()):
            self.mesh.abort(request_id)

    def abort_all(self, tenant: str | None = None) -> None:
        """Abort what a tenant has in flight; without one, everything."""
        for request_id, owner in list(self._open.items()):
            if tenant in (None, owner):
                self.mesh.abort(request_id)


def _seconds(retry_after_ms: int) -> int:
    return max(1, -(-retry_after_ms // 1000))
