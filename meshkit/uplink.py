"""The dialling side of a long-lived stream to the scheduler: dial, Hello, attachment, heartbeats, back-off.

Shared by the cores of the gateway and of the worker. Pure: time comes in, effects are appended to the caller's list.
Fences by connection and by the attach id that the accepting side minted; what the frames mean is the caller's concern.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from meshkit.core import Close, Count, Dial, Send
from meshkit.frames import Bye, Envelope, Frame, GatewayHelloAck, Heartbeat, WorkerHelloAck

MS = 1_000_000
NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """Nanoseconds of the monotonic clock."""

    heartbeat_ns: int = 500 * MS
    dead_ns: int = 2_000 * MS  # silence after which the peer counts as gone; also the limit of dial and Hello
    backoff_min_ns: int = 100 * MS
    backoff_max_ns: int = 1_000 * MS


class Change(Enum):
    """What an event did to the attachment."""

    NONE = 0
    ATTACHED = 1
    LOST = 2  # there was an attachment and it is over


class Uplink:
    """At most one stream at a time. The caller feeds every stream event and calls `poll` at the end of each turn."""

    def __init__(
        self,
        hello: Callable[[], Frame],
        heartbeat: Callable[[int], Heartbeat],
        rng: Random,
        timing: LinkTiming | None = None,
    ) -> None:
        self._hello = hello
        self._heartbeat = heartbeat
        self._rng = rng
        self._timing = timing or LinkTiming()
        self._dials = 0
        self._failures = 0
        self._conn: int | None = None
        self._open = False
        self._heard_ns = 0
        self._beat_ns = 0
        self._redial_ns = 0
        self.attach_id = 0  # 0: not attached

    @property
    def attached(self) -> bool:
        """True between HelloAck and the end of the stream."""
        return self.attach_id != 0

    def opened(self, conn: int, now_ns: int, out: list[Any]) -> None:
        """Our dial succeeded: introduce ourselves."""
        if conn != self._conn:
            out.append(Count("opened_stale"))
            return
        self._open = True
        self._heard_ns = now_ns
        out.append(Send(conn, Envelope(0, self._hello())))

    def closed(self, conn: int, now_ns: int) -> Change:
        """A stream ended; the one we gave up ourselves is no news."""
        return self._forget(now_ns) if conn == self._conn else Change.NONE

    def received(self, conn: int, envelope: Envelope, now_ns: int, out: list[Any]) -> tuple[Change, Frame | None]:
        """Fence a frame and take the ones that concern the link itself; the rest is returned to the caller."""
        frame = envelope.frame
        if conn != self._conn:
            out.append(Count("stale_conn"))
            return Change.NONE, None
        if isinstance(frame, (GatewayHelloAck, WorkerHelloAck)):
            return self._acked(envelope.attach_id, now_ns, out), None
        if not self.attach_id or envelope.attach_id != self.attach_id:
            out.append(Count("stale_attach"))
            return Change.NONE, None
        self._heard_ns = now_ns
        if isinstance(frame, Heartbeat):
            return Change.NONE, None
        if isinstance(frame, Bye):
            return self.drop(f"peer said bye: {frame.reason}", now_ns, out), None
        return Change.NONE, frame

    def send(self, frame: Frame, out: list[Any]) -> None:
        """Send on the attachment; the caller has checked `attached`."""
        assert self._conn is not None and self.attach_id
        out.append(Send(self._conn, Envelope(self.attach_id, frame)))

    def drop(self, reason: str, now_ns: int, out: list[Any]) -> Change:
        """Give the stream up and dial again after a pause."""
        if self._conn is None:
            return Change.NONE
        out.append(Close(self._conn, reason))
        return self._forget(now_ns)

    def poll(self, now_ns: int, out: list[Any]) -> Change:
        """Do what is due: heartbeat, declare the peer dead, dial again."""
        change = Change.NONE
        if self._conn is not None and now_ns >= self._heard_ns + self._timing.dead_ns:
            out.append(Count("peer_silent" if self.attached else "dial_timeout"))
            change = self.drop("no sign of life", now_ns, out)
        if self._conn is None and now_ns >= self._redial_ns:
            self._dials += 1
            self._conn, self._open = self._dials, False
            self._heard_ns = now_ns
            out.append(Dial(self._conn))
        if self.attached and now_ns >= self._beat_ns:
            self._beat_ns = now_ns + self._timing.heartbeat_ns
            self.send(self._heartbeat(now_ns), out)
        return change

    def next_wake_ns(self) -> int:
        """When `poll` has something to do next."""
        if self._conn is None:
            return self._redial_ns
        dead_ns = self._heard_ns + self._timing.dead_ns
        return min(dead_ns, self._beat_ns) if self.attached else dead_ns

    def _acked(self, attach_id: int, now_ns: int, out: list[Any]) -> Change:
        if self.attach_id or not self._open or not attach_id:
            out.append(Count("bad_hello_ack", fault=True))
            return self.drop("unexpected HelloAck", now_ns, out)
        self.attach_id = attach_id
        self._failures = 0
        self._heard_ns = now_ns
        self._beat_ns = now_ns
        return Change.ATTACHED

    def _forget(self, now_ns: int) -> Change:
        was_attached = self.attached
        self._conn, self._open, self.attach_id = None, False, 0
        ceiling = min(self._timing.backoff_max_ns, self._timing.backoff_min_ns << min(self._failures, 8))
        self._failures += 1
        self._redial_ns = now_ns + int(ceiling * self._rng.uniform(0.5, 1.0))
        return Change.LOST if was_attached else Change.NONE
