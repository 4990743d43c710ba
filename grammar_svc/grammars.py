"""Compiled grammars by id: one compile per source however many ask, an LRU bounded in bytes, typed verdicts.

Refusals are remembered for 30 s; timeouts, crashes and "busy" never are. Sources of evicted grammars are kept (they are
small), so that a slot bound to one gets it again. What a child has compiled is built here, in a thread: masks go on
meanwhile. What `kept` knows to compile is built without a child, by a standby before anybody asks.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from grammar_svc.children import ChildError, Compiled
from grammar_svc.kept import Kept
from grammar_svc.limits import SourceLimits
from grammar_svc.sources import Source, read_source
from grammar_svc.verdict import Outcome, SourceError, Verdict
from meshkit.obs import kv

REFUSED_S: Final = 30.0
MAX_REFUSED: Final = 1024
MAX_ALIASES: Final = 8192
MAX_SOURCE_BYTES: Final = 64 << 20
OVERHEAD: Final = 2048  # bytes of the entry itself

log = logging.getLogger(__name__)


class Compiles(Protocol):
    """Where sources are compiled: `grammar_svc.children.Children`, or a test's own."""

    async def compile(self, source: Source) -> Compiled: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """`grammar` is what a matcher is made from."""

    grammar: Any  # Any: xgrammar.CompiledGrammar, which this module does not import
    bytes: int


