"""Masks under simulation: the worker's book, the service's engine and sessions, both real, and the stream between them.

A matcher is a digest of its grammar and of the ids it took; its mask is a function of that (`reference.allowed`). Every
message is real protobuf. The stream is FIFO, then breaks with any prefix delivered; rows travel inline or in a ring.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from meshpb.v1 import grammar_pb2 as pb

from grammar_svc import wire as service_wire
from grammar_svc.engine import Engine, Facts
from grammar_svc.session import Matchers, Rows
from tests.sim.reference import ALL, EOS, THINK_END, VOCAB, WORDS, allowed, fold, may_end, start_of
from worker_svc.masks.book import MaskBook
from worker_svc.masks.source import Answer, Ask, MaskRows
from worker_svc.masks.wire import Bounds, get_entries, put_outgoing

if TYPE_CHECKING:
    from tests.sim.grammar import GrammarService
    from tests.sim.world import Process, World

FACTS = Facts(vocab_size=VOCAB, words=WORDS, eos_ids=(EOS,), think_end=THINK_END)
MS = 1_000_000
DEAD_MS = 2_000


class Matcher:
    """See the module's docstring."""

    def __init__(self, text: str, stops: Sequence[int]) -> None:
        self.state, self.stops, self.terminated = start_of(text), tuple(stops), False

    def accept_token(self, token_id: int) -> bool:
        if self.terminated or not allowed(self.state, self.stops) >> token_id & 1:
            return False
        self.state, self.terminated = fold(self.state, (token_id,)), token_id in self.stops
        return True

    def fill_next_token_bitmask(self, bitmask: Rows, index: int = 0) -> bool:
        bitmask[index] = to_row(allowed(self.state, self.stops))
        return True

    def traverse_draft_tree(self, first: Any, sibling: Any, tokens: Any, bitmask: Any) -> bool:
        raise AssertionError("no drafts are simulated")

    def is_terminated(self) -> bool:
        return self.terminated

    def is_completed(self) -> bool:
        return may_end(self.state)

    def fork(self) -> "Matcher":
        raise AssertionError("no drafts are simulated")


def to_row(bits: int) -> MaskRows:
    return np.frombuffer(bits.to_bytes(4 * WORDS, "little"), "<i4")


def to_bits(row: MaskRows) -> int:
    """Of the vocabulary's ids only."""
    return int.from_bytes(row.tobytes(), "little") & ALL


def _fill(matchers: list[Matcher], rows: Rows, indices: list[int]) -> None:
    for matcher, index in zip(matchers, indices, strict=True):
        matcher.fill_next_token_bitmask(rows, index)


MATCHERS = Matchers(new=Matcher, fill=_fill)


class _Silent:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **labels: self


class Book(MaskBook):
    """The worker's book on virtual time: what is not there when it is asked for is late."""

    def __init__(self) -> None:
        super().__init__(VOCAB, (EOS,), _Silent())  # type: ignore[arg-type]

    def take(self, asks: Sequence[Ask], out: MaskRows, *, wait_s: float, alone: bool) -> list[Answer]:
        return super().take(asks, out, wait_s=0.0, alone=False)


class Attachment:
    """The service's side of one stream."""

    def __init__(self, service: "GrammarService", stream: "MaskStream", slots: int, attach_id: int) -> None:
        self.stream, self.attach_id = stream, attach_id
        self.bounds = service_wire.Bounds(slots, 1, VOCAB)
        self.rows: Rows = np.zeros((2 * slots, WORDS), np.int32)
        self.engine = Engine(
            FACTS, self.rows, slots, 1, get=service.get, want=service.want, matchers=MATCHERS, cpu_s=lambda: 0.0
        )

    def receive(self, data: bytes) -> None:
        message = pb.MaskUp.FromString(data)
        if message.attach_id != self.attach_id:
            return
        frame = message.WhichOneof("frame")
        if frame == "binds":
            service_wire.apply_binds(message.binds, self.bounds, self.engine)
        elif frame == "unbinds":
            service_wire.apply_unbinds(message.unbinds, self.bounds, self.engine)
        else:
            service_wire.apply_tokens(message.tokens, self.bounds, self.engine)
        self.flush()

    def flush(self) -> None:
        if entries := self.engine.take():
            body = service_wire.put_entries(entries, self.rows, inline=not self.stream.ring)
            self.stream.down(pb.MaskDown(attach_id=self.attach_id, entries=body).SerializeToString())


