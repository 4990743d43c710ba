"""Streams: Hello, fences, silence and loss, for gateways and workers.

The accepting side mints the attachment; a newer one of the same name replaces the older, whose frames are dropped from
then on. A lost worker's choices wait with what was booked; whether the loss was a crash is known when the group comes
back under another boot, or has not come back in time.
"""

import numpy as np

from meshkit.core import Close
from meshkit.frames import (
    Bye,
    Dump,
    GatewayHello,
    GatewayHelloAck,
    Heartbeat,
    MovedRows,
    ResultFrame,
    WorkerHello,
    WorkerHelloAck,
)
from meshkit.types import PROTO_REV, FinishReason
from scheduler_svc.core import adopt, book, finish
from scheduler_svc.core.ledger import Pool
from scheduler_svc.core.request import Phase, Request, Seq
from scheduler_svc.core.state import MS, Conn, Gateway, Lost, Rank, State, Worker
from scheduler_svc.core.submit import never_fits, release_held


def refuse(st: State, conn: Conn, reason: str) -> None:
    """Close a stream and say why."""
    st.count("streams_refused")
    st.send(conn.conn, conn.attach_id, Bye(reason))
    hang_up(st, conn, reason)


def hang_up(st: State, conn: Conn, reason: str, *, planned: bool = False) -> None:
    """Close our side; what was attached there is gone at once, not when the other end notices."""
    st.effects.append(Close(conn.conn, reason))
    gone(st, conn, planned=planned)


def gone(st: State, conn: Conn, *, planned: bool = False) -> None:
    """This stream carries nothing any more."""
    st.conns.pop(conn.conn, None)
    owner, conn.owner = conn.owner, None
    if isinstance(owner, Gateway):
        _gateway_lost(st, owner, planned=planned)
    elif isinstance(owner, Worker):
        _worker_lost(st, owner, planned=planned)


# ---- gateways -------------------------------------------------------------------------------------------------------


def gateway_hello(st: State, conn: Conn, hello: GatewayHello) -> None:
    if hello.proto_rev != PROTO_REV:
        refuse(st, conn, f"proto_rev: this scheduler speaks {PROTO_REV}, not {hello.proto_rev}; use one build")
        return
    old = st.gateways.get(hello.name)
    if old is not None:
        st.count("attachments_superseded")
        hang_up(st, st.conns[old.conn], "superseded")
    st.attached += 1
    gateway = Gateway(hello.name, hello.boot, conn.conn, st.mint())
    conn.attach_id, conn.owner = gateway.attach_id, gateway
    st.gateways[hello.name] = gateway
    st.listeners[gateway.attach_id] = gateway
    st.send(conn.conn, gateway.attach_id, GatewayHelloAck(st.boot, st.limits.build))
    send_status(st, gateway)
    for req in list(st.requests.values()):
        if req.gateway != hello.name:
            continue
        if req.gateway_boot != hello.boot:
            _cancel(st, req)  # that process and its clients are gone
        else:
            req.expire_ns = min(req.expire_ns, st.now + st.limits.rebind_grace_ms * MS)


def _gateway_lost(st: State, gateway: Gateway, *, planned: bool) -> None:
    st.count("gateways_lost")
    del st.gateways[gateway.name]
    del st.listeners[gateway.attach_id]
    for req in list(st.requests.values()):
        if req.attach_id != gateway.attach_id:
            continue
        if planned:
            _cancel(st, req)
        else:
            req.expire_ns = st.now + st.limits.gateway_grace_ms * MS


def _cancel(st: State, req: Request) -> None:
    st.count("requests_abandoned")
    for seq in list(req.choices):
        finish.close(st, seq)


def send_status(st: State, gateway: Gateway) -> None:
    gateway.status_ns = st.now
    st.send(gateway.conn, gateway.attach_id, st.status())


