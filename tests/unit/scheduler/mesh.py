"""Drives a Scheduler with fake workers and gateways, one event at a time, checking every pool after each."""

import hashlib
import random

import numpy as np

from meshkit import frames as f
from meshkit.core import Called, Close, Closed, Count, Opened, Received, Reply, Send, Tick, WakeAt
from meshkit.types import PROTO_REV, FinishReason, RequestId
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.events import Compile, CompileAnswer, Compiled, Drain, Drained, Flush, GrammarStarted, Outcome
from scheduler_svc.core.scheduler import Scheduler
from tests.unit.scheduler.fake import FakeWorker, Journal, Stream, params, reference

MS = 1_000_000


def id_of(kind, text, rev):
    return hashlib.blake2b(f"{int(kind)} {text} {rev}".encode(), digest_size=16).digest()


class Gate:
    """A gateway: one attachment and the journals of its requests."""

    def __init__(self, name="g0", boot=1):
        self.name, self.boot = name, boot
        self.conn, self.attach_id = -1, 0
        self.status, self.byes, self.frames = None, [], []
        self.rows = {}  # (row, gen) -> (journal, choice) of this attachment
        self.next_row = 0

    def take(self, env):
        fr = env.frame
        if isinstance(fr, f.GatewayHelloAck):
            self.attach_id = env.attach_id
            return
        if isinstance(fr, f.Bye):
            self.byes.append(fr.reason)
            return
        assert env.attach_id == self.attach_id
        if isinstance(fr, f.SchedulerStatus):
            self.status = fr
        elif isinstance(fr, f.MovedRows):
            for row, gen, kills in zip(fr.rows.tolist(), fr.row_gens.tolist(), fr.kills.tolist(), strict=True):
                if (row, gen) in self.rows:
                    journal, c = self.rows[(row, gen)]
                    journal.streams[c].kills = kills
        elif isinstance(fr, f.TokenFrame):
            self.frames.append(fr)
            self.tokens(fr)

    def tokens(self, fr):
        at = 0
        errors = {e.row_index: e.code for e in fr.errors}
        for i, (row, gen, base, count, fin, cached) in enumerate(
            zip(*(c.tolist() for c in (fr.rows, fr.row_gens, fr.bases, fr.counts, fr.finishes, fr.cached)), strict=True)
        ):
            ids = fr.ids[at : at + count].tolist()
            at += count
            if (row, gen) not in self.rows:
                continue  # closed here
            journal, c = self.rows[(row, gen)]
            s = journal.streams[c]
            assert s.reason is FinishReason.NONE, "a row after its end"
            assert base == len(s.ids), "a gap or an overlap"
            s.ids += ids
            if s.cached < 0:
                s.cached = cached
            s.reason = FinishReason(fin)
            s.error = errors.get(i, "")
            assert (s.reason is FinishReason.ERROR) == bool(s.error)
            if s.reason:
                del self.rows[(row, gen)]