class MaskStream:
    """One stream, from its dial on. `ended` at either end: nothing arrives there any more."""

    def __init__(self, link: "MaskLink") -> None:
        self.link, self.world, self.service = link, link.world, link.world.grammars
        self.ring = link.world.scenario.knobs.mask_ring
        self.attachment: Attachment | None = None
        self.attach_id = 0
        self.ended = [False, False]  # the worker's end, the service's
        self.cut_ns = 1 << 62  # nothing arrives from then on
        self._last_ns = [0, 0]

    def _book(self, side: int, action: Callable[[], None]) -> None:
        """In order, unless the stream is cut by then or the other end has left."""
        world = self.world
        arrival = max(world.now_ns + world.mask_delay_ns(), self._last_ns[side] + 1)
        self._last_ns[side] = arrival

        def arrive() -> None:
            if not self.ended[1 - side] and world.now_ns < self.cut_ns:
                action()

        world.at(arrival, arrive)

    def up(self, data: bytes) -> None:
        attachment = self.attachment
        assert attachment is not None
        self._book(0, lambda: self.service.do(lambda: self.ended[1] or attachment.receive(data)))

    def down(self, data: bytes) -> None:
        self._book(1, lambda: self.link.do(self, lambda: self.link.receive(self, data)))

    def introduce(self) -> None:
        """Hello arrives; its answer comes back."""
        self._book(0, lambda: self.service.do(self._accept))

    def _accept(self) -> None:
        if not self.ended[1]:
            self.attachment = self.service.attach(self, self.link.group, self.link.slots)
            self.attach_id = self.attachment.attach_id
            self._book(1, lambda: self.link.do(self, lambda: self.link.attached(self)))

    def close(self, side: int) -> None:
        """This end leaves; the other learns of it behind what was sent before."""
        if not self.ended[side]:
            self.ended[side] = True
            self._book(side, lambda: self.tell(1 - side))

    def cut(self, notice_ms: tuple[float, float]) -> None:
        """The connection is gone; each end notices in its own time."""
        self.cut_ns = min(self.cut_ns, self.world.now_ns + int(self.world.mask_delay_ns() / 2))
        for side in (0, 1):
            self.world.after(notice_ms[side], lambda side=side: self.tell(side))  # type: ignore[misc]

    def tell(self, side: int) -> None:
        """This end sees that the stream is over."""
        if self.ended[side]:
            return
        if side == 0:
            self.link.do(self, lambda: self.link.lost(self))
        else:
            self.service.do(lambda: self.service.detach(self))


class MaskLink:
    """The worker's side: dials for life, carries what the book has to say. One per process start."""

    def __init__(self, world: "World", process: "Process", slots: int) -> None:
        self.world, self.process, self.epoch, self.slots = world, process, process.epoch, slots
        self.group = process.name
        self.book = Book()
        self.book.wake = self._wake
        self.stream: MaskStream | None = None
        self._due = False
        self._inbox: deque[tuple[MaskStream, Callable[[], None]]] = deque()
        world.after(0.5, self._dial)

    def do(self, stream: MaskStream, action: Callable[[], None]) -> None:
        """At the worker, now, or when it thaws; nothing if it is gone or that stream has ended here."""
        self._inbox.append((stream, action))
        self._run()

    def _run(self) -> None:
        if self.process.epoch != self.epoch or not self._inbox:
            return
        if self.process.frozen:
            self.world.after(3, self._run)
            return
        waiting, self._inbox = self._inbox, deque()
        for stream, action in waiting:
            if not stream.ended[0]:
                action()

    def _dial(self) -> None:
        if self.process.epoch != self.epoch:
            return
        if self.process.frozen:
            self.world.after(5, self._dial)
        elif not self.world.grammars.alive:
            self.world.after(40, self._dial)
        else:
            stream = self.stream = MaskStream(self)
            self.world.grammars.streams.append(stream)
            stream.introduce()
            self.world.after(DEAD_MS, lambda: stream.attach_id or stream.cut((0, 0)))

    def silent(self) -> None:
        """This process has been stopped for so long that the service gave its stream up."""
        if self.stream is not None and not self.stream.ended[0]:
            self.stream.cut((0, 0))

    def died(self) -> None:
        """Kill -9: the service sees a reset within milliseconds."""
        if self.stream is not None and not self.stream.ended[0]:
            self.stream.ended[0] = True
            self.stream.cut((0, self.world.rng_masks.uniform(0, 5)))

    def attached(self, stream: MaskStream) -> None:
        self.book.attached()
        self._wake()

    def lost(self, stream: MaskStream) -> None:
        stream.ended[0] = True
        self.book.detached()
        self.world.after(self.world.rng_masks.uniform(4, 40), self._dial)

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self.world.after(0.02, self._pump)

    def _pump(self) -> None:
        self._due = False
        stream = self.stream
        if self.process.epoch != self.epoch or stream is None or stream.ended[0] or not self.book._attached:
            return
        if self.process.frozen:
            self._due = True
            self.world.after(3, self._pump)
            return
        for message in put_outgoing(self.book.outgoing(), stream.attach_id):
            stream.up(message.SerializeToString())

    def receive(self, stream: MaskStream, data: bytes) -> None:
        message = pb.MaskDown.FromString(data)
        assert stream.attachment is not None and message.attach_id == stream.attach_id
        ring = stream.attachment.rows if stream.ring else None
        self.book.deliver(get_entries(message.entries, Bounds(self.slots, 1, WORDS, ring)))