class Grammars:
    """`on_verdict(id, verdict)` is called for every compile that ends, before its callers go on."""

    def __init__(
        self,
        compiles: Compiles,
        build: Callable[[Source], Any],
        grammar_rev: str,
        *,
        max_bytes: int,
        kept: Kept | None = None,
        max_queued: int = 64,
        max_queued_tenant: int = 4,
        limits: SourceLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compiles, self._build, self.grammar_rev = compiles, build, grammar_rev
        self._kept, self._writing = kept or Kept(None, 0), set[asyncio.Task[None]]()
        self._max_bytes, self._max_queued, self._max_tenant = max_bytes, max_queued, max_queued_tenant
        self._limits, self._clock = limits or SourceLimits(), clock
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._sources: OrderedDict[bytes, Source] = OrderedDict()
        self._source_bytes = 0
        self._refused: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()
        self._aliases: OrderedDict[bytes, bytes] = OrderedDict()  # hash of a source as it was sent -> grammar id
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # of what others keep: tried once
        self._flights: dict[bytes, asyncio.Task[Verdict]] = {}
        self._tenants: defaultdict[str, int] = defaultdict(int)
        self.on_verdict: Callable[[bytes, Verdict], None] = lambda _id, _verdict: None
        self.bytes = 0
        self.compiles = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, grammar_id: bytes) -> Any | None:
        """The compiled grammar, None if it is not here (now)."""
        entry = self._entries.get(grammar_id)
        if entry is None:
            return None
        self._entries.move_to_end(grammar_id)
        return entry.grammar

    def want(self, grammar_id: bytes) -> None:
        """A slot waits for this id: compile it again if its source is still known."""
        source = self._sources.get(grammar_id)
        if source is not None and grammar_id not in self._entries:
            self._fly(grammar_id, source, "")

    async def compile(self, kind: int, text: str, tenant: str = "") -> Verdict:
        """Never raises for a bad source. A caller that goes away leaves the compile to the others that wait."""
        alias = hashlib.blake2b(f"{kind}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if alias in self._aliases and (known := self._known(self._aliases[alias])) is not None:
            return known
        try:
            source = read_source(kind, text, self._limits)
        except SourceError as error:
            return error.verdict()
        grammar_id = source.grammar_id(self.grammar_rev)
        self._aliases[alias] = grammar_id
        while len(self._aliases) > MAX_ALIASES:
            self._aliases.popitem(last=False)
        known = self._known(grammar_id)
        if known is not None:
            return known
        if grammar_id not in self._flights:
            if len(self._flights) >= self._max_queued or self._tenants[tenant] >= self._max_tenant:
                message = "too many grammars wait to be compiled"
                return Verdict(outcome=Outcome.BUSY, message=message, retry_after_ms=500)
            self._fly(grammar_id, source, tenant)
        return await asyncio.shield(self._flights[grammar_id])

    async def preload(self) -> None:
        """Build what others of this place keep and this one has not tried yet; a standby does so repeatedly."""
        for grammar_id in await self._kept.changed():
            if grammar_id in self._entries or grammar_id in self._seen:
                continue
            self._seen[grammar_id] = None
            while len(self._seen) > MAX_ALIASES:
                self._seen.popitem(last=False)
            found = await self._kept.get(grammar_id, used=False)
            if found is None or found[0].grammar_id(self.grammar_rev) != grammar_id:
                continue  # damaged, or of another revision
            try:
                await self._take_in(grammar_id, *found)
            except Exception:  # whatever the engine dislikes about it: it is compiled when somebody asks
                log.exception("a kept grammar cannot be built")

    async def idle(self) -> None:
        """Until no compile is under way."""
        while self._flights:
            await asyncio.gather(*self._flights.values(), return_exceptions=True)
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Give up what is under way."""
        for task in list(self._flights.values()):
            task.cancel()
        await asyncio.gather(*self._flights.values(), *self._writing, return_exceptions=True)

    def _known(self, grammar_id: bytes) -> Verdict | None:
        entry = self._entries.get(grammar_id)
        if entry is not None:
            self._entries.move_to_end(grammar_id)
            return Verdict(outcome=Outcome.OK, grammar_id=grammar_id, cached=True, compiled_bytes=entry.bytes)
        until, refusal = self._refused.get(grammar_id, (0.0, None))
        if refusal is not None and self._clock() < until:
            return replace(refusal, cached=True)
        return None

    def _fly(self, grammar_id: bytes, source: Source, tenant: str) -> None:
        if grammar_id in self._flights:
            return
        self._tenants[tenant] += 1
        task = self._flights[grammar_id] = asyncio.create_task(self._flight(grammar_id, source))

        def landed(_: asyncio.Task[Verdict]) -> None:
            del self._flights[grammar_id]
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

        task.add_done_callback(landed)

    async def _flight(self, grammar_id: bytes, source: Source) -> Verdict:
        verdict = await self._make(grammar_id, source)
        if verdict.outcome in (Outcome.INVALID, Outcome.TOO_LARGE):
            self._refused[grammar_id] = (self._clock() + REFUSED_S, verdict)
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        self.on_verdict(grammar_id, verdict)
        return verdict

    async def _make(self, grammar_id: bytes, source: Source) -> Verdict:
        if (before := await self._kept.get(grammar_id)) is not None:
            try:
                return await self._take_in(grammar_id, source, before[1])
            except Exception:  # whatever the engine dislikes about it now: a child will say
                log.exception("a kept grammar cannot be built: asking a child")
        self.compiles += 1
        try:
            made = await self._compiles.compile(source)
        except SourceError as error:
            return error.verdict()
        except ChildError as error:
            log.warning("compile failed", extra=kv(kind=source.kind.name, reason=error.outcome.name))
            return Verdict(outcome=error.outcome, message=str(error))
        verdict = await self._take_in(grammar_id, source, made)
        if verdict.outcome is Outcome.OK:  # nobody waits for the file
            task = asyncio.create_task(self._kept.put(grammar_id, source, made))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return verdict

    async def _take_in(self, grammar_id: bytes, source: Source, made: Compiled) -> Verdict:
        size = made.memory + len(source.text) + OVERHEAD
        if size > self._max_bytes:
            return Verdict(outcome=Outcome.TOO_LARGE, message=f"{size} bytes compiled, the cache has {self._max_bytes}")
        grammar = await asyncio.to_thread(self._build, source)
        self._keep(grammar_id, source, Entry(grammar, size))
        return Verdict(outcome=Outcome.OK, grammar_id=grammar_id, compile_us=made.micros, compiled_bytes=made.memory)

    def _keep(self, grammar_id: bytes, source: Source, entry: Entry) -> None:
        self._entries[grammar_id] = entry
        self.bytes += entry.bytes
        while self.bytes > self._max_bytes:
            _, old = self._entries.popitem(last=False)
            self.bytes -= old.bytes
        if grammar_id not in self._sources:
            self._sources[grammar_id] = source
            self._source_bytes += len(source.text)
        self._sources.move_to_end(grammar_id)
        while self._source_bytes > MAX_SOURCE_BYTES:
            _, forgotten = self._sources.popitem(last=False)
            self._source_bytes -= len(forgotten.text)