class Mesh:
    def __init__(self, seed=0, **limits):
        self.now = 10**9
        self.core = Scheduler(SchedulerLimits(**limits), random.Random(seed), boot=77)
        self.workers, self.gates = {}, {}
        self.conns = {}  # conn -> FakeWorker | Gate
        self.replies, self.effects, self.wake = {}, [], 0
        self.compiles = []  # not answered yet
        self.next_conn, self.next_call, self.next_id = 1, 1, 1
        self.drained = False
        self.beat = 0

    # ---- plumbing ----

    def event(self, event):
        for e in self.core.handle(event, self.now):
            self.effects.append(e)
            match e:
                case Send(conn=conn, envelope=env):
                    peer = self.conns.get(conn)
                    if isinstance(peer, Gate):
                        peer.take(env)
                    elif isinstance(peer, FakeWorker):
                        self._to_worker(peer, env)
                case Close(conn=conn):
                    self.conns.pop(conn, None)
                case Reply(call=call, reply=reply):
                    self.replies[call] = reply
                case WakeAt(at_ns=at):
                    self.wake = at
                case Compile():
                    self.compiles.append(e)
                case Drained():
                    self.drained = True
                case Count():
                    pass
                case _:
                    raise AssertionError(e)
        self.core.check()

    def _to_worker(self, worker, env):
        if isinstance(env.frame, f.WorkerHelloAck):
            worker.attach_id = env.attach_id
        elif isinstance(env.frame, f.StepFrame):
            worker.frames.append(env.frame)
        elif isinstance(env.frame, f.Bye):
            worker.bye = env.frame.reason

    def open(self, peer, kind):
        conn, self.next_conn = self.next_conn, self.next_conn + 1
        self.conns[conn] = peer
        peer.conn = conn
        self.event(Opened(conn, kind))

    def up(self, peer, frame, attach_id=None):
        self.event(Received(peer.conn, f.Envelope(peer.attach_id if attach_id is None else attach_id, frame)))

    def advance(self, ms, beats=True):
        """Pass virtual time in small steps; live peers beat meanwhile."""
        end = self.now + ms * MS
        while self.now < end:
            self.now = min(end, self.now + 250 * MS)
            if beats:
                self.beats()
            self.event(Tick())

    # ---- workers ----

    def worker(self, worker=None, dump=True, **kw):
        worker = worker or FakeWorker(**kw)
        worker.attach_id, worker.bye = 0, ""
        self.workers[worker.hello.group] = worker
        self.open(worker, "worker")
        self.up(worker, worker.say_hello(), 0)
        if dump and worker.attach_id:
            self.up(worker, worker.dump())
        return worker

    def step(self, worker=None):
        """Run one held frame and book it; False if the worker holds none."""
        worker = worker or next(iter(self.workers.values()))
        if not worker.frames or worker.conn not in self.conns:
            return False
        frame = worker.frames.popleft()
        self.now += 5 * MS
        if self.now >= self.beat:
            self.beats()
        self.up(worker, worker.run(frame))
        return True

    def beats(self):
        self.beat = self.now + 500 * MS
        for peer in list(self.conns.values()):
            if peer.conn in self.conns and getattr(peer, "attach_id", 0):
                self.up(peer, f.Heartbeat(getattr(peer, "step", 0), 0))

    def steps(self, n):
        for _ in range(n):
            for w in list(self.workers.values()):
                self.step(w)

    def run(self, limit=5000):
        for _ in range(limit):
            ran = [self.step(w) for w in list(self.workers.values())]
            if not any(ran):
                return
        raise AssertionError("does not come to rest")

    def lose(self, peer):
        """The stream breaks at the scheduler's end."""
        self.conns.pop(peer.conn, None)
        self.event(Closed(peer.conn, "broken"))

    def redial(self, worker, held=True):
        """Same process, new stream: runs what it held, then dumps."""
        if worker.conn in self.conns:
            self.lose(worker)
        while held and worker.frames:
            worker.run(worker.frames.popleft())
        return self.worker(worker)

    # ---- gateways ----

    def gate(self, gate=None, **kw):
        gate = gate or Gate(**kw)
        gate.attach_id, gate.rows, gate.next_row = 0, {}, 0
        self.gates[gate.name] = gate
        self.open(gate, "gateway")
        self.up(gate, f.GatewayHello(gate.name, gate.boot, "b", PROTO_REV), 0)
        return gate

    def call(self, sub):
        call, self.next_call = self.next_call, self.next_call + 1
        self.event(Called(call, sub))
        self.last_call = call
        return self.replies.get(call)

    def journal(self, prompt, n=1, seed=None, priority=0, **kw):
        rid = RequestId(self.next_id.to_bytes(16, "big"))
        self.next_id += 1
        if isinstance(prompt, int):
            prompt = np.random.default_rng(self.next_id).integers(2, 50_000, prompt).tolist()
        journal = Journal(rid, prompt, params(**kw), self.next_id if seed is None else seed, n, priority)
        journal.streams = [Stream() for _ in range(n)]
        return journal

    def request(self, gate, journal, remaining_ms=600_000, attempt=None, kills=0):
        """The next attempt of a journal: a Submit naming its open choices."""
        journal.attempt = attempt or journal.attempt + 1
        journal.rows = {}
        choices = []
        for c, s in enumerate(journal.streams):
            if s.reason:
                continue
            row, gate.next_row = gate.next_row % 7, gate.next_row + 1
            choices.append(f.SubmitChoice(c, row, gate.next_row, tuple(s.ids)))
            journal.rows[(row, gate.next_row)] = c
        return f.Submit(
            attach_id=gate.attach_id, request_id=journal.request_id, attempt=journal.attempt, choices=tuple(choices),
            params=journal.params, seed=journal.seed, remaining_ms=remaining_ms,
            prompt=np.array(journal.prompt, np.int32), priority=journal.priority, kill_count=kills, tenant="t",
            grammar=journal.grammar,
        )  # fmt: skip

    def submit(self, gate, prompt=8, n=1, journal=None, remaining_ms=600_000, kills=0, grammar=None, **kw):
        journal = journal or self.journal(prompt, n, **kw)
        journal.grammar = grammar or journal.grammar
        sub = self.request(gate, journal, remaining_ms, kills=kills)
        for key, c in journal.rows.items():
            gate.rows[key] = (journal, c)
        journal.verdict = self.call(sub)
        journal.call = self.last_call
        journal.sub = sub
        return journal

    def resubmit(self, gate, journals):
        for j in journals:
            if not j.closed and not all(s.reason for s in j.streams):
                self.submit(gate, journal=j)

    def close_choices(self, gate, journal, choices=None, stop=False):
        """Cancel choices, or stop them where their ids are now."""
        mine = [k for k, v in gate.rows.items() if v[0] is journal and (choices is None or v[1] in choices)]
        if choices is None:
            journal.closed = True
        rows, gens = np.array([k[0] for k in mine], np.int32), np.array([k[1] for k in mine], np.int32)
        keeps = np.array([len(journal.streams[gate.rows[k][1]].ids) for k in mine], np.int32)
        for k in mine:
            del gate.rows[k]
        self.up(gate, f.StopRows(rows, gens, keeps) if stop else f.CancelRows(rows, gens))

    # ---- the grammar service ----

    def answer(self, outcome=Outcome.OK, *, compile=None, rev="rev1", **fields):
        """Answer the oldest open compile (or that one); None is no answer. Returns the grammar's id."""
        compile = compile or self.compiles[0]
        self.compiles.remove(compile)
        grammar_id = id_of(compile.kind, compile.text, rev)
        if outcome is Outcome.OK:
            fields = {"grammar_id": grammar_id, "grammar_rev": rev, **fields}
        self.event(Compiled(compile.ticket, None if outcome is None else CompileAnswer(outcome, **fields)))
        return grammar_id

    def grammar_boot(self, boot):
        self.event(GrammarStarted(boot))

    def flush(self):
        self.event(Flush())
        self.run()

    def drain(self):
        self.event(Drain())

    # ---- what must hold ----

    def expect(self, *journals):
        for j in journals:
            for c, s in enumerate(j.streams):
                right = reference(j.prompt, j.params, j.seed, c, j.grammar_id)
                assert (s.ids, s.reason) == right, (j.request_id, c, s)

    def reference(self, journal, choice):
        return reference(journal.prompt, journal.params, journal.seed, choice)

    def idle(self):
        """Nothing is owned, both sides know the same cache, which can go at once, and no fault was counted."""
        self.run()
        load = self.core.load()
        for name in ("pages", "tails", "slots"):
            assert load[f"{name}_owned"] == 0, load
        attached = [w for w in self.workers.values() if w.conn in self.conns]
        assert load["pages_cached"] == sum(len(w.published) for w in attached)
        assert load["tails_cached"] == sum(len(w.pub_tails) for w in attached)
        self.flush()
        load = self.core.load()
        for name in ("pages", "tails", "slots"):
            assert load[f"{name}_owned"] == load[f"{name}_cached"] == 0, load
        assert load["requests"] == load["waiting"] == load["grammar_queue"] == 0
        assert load["grammars"] == len(self.compiles)
        assert not self.core.faults, self.core.faults
        for w in self.workers.values():
            if w.conn in self.conns:
                assert not w.slots and not w.published and not w.pub_tails
