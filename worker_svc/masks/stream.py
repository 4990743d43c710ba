"""The mask stream: dials the grammar service of this host for life, carries what the book has to say and what it gets.

A lost stream is dialled again within 50 ms, on a channel of its own so that no back-off of an earlier one counts; then
the book says everything again. Heartbeats both ways; 2 s of silence end a stream. Steps never wait for any of this.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any, Final

import grpc
from meshpb.v1 import common_pb2
from meshpb.v1 import grammar_pb2 as pb

from meshkit.build import build_id
from meshkit.channel import open_channel
from meshkit.errors import MeshError, WireError
from meshkit.obs import Metrics, kv
from meshkit.shell import reason_of
from meshkit.types import PROTO_REV
from worker_svc.clients import attach_masks
from worker_svc.masks.book import MaskBook
from worker_svc.masks.ring import map_ring
from worker_svc.masks.wire import Bounds, get_entries, put_outgoing

HEARTBEAT_S: Final = 0.5
DEAD_S: Final = 2.0
SHORT_PAUSE_S: Final = 0.04
SHORT_PAUSES: Final = 100
LONG_PAUSE_S: Final = 0.25
SUPERSEDED_PAUSE_S: Final = 1.0  # another worker has our name: do not fight over it
REFUSED_S: Final = 3.0
"""Who refuses for so long does not just shut down: rows that wait for masks fail."""

log = logging.getLogger(__name__)
_pools = itertools.count()


class RefusedError(Exception):
    """The service said Bye instead of HelloAck."""


class MaskStream:
    """Make it inside the event loop; `run` until cancelled."""

    def __init__(
        self,
        book: MaskBook,
        address: str,
        *,
        group: str,
        boot: int,
        vocab_size: int,
        slots: int,
        max_verify: int,
        metrics: Metrics,
    ) -> None:
        self.book = book
        self._address = address
        self._hello = pb.MaskHello(
            group=group[:256],
            boot=boot,
            build=build_id(),
            proto_rev=PROTO_REV,
            vocab_size=vocab_size,
            slots=slots,
            max_verify=max_verify,
        )
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._heard = 0.0
        self._attached = False
        self._refused_at: float | None = None
        self._counted = metrics.counter("v4mesh_mask_events_total", "What the mask stream counted", event=None)
        book.wake = self._wake

    def _wake(self) -> None:
        """Called by any thread: the compute thread does so between two steps, and goes on at once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def run(self) -> None:
        """Dial, carry, dial again."""
        pauses, said = _pauses(), ""
        while True:
            try:
                reason = await self._once()
            except RefusedError as refusal:
                reason = f"the grammar service refuses this worker: {refusal}"
                self._refused(reason)
            except (grpc.aio.AioRpcError, MeshError, TimeoutError, asyncio.InvalidStateError) as error:
                reason = reason_of(error)
            except Exception as error:  # ours; without masks for good nobody would learn of it
                log.exception("the mask stream failed")
                reason = type(error).__name__
            if self._attached:
                self._attached, pauses, said = False, _pauses(), ""
                self._counted.add(event="lost")
            if reason != said:
                said = reason
                log.warning("no masks", extra=kv(address=self._address, reason=reason))
            await asyncio.sleep(SUPERSEDED_PAUSE_S if "superseded" in reason else next(pauses))

    def _refused(self, reason: str) -> None:
        self._counted.add(event="refused")
        now = self._loop.time()
        self._refused_at = self._refused_at or now
        if now - self._refused_at > REFUSED_S:
            self.book.refused(reason)

    async def _once(self) -> str:
        """One stream; returns or raises why it ended."""
        channel = open_channel(self._address, pool=f"masks-{next(_pools)}")
        call = attach_masks(channel)
        tasks: list[asyncio.Task[str]] = []
        try:
            async with asyncio.timeout(DEAD_S):
                attach_id, bounds = await self._introduce(call)
            self._attached, self._refused_at = True, None
            self._heard = self._loop.time()
            self.book.attached()
            log.info("masks attached", extra=kv(address=self._address))
            work = (self._read(call, attach_id, bounds), self._write(call, attach_id), self._watch())
            tasks = [asyncio.create_task(part) for part in work]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            self.book.detached()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
            await channel.close()

    async def _introduce(self, call: Any) -> tuple[int, Bounds]:
        """Hello, its answer, the ring. Any: the stub is generic over the messages."""
        hello = self._hello
        await call.write(pb.MaskUp(hello=hello))
        down = await call.read()
        if down is grpc.aio.EOF:
            raise WireError("the stream ended before HelloAck")
        if down.WhichOneof("frame") == "bye":
            raise RefusedError(down.bye.reason[:200])
        if down.WhichOneof("frame") != "hello_ack" or not down.attach_id:
            raise WireError("the first frame must be HelloAck, with an attach_id")
        ack, words = down.hello_ack, self.book.words
        if ack.words != words:
            raise WireError(f"hello_ack.words: {ack.words}, the model has {words}")
        ring = map_ring(ack.ring_path, ack.ring_nonce, 2 * hello.slots * hello.max_verify, words)
        await call.write(pb.MaskUp(attach_id=down.attach_id, mapped=pb.RingMapped(mapped=ring is not None)))
        if ring is None:
            log.warning("mask rows travel inline: no ring here", extra=kv(address=self._address))
        return down.attach_id, Bounds(hello.slots, hello.max_verify, words, ring)

    async def _read(self, call: Any, attach_id: int, bounds: Bounds) -> str:
        while (down := await call.read()) is not grpc.aio.EOF:
            if down.attach_id != attach_id:
                self._counted.add(event="stale_attach")
                continue
            self._heard = self._loop.time()
            frame = down.WhichOneof("frame")
            if frame == "entries":
                stale = self.book.deliver(get_entries(down.entries, bounds))
                if stale:
                    self._counted.add(stale, event="stale_entries")
            elif frame == "bye":
                return f"the service said bye: {down.bye.reason[:200]}"
            elif frame != "heartbeat":
                raise WireError(f"frame: {frame or 'none that this build knows'} after HelloAck")
        return "the service ended the stream"

    async def _write(self, call: Any, attach_id: int) -> str:
        """The only writer: heartbeats too, so that they stop when nothing gets out."""
        beat_at = 0.0
        while True:
            await self._news.wait()
            self._news.clear()
            for message in put_outgoing(self.book.outgoing(), attach_id):
                await call.write(message)
            if (now := self._loop.time()) >= beat_at:
                beat_at = now + HEARTBEAT_S
                await call.write(pb.MaskUp(attach_id=attach_id, heartbeat=common_pb2.Heartbeat()))

    async def _watch(self) -> str:
        """Make the writer beat, and end a stream that is silent."""
        while True:
            self._news.set()
            await asyncio.sleep(HEARTBEAT_S)
            if self._loop.time() - self._heard > DEAD_S:
                self._counted.add(event="silent")
                return "no sign of life"


def _pauses() -> Iterator[float]:
    """Between dials that fail (0.7 ms of processor time each): a service that was killed has a standby that listens
    within some tenths of a second; one that stays away for seconds is not waited for as eagerly."""
    for number in itertools.count():
        pause = SHORT_PAUSE_S if number < SHORT_PAUSES else LONG_PAUSE_S
        yield pause * random.uniform(0.7, 1.0)
