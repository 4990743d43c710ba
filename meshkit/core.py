"""The vocabulary of the pure cores: `handle(event, now_ns) -> effects`.

A core has no clock, socket, thread, task, global random state, id() order or set iteration. Its shell turns I/O into
events and carries out effects in order; the simulator does the same on virtual time. `conn` and `call` are small
integers the shell mints: a conn is one open stream, a call is one unary request waiting for its reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from meshkit.frames import Envelope, Submit, SubmitReply

# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream is open: a peer dialled us (`peer` says which RPC), or our own Dial succeeded."""

    conn: int
    peer: Literal["gateway", "worker", "scheduler"]


@dataclass(frozen=True, slots=True)
class Received:
    conn: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream is gone, whoever ended it. Comes once per conn, also after our own Close, also for a failed Dial."""

    conn: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    """A unary Submit reached us; answer with Reply(call)."""

    call: int
    request: Submit


@dataclass(frozen=True, slots=True)
class Replied:
    """Our own Call ended: with a reply, or with None (outcome unknown: zero or one times, or more if retried)."""

    call: int
    reply: SubmitReply | None


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer that a core asked for with WakeAt is due. Spurious ticks are allowed."""


# ---- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    conn: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Close:
    conn: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a stream to the scheduler. The shell answers Opened(conn) or Closed(conn), with the conn given here."""

    conn: int


@dataclass(frozen=True, slots=True)
class Call:
    """Submit to the scheduler with this deadline; ends in Replied(call)."""

    call: int
    request: Submit
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Reply:
    call: int
    reply: SubmitReply


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Deliver a Tick at this time, replacing any earlier wish."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a named counter. `fault=True` marks one of the "cannot happen" counters."""

    name: str
    amount: int = 1
    fault: bool = False


class Core(Protocol):
    """A pure state machine. Effects are carried out in order; extra event and effect types are each core's own.

    `cannot_happen` names every counter that it marks as a fault, so that /metrics shows them at zero.
    """

    @property
    def cannot_happen(self) -> Sequence[str]: ...

    def handle(self, event: Any, now_ns: int) -> Sequence[Any]: ...