def close_rows(st: State, attach_id: int, rows: list[int], row_gens: list[int]) -> None:
    """The gateway closed these choices (cancel, or a stop string): free them, whatever they are doing."""
    for row, row_gen in zip(rows, row_gens, strict=True):
        seq = st.rows.get((attach_id, row, row_gen))
        if seq is None:
            st.total("closes_unknown")
            st.tombstones[(attach_id, row, row_gen)] = st.now + st.limits.tombstone_ms * MS
            if len(st.tombstones) > st.limits.tombstones:
                st.tombstones.popitem(last=False)
        else:
            st.total("closes")
            finish.close(st, seq)


# ---- workers --------------------------------------------------------------------------------------------------------


def _hello_error(st: State, hello: WorkerHello) -> str:
    if hello.proto_rev != PROTO_REV:
        return f"proto_rev: this scheduler speaks {PROTO_REV}, not {hello.proto_rev}; use one build"
    for name in ("ranks", "slots", "pages", "max_step_tokens", "max_verify"):
        if getattr(hello, name) < 1:
            return f"{name}: {getattr(hello, name)} is not positive"
    others = [w for w in st.workers.values() if w.name != hello.group]
    replaced = not others and hello.group in st.dumped  # an upgrade of the only group
    if st.model is not None and hello.model != st.model and (others or (st.requests and not replaced)):
        for name in ("kv_layout_id", "revision", "name"):
            theirs, ours = getattr(hello.model, name), getattr(st.model, name)
            if theirs != ours:
                return f"{name}: this instance serves {ours!r}, the worker brings {theirs!r}"
        return "model: sizes or eos_ids differ from those this instance serves"
    return ""


def worker_hello(st: State, conn: Conn, hello: WorkerHello) -> None:
    wrong = _hello_error(st, hello)
    if wrong:
        refuse(st, conn, wrong)
        return
    old = st.workers.get(hello.group)
    if old is not None:
        st.count("attachments_superseded")
        hang_up(st, st.conns[old.conn], "superseded")
    ranks = [
        Rank(
            r,
            (hello.group, r),
            Pool(r * hello.pages, hello.pages),
            Pool(r * hello.tails, hello.tails),
            Pool(r * hello.slots, hello.slots),
        )
        for r in range(hello.ranks)
    ]
    worker = Worker(hello.group, hello, conn.conn, st.mint(), ranks, hello.max_gen)
    conn.attach_id, conn.owner = worker.attach_id, worker
    if st.model is not None and hello.model != st.model:
        for req in list(st.requests.values()):
            finish.end_request(st, req, "model_changed", "the model was replaced; send the request again")
    st.model = hello.model
    st.workers[hello.group] = worker
    st.send(conn.conn, worker.attach_id, WorkerHelloAck(st.boot))
    lost = st.lost.pop(hello.group, None)
    if lost is not None:
        _resolve(st, hello.group, lost.boot, crashed=lost.boot != hello.boot)
    for req in list(st.requests.values()):
        too_big = never_fits(st, len(req.prompt), req.params.max_tokens)
        if too_big:
            finish.end_request(st, req, "never_fits", too_big)


def worker_dump(st: State, conn: Conn, worker: Worker, dump: Dump) -> None:
    if worker.serving:
        st.fault("dump_after_dump")
        refuse(st, conn, "dump: this attachment has dumped already")
        return
    worker.dumps.append(dump)
    if not dump.last:
        return
    wrong = adopt.dump_error(worker)
    if wrong:
        st.fault("bad_dump")
        refuse(st, conn, f"dump: {wrong}")
        return
    adopt.finish_dump(st, worker)
    release_held(st)


