"""Streams of workers: Hello, fences, silence, and the way of frames through one engine each.

The accepting side mints the attachment; a newer one of the same group replaces the older, which ends at once. Frames of
another attach_id are counted and dropped. Heartbeats go out of the loop that computes masks: if it is stuck, they stop.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import numpy as np
from meshpb.v1 import common_pb2
from meshpb.v1 import grammar_pb2 as pb

from grammar_svc import wire
from grammar_svc.engine import Engine, Entry, Facts
from grammar_svc.grammars import Grammars
from grammar_svc.ring import Ring
from grammar_svc.session import Matchers
from grammar_svc.verdict import Outcome, Verdict
from meshkit.errors import ConfigError, MeshError, WireError
from meshkit.obs import Family, kv
from meshkit.types import PROTO_REV

HEARTBEAT_S: Final = 0.5
DEAD_S: Final = 2.0
MAX_SLOTS: Final = 65536
MAX_VERIFY: Final = 64
MAX_INLINE: Final = 12 << 20  # bytes of rows in one message, below the channel's 16 MiB

log = logging.getLogger(__name__)


class Stream(Protocol):
    """A servicer context. Any: its stubs are generic over the messages."""

    async def read(self) -> Any: ...

    async def write(self, message: Any, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What all attachments of this process share."""

    grammars: Grammars
    facts: Facts
    matchers: Matchers
    boot: int
    build: str
    ring_dir: Path
    ring_bytes: int
    counted: Family


