"""Everything the scheduler core knows, in one place: tables, attachments, pools, counters and the effects to return.

No decisions live here beyond bookkeeping that must never be done by halves (counting, collecting token rows, minting
ids). submit, attach, adopt, plan, book and finish are functions over this state; `scheduler.Scheduler` dispatches.
"""

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshkit.core import Count, Send
from meshkit.frames import Dump, Envelope, Frame, PublishedPage, SchedulerStatus, SubmitReply, WorkerHello
from meshkit.types import FinishReason, ModelInfo, RequestId
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.cost import CostModel, Shape
from scheduler_svc.core.forecast import Outputs
from scheduler_svc.core.grammar import Grammars
from scheduler_svc.core.lanes import I64, Lanes
from scheduler_svc.core.ledger import Pool
from scheduler_svc.core.outbox import Entry, Outbox
from scheduler_svc.core.policy import Turns
from scheduler_svc.core.prefix import Hold, PoolId, PrefixIndex
from scheduler_svc.core.queue import WaitQueue
from scheduler_svc.core.request import Request, Seq

MS = 1_000_000
CANNOT_HAPPEN: Final = (
    "bad_dump",
    "bad_result",
    "choice_dumped_twice",
    "compiled_unasked",
    "conservation",
    "dump_after_dump",
    "failure_without_reason",
    "finish_unseen",
    "finish_without_reason",
    "frame_lost",
    "ids_diverged",
    "ids_without_sample",
    "jit_compiles",
    "result_without_frame",
    "spare_beyond_length",
    "unexpected_frame",
    "unexpected_row_state",
    "unexpected_sample",
)
"""Counters of what only a bug of ours explains: `State.fault`."""
RowKey = tuple[int, int, int]
"""(attach_id of the gateway, row, row_gen)."""


@dataclass(slots=True, eq=False)
class Conn:
    """An open stream. `owner` is the attached gateway or worker, None before Hello."""

    conn: int
    peer: str
    opened_ns: int
    heard_ns: int
    attach_id: int = 0
    beat_ns: int = 0
    owner: "Gateway | Worker | None" = None


@dataclass(slots=True, eq=False)
class Gateway:
    name: str
    boot: int
    conn: int
    attach_id: int
    out: Outbox | None = None
    status_ns: int = 0


@dataclass(slots=True, eq=False)
class Rank:
    """Pools of one attention-DP rank; ids are global (rank * size + local)."""

    index: int
    pool: PoolId  # its name in the prefix index
    pages: Pool
    tails: Pool
    slots: Pool
    held_back: int = 0  # pages that what runs here will want, by the last admission


@dataclass(slots=True, eq=False)
class Closing:
    """A slot that ended for its choice: freed at the worker by the next frame, its places with it."""

    rank: Rank
    slot: int
    gen: int
    pages: list[int]
    tails: list[int]
    hold: Hold


@dataclass(slots=True, eq=False)
class Row:
    """A row of a frame in flight. Stale once the choice has another generation or worker."""

    seq: Seq
    gen: int
    chunk: bool
    start: int
    n: int
    sample: bool


@dataclass(slots=True, eq=False)
class Record:
    """A frame in flight: rows one by one, and decode rows as arrays, with the places of both in the frame."""

    step: int
    rows: list[Row]
    rows_at: I64
    slots: I64  # of the decode rows of lanes
    slots_at: I64
    gens: I64
    seqs: npt.NDArray[Any]
    shape: Shape
    sent_ns: int

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.slots)

    def named(self) -> list[tuple[Seq, int]]:
        """Choices and the generations they were sent with, in no order."""
        return [(row.seq, row.gen) for row in self.rows] + list(zip(self.seqs, self.gens.tolist(), strict=True))

    def at(self, index: int) -> tuple[Seq, int]:
        """What stands in this row of the frame."""
        found = np.flatnonzero(self.slots_at == index)
        if len(found):
            return self.seqs[found[0]], int(self.gens[found[0]])
        row = self.rows[int(np.flatnonzero(self.rows_at == index)[0])]
        return row.seq, row.gen


@dataclass(slots=True, eq=False)
class Orphan:
    """A dumped slot whose request has not (yet) come."""

    rank: Rank
    slot: int
    gen: int
    attempt: int
    length: int
    n_emitted: int
    finished: bool
    last_ids: tuple[int, ...]
    pages: list[int]
    spare: int
    spare_pos: int
    since_ns: int
    hold: Hold
    grammar_id: bytes


@dataclass(slots=True, eq=False)
class Worker:
    """An attached worker group. It serves once its dump is complete."""

    name: str
    hello: WorkerHello
    conn: int
    attach_id: int
    ranks: list[Rank]
    gen: int
    serving: bool = False
    dumps: list[Dump] = field(default_factory=list)
    step: int = 0
    inflight: deque[Record] = field(default_factory=deque)
    running: list[Seq] = field(default_factory=list)  # placed choices by key
    preempting: list[Seq] = field(default_factory=list)
    closing: list[Closing] = field(default_factory=list)
    sealing: list[Seq] = field(default_factory=list)
    orphans: dict[tuple[RequestId, int], Orphan] = field(default_factory=dict)
    publishes: dict[int, PublishedPage] = field(default_factory=dict)  # told with the next frame, parents first
    publish_tails: dict[int, int] = field(default_factory=dict)  # tail -> page, told with the next frame
    retire_pages: list[int] = field(default_factory=list)
    retire_tails: list[int] = field(default_factory=list)
    cost: CostModel = field(default_factory=CostModel)
    lanes: Lanes = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = Lanes(self.hello.slots * self.hello.ranks)