def worker_result(st: State, conn: Conn, worker: Worker, result: ResultFrame) -> None:
    if not worker.inflight:
        st.fault("result_without_frame")
        refuse(st, conn, f"result of step {result.step} without a frame in flight")
        return
    record = worker.inflight[0]
    if result.error:
        st.count("step_errors")
        blamed: dict[bytes, Request] = {s.req.request_id: s.req for s in book.rows_of_error(record)}
        for req in blamed.values():
            req.kills += 1
        hang_up(st, conn, f"step {result.step} failed")
        for req in blamed.values():
            req.suspects = [s for s in req.suspects if s[0] != worker.name]
            _killed(st, req)
        return
    wrong = book.check_result(record, result)
    if wrong:
        st.fault("bad_result")
        refuse(st, conn, wrong)
        return
    worker.inflight.popleft()
    book.book(st, worker, record, result)


def worker_beat(st: State, conn: Conn, worker: Worker, beat: Heartbeat) -> None:
    """A live process may still be stuck in a step, or have lost a frame."""
    if not worker.inflight:
        return
    oldest = worker.inflight[0]
    if beat.step_age_ms:
        running = next((r for r in worker.inflight if r.step == beat.step), oldest)
        limit = book.deadline_ns(st, worker, running)
        if beat.step_age_ms * MS > limit:
            st.count("steps_overdue")
            hang_up(st, conn, f"step {beat.step} runs for {beat.step_age_ms} ms, its deadline was {limit // MS} ms")
    elif st.now - oldest.sent_ns > st.limits.lost_frame_ms * MS and beat.step <= oldest.step:
        st.fault("frame_lost")
        hang_up(st, conn, f"step {oldest.step} was never answered")


def _worker_lost(st: State, worker: Worker, *, planned: bool) -> None:
    """Void its pools; its choices wait with prompt and booked ids."""
    st.count("workers_lost")
    del st.workers[worker.name]
    if not planned:
        st.lost[worker.name] = Lost(worker.hello.boot, st.now)
    for rank in worker.ranks:
        st.index.drop_pool(rank.pool)
    placed: list[Seq] = [*worker.running, *worker.preempting]
    touched: dict[bytes, Request] = {}
    for seq in placed:
        if seq.phase is not Phase.FORKING:
            touched[seq.req.request_id] = seq.req
        seq.leader, seq.followers = None, []
        finish.clear_placement(seq)
        st.queue.add(seq)
    if not planned:
        for req in touched.values():
            req.suspects.append((worker.name, worker.hello.boot))
    for req in touched.values():
        send_moved(st, req)


def _resolve(st: State, group: str, boot: int, *, crashed: bool) -> None:
    """It is known now whether that loss was a crash."""
    for req in list(st.requests.values()):
        if (group, boot) not in req.suspects:
            continue
        req.suspects.remove((group, boot))
        if crashed:
            req.kills += 1
            _killed(st, req)
        else:
            send_moved(st, req)


def _killed(st: State, req: Request) -> None:
    presumed = [group for group, _ in req.suspects if st.lost[group].presumed]
    kills = req.kills + len(presumed)
    if kills >= st.limits.poison_kills:
        st.count("requests_poisoned")
        finish.end_request(st, req, "request_poisoned", f"it was running at {kills} worker crashes")
    else:
        send_moved(st, req)


def send_moved(st: State, req: Request) -> None:
    gateway = st.listeners.get(req.attach_id)
    open_choices = [s for s in req.choices if s.finish is FinishReason.NONE]
    if gateway is None or not open_choices:
        return
    most = st.limits.poison_kills - 1  # a journal must not poison a request for losses that were no crashes
    kills = max(req.kills, min(req.all_kills, most))
    frame = MovedRows(
        np.array([s.row for s in open_choices], np.int32),
        np.array([s.row_gen for s in open_choices], np.int32),
        np.full(len(open_choices), kills, np.int32),
    )
    st.send(gateway.conn, gateway.attach_id, frame)


def suspects_due(st: State) -> None:
    """Groups that did not come back in time have crashed, until they show otherwise."""
    for lost in st.lost.values():
        if lost.presumed or st.now - lost.since_ns < st.limits.suspect_ms * MS:
            continue
        lost.presumed = True
        for req in list(st.requests.values()):
            if req.suspects and req.all_kills >= st.limits.poison_kills:
                _killed(st, req)