class Attachment:
    """One attached group: its engine, its ring, and the only writer of its stream."""

    def __init__(self, host: Host, stream: Stream, hello: pb.MaskHello) -> None:
        self.group, self.attach_id = hello.group, secrets.randbits(64) | 1
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._host, self._stream = host, stream
        self._bounds = wire.Bounds(hello.slots, hello.max_verify, host.facts.vocab_size)
        rows = 2 * hello.slots * hello.max_verify
        self._ring: Ring | None = None
        try:
            self._ring = Ring(host.ring_dir, self.attach_id, rows, host.facts.words)
        except ConfigError as error:  # slower, not wrong: rows travel inline
            log.error("no ring", extra=kv(group=self.group, reason=error.message))
        self._rows = self._ring.rows if self._ring else np.zeros((rows, host.facts.words), np.int32)
        grammars = host.grammars
        self.engine = Engine(
            host.facts,
            self._rows,
            hello.slots,
            hello.max_verify,
            get=grammars.get,
            want=grammars.want,
            matchers=host.matchers,
        )
        self._mapped = False
        self._writing = asyncio.Lock()
        self._dirty = asyncio.Event()
        self._heard = asyncio.get_running_loop().time()

    def end(self, reason: str) -> None:
        """Close this stream, with a Bye if it still takes one."""
        if not self.ended.done():
            self.ended.set_result(reason)

    def on_verdict(self, grammar_id: bytes, verdict: Verdict) -> None:
        """A compile has ended: sessions that wait for it can be answered."""
        if verdict.outcome is Outcome.OK:
            self.engine.grammar_ready(grammar_id)
        else:
            self.engine.grammar_refused(grammar_id, f"{verdict.outcome.name}: {verdict.message}")
        self._dirty.set()

    async def run(self) -> str:
        """Until either side ends it; returns why. WireError and RPC errors are raised."""
        ack = pb.MaskHelloAck(
            boot=self._host.boot,
            build=self._host.build,
            grammar_rev=self._host.grammars.grammar_rev,
            words=self._host.facts.words,
            ring_path=str(self._ring.path) if self._ring else "",
            ring_nonce=self._ring.nonce if self._ring else b"",
        )
        tasks = []
        try:
            async with asyncio.timeout(DEAD_S):
                await self._stream.write(pb.MaskDown(attach_id=self.attach_id, hello_ack=ack))
            tasks = [asyncio.create_task(work) for work in (self._read(), self._beat(), self._pump())]
            await asyncio.wait((*tasks, self.ended), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    return task.result()
            reason = self.ended.result()
            async with asyncio.timeout(HEARTBEAT_S), self._writing:
                await self._stream.write(pb.MaskDown(attach_id=self.attach_id, bye=common_pb2.Bye(reason=reason)))
            return reason
        except TimeoutError:
            return "the peer does not read its stream"
        finally:
            if self._ring is not None:
                self._ring.unlink()  # first: the RPC may be cancelled while the tasks below end
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- frames -----------------------------------------------------------------------------------------------------

    async def _read(self) -> str:
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            if message.attach_id != self.attach_id:
                self._host.counted.add(event="stale_attach")
                continue
            self._heard = asyncio.get_running_loop().time()
            frame = message.WhichOneof("frame")
            match frame:
                case "tokens":
                    wire.apply_tokens(message.tokens, self._bounds, self.engine)
                case "binds":
                    wire.apply_binds(message.binds, self._bounds, self.engine)
                case "unbinds":
                    wire.apply_unbinds(message.unbinds, self._bounds, self.engine)
                case "mapped":
                    self._mapped = message.mapped.mapped and self._ring is not None
                case "heartbeat":
                    continue
                case "bye":
                    return f"the peer said bye: {message.bye.reason[:200]}"
                case _:
                    raise WireError(f"frame: {frame or 'none that this build knows'} after Hello")
            await self._flush()
        return "the peer ended the stream"

    async def _flush(self) -> None:
        async with self._writing:
            entries = self.engine.take()
            while entries:
                part = entries if self._mapped else self._head(entries)
                body = wire.put_entries(part, self._rows, inline=not self._mapped)
                entries = entries[len(part) :]
                # A peer that does not read is noticed by the heartbeat, which waits for the same lock.
                await self._stream.write(pb.MaskDown(attach_id=self.attach_id, entries=body))
            if self.engine.counts:
                for name, amount in self.engine.counts.items():
                    self._host.counted.add(amount, event=name)
                self.engine.counts.clear()

    def _head(self, entries: list[Entry]) -> list[Entry]:
        """As many entries as fit one message."""
        size = 0
        for index, entry in enumerate(entries):
            size += entry.n_rows * self._host.facts.words * 4
            if index and size > MAX_INLINE:
                return entries[:index]
        return entries

    async def _pump(self) -> str:
        """Entries that became due without a frame of the peer's."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._flush()

    async def _beat(self) -> str:
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() - self._heard > DEAD_S:
                self._host.counted.add(event="peer_silent")
                return "no sign of life"
            async with asyncio.timeout(DEAD_S), self._writing:
                await self._stream.write(pb.MaskDown(attach_id=self.attach_id, heartbeat=common_pb2.Heartbeat()))
            await asyncio.sleep(HEARTBEAT_S)


class Attachments:
    """All groups of this process by name."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._by_group: dict[str, Attachment] = {}
        self._draining = ""
        host.grammars.on_verdict = self._on_verdict

    def __len__(self) -> int:
        return len(self._by_group)

    def farewell(self, reason: str) -> None:
        """Bye on every stream; new ones are refused."""
        self._draining = reason
        for attachment in self._by_group.values():
            attachment.end(reason)

    async def serve(self, stream: Stream) -> str:
        """One stream, from Hello to its end; returns why it ended."""
        try:
            async with asyncio.timeout(DEAD_S):
                message = await stream.read()
        except TimeoutError:
            return "no Hello came"
        if message is grpc.aio.EOF:
            return "the peer ended the stream before Hello"
        if message.WhichOneof("frame") != "hello" or message.attach_id:
            raise WireError("the first frame must be Hello, with attach_id 0")
        hello = message.hello
        wrong = self._draining or self._wrong(hello)
        if wrong:
            self.host.counted.add(event="refused")
            await stream.write(pb.MaskDown(bye=common_pb2.Bye(reason=wrong)))
            return wrong
        if (old := self._by_group.get(hello.group)) is not None:
            self.host.counted.add(event="superseded")
            old.end("superseded")
        attachment = self._by_group[hello.group] = Attachment(self.host, stream, hello)
        log.info("attached", extra=kv(group=hello.group, slots=hello.slots))
        reason = "cancelled"
        try:
            reason = await attachment.run()
        except MeshError as error:
            reason = error.message
            raise
        finally:
            if self._by_group.get(hello.group) is attachment:
                del self._by_group[hello.group]
            log.info("detached", extra=kv(group=hello.group, reason=reason))
        return reason

    def _on_verdict(self, grammar_id: bytes, verdict: Verdict) -> None:
        for attachment in self._by_group.values():
            attachment.on_verdict(grammar_id, verdict)

    def _wrong(self, hello: pb.MaskHello) -> str:
        facts = self.host.facts
        if hello.proto_rev != PROTO_REV:
            return f"proto_rev: this service speaks {PROTO_REV}, not {hello.proto_rev}; use one build"
        if hello.vocab_size != facts.vocab_size:
            return f"vocab_size: this service's model has {facts.vocab_size}, the worker brings {hello.vocab_size}"
        if hello.grammar_rev and hello.grammar_rev != self.host.grammars.grammar_rev:
            return f"grammar_rev: {self.host.grammars.grammar_rev} here, {hello.grammar_rev} there; use one build"
        if not (hello.group and len(hello.group) <= 256):
            return "group: must be a name of at most 256 characters"
        if not (1 <= hello.slots <= MAX_SLOTS and 1 <= hello.max_verify <= MAX_VERIFY):
            return f"slots, max_verify: must be 1..{MAX_SLOTS} and 1..{MAX_VERIFY}"
        size = 2 * hello.slots * hello.max_verify * facts.words * 4
        if size > self.host.ring_bytes:
            return f"slots * max_verify: a ring of {size} bytes, at most {self.host.ring_bytes} are allowed"
        return ""
