"""The scheduler's state machine: `Scheduler.handle(event, now_ns) -> effects`. Pure; see `meshkit.core`.

Dispatches streams and calls to the functions of this package, keeps the timers, and after every event fills the
workers' hands and sends what was collected for gateways. Not here: sockets, clocks, protobuf (the shell's), text and
sampling (the gateway's and the worker's).
"""

import heapq
import logging
import random
from collections.abc import Sequence
from typing import Any

from meshkit.core import Called, Closed, Opened, Received, Reply, Tick, WakeAt
from meshkit.frames import (
    Bye,
    CancelRows,
    Dump,
    Envelope,
    GatewayHello,
    Heartbeat,
    ResultFrame,
    SchedulerStatus,
    StopRows,
    WorkerHello,
)
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core import admit, adopt, attach, audit, compiled, door, finish, plan, room
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.events import Compiled, Drain, Drained, Flush, GrammarStarted
from scheduler_svc.core.explain import Explanation, explain
from scheduler_svc.core.keymap import key_columns
from scheduler_svc.core.reuse import Decision, decide
from scheduler_svc.core.state import CANNOT_HAPPEN, MS, Conn, Gateway, State, Worker
from scheduler_svc.core.submit import release_held, submit

log = logging.getLogger(__name__)


class Scheduler:
    """One model instance's scheduler. `rng` mints attachment ids; `boot` names this process start."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random, boot: int) -> None:
        self._st = State(limits, rng, boot)
        self._tick_ns = 0
        self._wake_ns = 0
        self._audited = 0
        self._checked = 0

    # ---- what others may read ----

    @property
    def state(self) -> State:
        """The tables, for tests and the simulator's invariants; not to be changed."""
        return self._st

    @property
    def counters(self) -> dict[str, int]:
        """Running totals, faults included."""
        return self._st.counters

    @property
    def faults(self) -> dict[str, int]:
        """Counters of what cannot happen; empty in a healthy process."""
        return self._st.faults

    @property
    def cannot_happen(self) -> Sequence[str]:
        return CANNOT_HAPPEN

    def status(self) -> SchedulerStatus:
        return self._st.status()

    def load(self) -> dict[str, int]:
        """Totals and gauges as GetLoad reports them."""
        return {**self._st.counters, **audit.gauges(self._st)}

    def explain(self, keys: Sequence[bytes], tokens: int) -> list[tuple[Explanation, Decision]]:
        """Why a prompt would be served from the prefix cache as far as it would, on each rank that serves."""
        st = self._st
        columns, limit = key_columns(keys), max(0, (tokens - 1) // PAGE_TOKENS)
        out = []
        for worker in st.workers.values():
            for rank in worker.ranks if worker.serving else ():
                told = explain(st.index, rank.pool, columns, limit)
                decision = decide(st.index.match(rank.pool, columns, limit), tokens, admit.prices(st, worker))
                out.append((told, decision))
        return out

    def check(self) -> None:
        """Recount every pool and table; AssertionError names the first difference."""
        audit.check(self._st)

    # ---- the machine ----

    def handle(self, event: Any, now_ns: int) -> Sequence[Any]:
        """Take one event at a monotonic time; the effects are to be carried out in order."""
        st = self._st
        st.effects = []
        st.now = max(st.now, now_ns)
        if st.started_ns < 0:
            st.started_ns = st.now
        self._forgive()
        match event:
            case Received(conn=conn, envelope=envelope):
                self._received(conn, envelope)
            case Called(call=call, request=request):
                if (reply := submit(st, request, call)) is not None:
                    st.effects.append(Reply(call, reply))
            case Compiled(ticket=ticket, answer=answer):
                compiled.compiled(st, ticket, answer)
            case GrammarStarted(boot=boot):
                compiled.service_started(st, boot)
            case Opened(conn=conn, peer=peer):
                st.conns[conn] = Conn(conn, peer, st.now, st.now)
            case Closed(conn=conn):
                if conn in st.conns:
                    attach.gone(st, st.conns[conn])
            case Tick():
                pass
            case Drain():
                st.draining = True
            case Flush():
                st.count("flushes")
                st.total("pages_flushed", room.flush(st))
            case _:
                raise TypeError(f"the scheduler core knows no event {type(event).__name__}")
        self._timers()
        plan.pump(st)
        self._audit()
        st.flush()
        self._say_status()
        self._wake(again=isinstance(event, Tick))
        return st.effects

    def _received(self, number: int, envelope: Envelope) -> None:
        st = self._st
        conn = st.conns.get(number)
        frame = envelope.frame
        if conn is None:
            st.total("frames_after_close")
            return
        if conn.owner is None:
            conn.heard_ns = st.now
            if isinstance(frame, GatewayHello) and conn.peer == "gateway":
                attach.gateway_hello(st, conn, frame)
            elif isinstance(frame, WorkerHello) and conn.peer == "worker":
                attach.worker_hello(st, conn, frame)
            else:
                attach.refuse(st, conn, "the first frame must be Hello")
            return
        if envelope.attach_id != conn.attach_id:
            st.count("frames_stale")
            return
        conn.heard_ns = st.now
        match conn.owner, frame:
            case _, Bye(reason=reason):
                attach.hang_up(st, conn, f"bye: {reason}", planned=True)
            case Worker() as worker, ResultFrame():
                attach.worker_result(st, conn, worker, frame)
            case Worker() as worker, Dump():
                attach.worker_dump(st, conn, worker, frame)
            case Worker() as worker, Heartbeat():
                attach.worker_beat(st, conn, worker, frame)
            case Gateway(), Heartbeat():
                pass
            case Gateway(), CancelRows() | StopRows():
                attach.close_rows(st, conn.attach_id, frame.rows.tolist(), frame.row_gens.tolist())
            case _:
                st.fault("unexpected_frame")
                attach.refuse(st, conn, f"{type(frame).__name__} is not expected here")

    # ---- timers ----

    def _timers(self) -> None:
        st = self._st
        while st.deadlines and st.deadlines[0][0] <= st.now:
            due, arrival, request_id = heapq.heappop(st.deadlines)
            req = st.requests.get(request_id)
            if req is not None and req.arrival == arrival and req.deadline_ns == due:
                st.count("deadlines_missed")
                finish.end_request(st, req, "deadline", "the request's deadline has passed")
        if st.now - self._tick_ns < st.limits.tick_ms * MS and self._tick_ns:
            return
        self._tick_ns = st.now
        self._streams()
        door.learn(st)
        attach.suspects_due(st)
        compiled.due(st)
        release_held(st)
        for req in list(st.requests.values()):
            if req.expire_ns and st.now >= req.expire_ns:
                st.count("requests_abandoned")
                for seq in list(req.choices):
                    finish.close(st, seq)
        for worker in st.workers.values():
            for key, orphan in list(worker.orphans.items()):
                if st.now - orphan.since_ns >= st.limits.orphan_ms * MS:
                    adopt.drop_orphan(st, worker, key)
        while st.tombstones and next(iter(st.tombstones.values())) <= st.now:
            st.tombstones.popitem(last=False)
        while st.known and next(iter(st.known.values())).expires_ns <= st.now:
            st.known.popitem(last=False)

    def _forgive(self) -> None:
        """Our own stall is not our peers' silence: what they said meanwhile still waits to be handled."""
        st = self._st
        tick_ns = st.limits.tick_ms * MS
        gap_ns = st.now - self._tick_ns
        if gap_ns <= 2 * tick_ns:
            return
        for conn in st.conns.values():
            conn.heard_ns = min(st.now, conn.heard_ns + gap_ns - tick_ns)
        for worker in st.workers.values():
            for record in worker.inflight:
                record.sent_ns = min(st.now, record.sent_ns + gap_ns - tick_ns)

    def _streams(self) -> None:
        """Heartbeats out, silence in."""
        st = self._st
        for conn in list(st.conns.values()):
            if st.now - conn.heard_ns > st.limits.dead_ms * MS:
                st.count("peers_silent")
                attach.hang_up(st, conn, f"silent for more than {st.limits.dead_ms} ms")
            elif conn.owner is not None and st.now - conn.beat_ns >= st.limits.heartbeat_ms * MS:
                conn.beat_ns = st.now
                step = conn.owner.step if isinstance(conn.owner, Worker) else 0
                st.send(conn.conn, conn.attach_id, Heartbeat(step, 0))

    def _say_status(self) -> None:
        st = self._st
        changed = st.ready != st.ready_told
        st.ready_told = st.ready
        for gateway in st.gateways.values():
            if changed or st.now - gateway.status_ns >= st.limits.status_ms * MS:
                attach.send_status(st, gateway)
        if st.draining and not st.drained and not st.requests:
            st.drained = True
            st.effects.append(Drained())

    def _wake(self, *, again: bool) -> None:
        """Ask for the next tick: the earliest deadline, or the grain of the other checks while anything is alive."""
        st = self._st
        at = st.deadlines[0][0] if st.deadlines else 0
        if st.conns or st.requests:
            tick = self._tick_ns + st.limits.tick_ms * MS
            at = min(at, tick) if at else tick
        if at and (again or at != self._wake_ns):
            self._wake_ns = at
            st.effects.append(WakeAt(at))

    def _audit(self) -> None:
        """Counters at every step; a full recount once in so many steps, and once when the last request has gone."""
        st = self._st
        steps = st.counters.get("steps", 0)
        if steps == self._checked:
            return
        self._checked = steps
        good = audit.adds_up(st)
        if good and (steps - self._audited >= st.limits.recount_steps or not st.requests):
            self._audited = steps
            try:
                audit.recount(st)
            except AssertionError as error:
                good = False
                log.error("recount: %s", error)
        if not good:
            st.fault("conservation")
