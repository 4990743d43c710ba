"""A `Mesh` of several schedulers, each a model instance: every request runs at one of them, and may change once.

The chooser decides where. A request that is refused for now is tried elsewhere as long as nothing of it was accepted;
one whose scheduler is lost goes elsewhere at once if its client has no token yet, after a while with the tokens it has.
All instances must serve the same model; those that do not are left alone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from gateway.errors import unavailable
from gateway.instances.chooser import BUSY, NEVER_SERVED, SERVING, Ask, Chooser, Pick
from gateway.instances.summary import Summary, serves_same
from gateway.journal.events import Emit, Refused, Start
from gateway.mesh import Answer, Instance, Sink
from gateway.mesh_client import MeshClient
from meshkit.clock import MonotonicClock
from meshkit.frames import SchedulerStatus, Verdict
from meshkit.obs import Metrics
from meshkit.types import RequestId

MOVE_AFTER_S: Final = 2.0
"""A lost scheduler may be back by then, and its workers have kept what its requests have computed."""
WATCH_S: Final = 0.5
_LATER: Final = frozenset({Verdict.QUEUE_FULL, Verdict.NO_WORKER, Verdict.DRAINING})

T = TypeVar("T")

log = logging.getLogger("gateway.instances")


@dataclass(slots=True, eq=False)
class _Route:
    """Where a request runs."""

    start: Start
    sink: Sink
    pick: Pick
    tried: set[int] = field(default_factory=set)  # refused it
    refusal: Refused | None = None  # the most hopeful one
    answered: bool = False


class Fleet:
    """Made inside an event loop; `run` must be running. `clients` in the order of `names`, their addresses."""

    def __init__(self, names: Sequence[str], clients: Sequence[MeshClient], rng: Random, metrics: Metrics) -> None:
        self.on_placed: Callable[[int, Sequence[bytes]], None] = lambda index, keys: None
        """Hears where prompts go: the instance, and the keys of the prompt's pages."""
        self._names = tuple(names)
        self._clients = tuple(clients)
        self._chooser = Chooser(names, rng)
        self._summary = Summary()
        self._clock = MonotonicClock()
        self._routes: dict[RequestId, _Route] = {}
        self._mixed: set[int] = set()  # instances that were found to serve something else
        self._down_ns = [0] * len(names)  # since when an instance that had requests has served nothing
        numbers = [str(number) for number in range(len(names))]
        self._picked = metrics.counter(
            "v4mesh_instance_requests_total",
            "Requests sent to an instance, and why there",
            instance=numbers,
            reason=("prefix", "load", "only"),
        )
        self._moved = metrics.counter(
            "v4mesh_instance_moves_total",
            "Requests that left an instance",
            instance=numbers,
            reason=("refused", "lost"),
        )
        for index, client in enumerate(self._clients):
            client.on_lost = partial(self._lost, index)

    async def run(self) -> None:
        """All clients until cancelled; raises what the first of them raised."""
        tasks = [asyncio.create_task(work) for work in (*(client.run() for client in self._clients), self._watch())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what handlers call -----------------------------------------------------------------------------------------

    @property
    def status(self) -> SchedulerStatus | None:
        return self._summary.of([(client.status, client.attached) for client in self._clients])

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(
            Instance(name, client.attached, client.status, it.open, len(it.pages))
            for name, client, it in zip(self._names, self._clients, self._chooser.instances, strict=True)
        )

    def start(self, start: Start, sink: Sink) -> None:
        pick = self._choose(start, start.n)
        assert pick is not None, "one that nobody has refused has a place"
        route = self._routes[start.request_id] = _Route(start, sink, pick)
        self._send(route)

    def accepted(self, request_id: RequestId) -> bool:
        route = self._routes.get(request_id)
        return route is None or self._at(route).accepted(request_id)

    def client_gone(self, request_id: RequestId) -> None:
        route = self._routes.pop(request_id, None)
        if route is not None:
            self._chooser.ended(route.pick, route.pick.open)
            self._at(route).client_gone(request_id)

    def stop_choice(self, request_id: RequestId, choice: int, keep: int) -> None:
        route = self._routes.get(request_id)
        if route is not None:
            self._at(route).stop_choice(request_id, choice, keep)
            self._choice_over(request_id, route)

    def abort(self, request_id: RequestId) -> None:
        route = self._routes.get(request_id)
        if route is not None:
            self._at(route).abort(request_id)

    async def flush_cache(self) -> tuple[int, int]:
        async def one(index: int, client: MeshClient) -> tuple[int, int]:
            pages, open_requests = await client.flush_cache()
            if not open_requests:
                self._chooser.flushed(index)
            return pages, open_requests

        answers = await self._ask_attached(one)
        return sum(pages for pages, _ in answers), sum(running for _, running in answers)

    async def explain(self, page_keys: tuple[bytes, ...], tokens: int) -> list[dict[str, Any]]:
        async def one(index: int, client: MeshClient) -> list[dict[str, Any]]:
            return [{"instance": index, **rank} for rank in await client.explain(page_keys, tokens)]

        return [rank for ranks in await self._ask_attached(one) for rank in ranks]

    async def _ask_attached(self, ask: Callable[[int, MeshClient], Awaitable[T]]) -> list[T]:
        """Answers of all that are attached. Raises the ApiError of one that does not answer."""
        here = [(index, client) for index, client in enumerate(self._clients) if client.attached]
        if not here:
            raise unavailable("no scheduler is attached", retry_after_s=2)
        answers = await asyncio.gather(*(ask(*it) for it in here), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def heard(self, index: int, keys: Sequence[bytes]) -> None:
        """Another gateway of the same schedulers has sent a prompt there."""
        if 0 <= index < len(self._clients):
            self._chooser.heard(index, keys)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _take(self, route: _Route, answer: Answer) -> None:
        """One answer of the instance in charge, before the client hears of it."""
        if isinstance(answer, Emit):
            if not route.pick.answered:
                route.answered = True
                self._chooser.answered(route.pick, answer.cached_tokens)
        elif isinstance(answer, Refused):
            refusal = self._refused(route, answer)
            if refusal is None:
                return
            answer = refusal
        else:
            self._choice_over(answer.request_id, route)
        route.sink(answer)

    def _choice_over(self, request_id: RequestId, route: _Route) -> None:
        self._chooser.ended(route.pick, 1)
        if not route.pick.open:
            del self._routes[request_id]

    def _refused(self, route: _Route, answer: Refused) -> Refused | None:
        """What the client is told; None if another instance was found to ask."""
        index, choices = route.pick.index, route.pick.open
        self._chooser.moved(route.pick)
        if answer.verdict in _LATER:
            self._chooser.avoid(index, answer.retry_after_ms, self._clock.now_ns())
        if answer.verdict in _LATER or answer.verdict is Verdict.NEVER_FITS:
            route.tried.add(index)
            too_small = self._not_larger(index) if answer.verdict is Verdict.NEVER_FITS else set()
            known = route.refusal
            if known is None or (answer.verdict in _LATER and answer.retry_after_ms < known.retry_after_ms):
                route.refusal = answer
            pick = self._choose(route.start, choices, route.tried | too_small, SERVING)
            if pick is not None:
                self._moved.add(1, instance=str(index), reason="refused")
                route.pick = pick
                self._send(route)
                return None
        del self._routes[answer.request_id]
        return route.refusal or answer

    def _not_larger(self, index: int) -> set[int]:
        sizes = [client.status.pages_total if client.status is not None else 0 for client in self._clients]
        return {other for other, size in enumerate(sizes) if size <= sizes[index]}

    # ---- places -----------------------------------------------------------------------------------------------------

    def _at(self, route: _Route) -> MeshClient:
        return self._clients[route.pick.index]

    def _send(self, route: _Route) -> None:
        self._picked.add(1, instance=str(route.pick.index), reason=route.pick.reason)
        if route.start.page_keys:
            self.on_placed(route.pick.index, route.start.page_keys)
        self._at(route).start(route.start, partial(self._take, route))

    def _choose(
        self, start: Start, choices: int, without: Set[int] = frozenset(), worst: int = NEVER_SERVED
    ) -> Pick | None:
        now_ns = self._clock.now_ns()
        for index, client in enumerate(self._clients):
            self._chooser.told(index, client.status, client.attached, now_ns)
        ask = Ask(start.page_keys, len(start.prompt), choices)
        return self._chooser.choose(ask, now_ns, without | self._foreign(), worst)

    def _foreign(self) -> set[int]:
        """Instances that serve something else than the gateway says."""
        status = self.status
        model = status.model if status is not None else None
        found = set()
        for index, client in enumerate(self._clients):
            theirs = client.status.model if client.status is not None else None
            if model is not None and theirs is not None and not serves_same(model, theirs):
                found.add(index)
        for index in found - self._mixed:
            log.error("instance %d serves another model or KV layout; it gets no requests", index)
        self._mixed = found
        return found

    async def _watch(self) -> None:
        """Look after requests whose instance serves no more, in case its connection says nothing."""
        while True:
            await asyncio.sleep(WATCH_S)
            for index in {route.pick.index for route in self._routes.values()}:
                self._leave(index)

    def _lost(self, index: int) -> None:
        # Later: the client is in the middle of carrying out its journal's effects.
        asyncio.get_running_loop().call_soon(self._leave, index)

    def _leave(self, index: int) -> None:
        """Take requests away from an instance that cannot serve them."""
        client, now_ns = self._clients[index], self._clock.now_ns()
        status = client.status
        if client.attached and status is not None and (status.ready or status.draining):
            self._down_ns[index] = 0
            return
        self._down_ns[index] = self._down_ns[index] or now_ns
        waited = now_ns - self._down_ns[index] >= MOVE_AFTER_S * 1e9
        for route in [route for route in self._routes.values() if route.pick.index == index]:
            if waited or not (route.answered or client.attached):
                self._move(route)

    def _move(self, route: _Route) -> None:
        """To the best place there is now; it stays where there is none."""
        pick = self._choose(route.start, route.pick.open, {route.pick.index}, BUSY)
        if pick is None:
            return
        start = self._at(route).take_back(route.start.request_id)
        if start is None:  # it has just ended there
            self._chooser.moved(pick)
            return
        self._moved.add(1, instance=str(route.pick.index), reason="lost")
        self._chooser.moved(route.pick)
        route.start, route.pick, route.tried, route.refusal = start, pick, set(), None
        self._send(route)