@dataclass(slots=True, eq=False)
class Lost:
    """A worker group that vanished: crashed, or only its stream broke."""

    boot: int
    since_ns: int
    presumed: bool = False  # it did not come back in time: counts as a crash until it comes back after all


@dataclass(slots=True, eq=False)
class Known:
    """What is remembered of a request id: its highest attempt and the answers given."""

    attempt: int
    answers: dict[int, SubmitReply]
    expires_ns: int


class State:
    """See the module's docstring."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random, boot: int) -> None:
        self.limits = limits
        self.rng = rng
        self.boot = boot
        self.now = 0
        self.started_ns = -1
        self.draining = False
        self.drained = False
        self.model: ModelInfo | None = None
        self.requests: dict[RequestId, Request] = {}
        self.rows: dict[RowKey, Seq] = {}
        self.queue = WaitQueue()
        self.grammars = Grammars()
        self.turns = Turns(limits.policy, limits.quantum)
        self.outputs = Outputs()
        self.wait_ns = 0.0  # forecast of a short newcomer's wait; 0 = nobody waits, or unknown
        self.workers: dict[str, Worker] = {}
        self.index = PrefixIndex()
        self.lost: dict[str, Lost] = {}
        self.dumped: dict[str, bool] = {}  # groups that have ever served
        self.gateways: dict[str, Gateway] = {}
        self.listeners: dict[int, Gateway] = {}
        self.conns: dict[int, Conn] = {}
        self.known: OrderedDict[RequestId, Known] = OrderedDict()
        self.tombstones: OrderedDict[RowKey, int] = OrderedDict()
        self.deadlines: list[tuple[int, int, RequestId]] = []  # heap of (deadline, arrival, id)
        self.arrivals = 0
        self.attached = 0
        self.step = 0  # of the result being booked: labels token frames
        self.finish_gap_ns = 100.0 * MS  # moving average between ends of choices
        self.finished_ns = 0
        self.ready_told: bool | None = None
        self.counters: dict[str, int] = {}
        self.faults: dict[str, int] = {}
        self.effects: list[Any] = []

    # ---- small tools ----

    def total(self, name: str, amount: int = 1) -> None:
        """Add to a running total that is read, not reported."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def count(self, name: str, amount: int = 1) -> None:
        """A rare event: add to its total and tell the shell."""
        self.total(name, amount)
        self.effects.append(Count(name, amount))

    def fault(self, name: str) -> None:
        """One of the things that cannot happen did."""
        assert name in CANNOT_HAPPEN, name
        self.total(name)
        self.faults[name] = self.faults.get(name, 0) + 1
        self.effects.append(Count(name, fault=True))

    def mint(self) -> int:
        """A fresh non-zero 64-bit name."""
        return self.rng.getrandbits(64) | 1

    def send(self, conn: int, attach_id: int, frame: Frame) -> None:
        self.effects.append(Send(conn, Envelope(attach_id, frame)))

    def outbox(self, attach_id: int) -> Outbox | None:
        """Where rows of this attachment are collected; None when nobody listens there."""
        gateway = self.listeners.get(attach_id)
        if gateway is None:
            return None
        if gateway.out is None:
            gateway.out = Outbox()
        return gateway.out

    def flush(self) -> None:
        """Send what the event's bookings collected, one frame per gateway."""
        for gateway in self.gateways.values():
            if gateway.out is not None:
                self.send(gateway.conn, gateway.attach_id, gateway.out.frame(self.step))
                gateway.out = None

    # ---- snapshots ----

    @property
    def ready(self) -> bool:
        return not self.draining and any(w.serving for w in self.workers.values())

    def retry_after_ms(self) -> int:
        """How long the queue will take: by the forecast, or at the recent pace of ends while there is none."""
        if self.wait_ns:
            return int(min(30_000, max(250, self.wait_ns / MS)))
        return int(min(30_000, max(250, self.finish_gap_ns / MS * (len(self.queue) + 1))))

    def status(self) -> SchedulerStatus:
        ranks = [r for w in self.workers.values() if w.serving for r in w.ranks]
        return SchedulerStatus(
            ready=self.ready,
            draining=self.draining,
            model=self.model,
            running=sum(len(w.running) for w in self.workers.values()),
            waiting=len(self.queue) + self.queue.held + sum(len(w.preempting) for w in self.workers.values()),
            pages_total=sum(r.pages.size for r in ranks),
            pages_free=sum(len(r.pages.free) + r.pages.cached for r in ranks),
            slots_total=sum(r.slots.size for r in ranks),
            slots_free=sum(len(r.slots.free) for r in ranks),
            workers=len(self.workers),
            preemptions=self.counters.get("preemptions", 0),
            retry_after_ms=self.retry_after_ms() if len(self.queue) else 0,
            grammar_queue=self.grammars.pending,
        )


def emit(
    st: State,
    seq: Seq,
    base: int,
    ids: list[int],
    finish: FinishReason = FinishReason.NONE,
    error: tuple[str, str] = ("", ""),
    logprobs: list[Entry] | None = None,
) -> bool:
    """Put one row into its gateway's next frame; False when nobody listens."""
    out = st.outbox(seq.req.attach_id)
    if out is None:
        return False
    out.add(seq.row, seq.row_gen, base, ids, seq.cached, finish, error, logprobs, seq.waited_ms if not base else -1)
    return True
