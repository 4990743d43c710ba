"""The invariants, and what each client has seen. Numbers are those of the mesh's reliability rules.

I1 right ids, gapless, once; I2 one terminal; I3 pools add up; I4 and I5 pages (in `device`); I6 references recounted;
I7 slot generations grow; I8 frames of a superseded attachment change nothing; I11 bounded journal; I12 no request
outlives its deadline or hangs; I13 everything back at the baseline; I14 bounded resubmission; I15 counters are a
recount of what was sent and booked. I9 waits for stores that can be torn. R10: no fault counter.
G1 a constrained choice gets a slot once its grammar is there, with all its ids; G2 the same Submit has one verdict.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gateway.journal.events import ClientGone, Emit, Ended, Refused, Start, StopChoice
from meshkit.core import Count, Received, Tick
from meshkit.frames import (
    Frame,
    GatewayHelloAck,
    ResultFrame,
    SlotInit,
    StepFrame,
    Submit,
    SubmitReply,
    Verdict,
    WorkerHelloAck,
)
from meshkit.types import PAGE_TOKENS, FinishReason
from scheduler_svc.core import audit
from tests.sim.device import Violation
from tests.sim.grammar import PLACE, REFUSED
from tests.sim.reference import Expected, expected_output, page_names
from tests.sim.scenario import LONG_DEADLINE_MS, RequestSpec
from worker_svc.core.effects import Ran

if TYPE_CHECKING:
    from tests.sim.world import Process, World

MS = 1_000_000
HANG_MS = 30_000
"""Nobody got an id and nothing ended for so long, with no fault going on: the open requests hang."""
AUDIT_EVERY = 64


@dataclass(slots=True)
class Track:
    """What one client has seen."""

    spec: RequestSpec
    expected: list[Expected]
    gateway: "Process | None" = None
    have: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    deadline_ns: int = 1 << 62
    arrived: bool = False
    over: bool = False  # refused, left or lost with its gateway
    silent: bool = False  # the journal has been told that the client left
    closed_ns: dict[int, int] = field(default_factory=dict)  # choice -> when the journal was told to close it
    attempts: int = 0

    @property
    def open(self) -> bool:
        return not self.over and not (self.arrived and all(self.ended))


class Checker:
    """Watches one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.tracks: dict[bytes, Track] = {}
        for spec in world.scenario.requests:
            outputs = [
                expected_output(spec.prompt, spec.seed, choice, spec.params, spec.grammar, thinking=spec.thinking)
                for choice in range(spec.n)
            ]
            self.tracks[spec.request_id] = Track(spec, outputs, None, [0] * spec.n, [False] * spec.n)
        self.counts: dict[str, int] = {}
        self.tokens = 0
        self.completed = 0
        self._quiet_ns = 0  # of the last id, end or ongoing fault
        self._names: dict[int, list[bytes]] | None = None
        self._gens: dict[str, dict[int, int]] = {}
        self._since_audit = 0
        self._tally: Counter[str] = Counter()  # what the counters of this scheduler's life must say
        self._verdicts: dict[tuple[int, bytes, int], Verdict] = {}

    # ---- processes --------------------------------------------------------------------------------------------------

    def started(self, process: "Process") -> None:
        self._gens[process.name] = {}
        if process.kind == "scheduler":
            self._tally.clear()

    def died(self, process: "Process") -> None:
        """The clients of a dead gateway see a reset."""
        for track in self.tracks.values():
            if track.gateway is process:
                track.over = True

    def sent(self, process: "Process", frame: Frame) -> None:
        """G1, and for I15."""
        if isinstance(frame, StepFrame):
            self._tally["steps"] += 1
            for init in frame.inits:
                self._check_init(process, init)

    def _check_init(self, process: "Process", init: SlotInit) -> None:
        track, grammars = self.tracks[init.request_id], self.world.grammars
        spec, where = track.spec, f"request {track.spec.number} choice {init.choice}"
        if not spec.grammar:
            if init.grammar_id or init.thinking:
                raise Violation("G1", f"{where} starts under a grammar it did not ask for")
            return
        if (process.epoch, init.grammar_id) not in grammars.told:
            raise Violation("G1", f"{where} starts before its grammar is there")
        if grammars.texts[init.grammar_id] != spec.grammar or init.thinking != spec.thinking:
            raise Violation("G1", f"{where} starts under another grammar, or armed otherwise")
        if list(init.emitted) != track.expected[init.choice].ids[: init.n_emitted]:
            raise Violation("G1", f"{where} starts without the ids it has emitted")

    def answered(self, submit: Submit, reply: SubmitReply) -> None:
        """G2: the same key gets the same verdict, until a higher attempt or attachment fences it."""
        if reply.verdict in (Verdict.SUPERSEDED, Verdict.STALE_ATTACH):
            return
        key = (self.world.scheduler.epoch, submit.request_id, submit.attempt)
        first = self._verdicts.setdefault(key, reply.verdict)
        if reply.verdict is not first:
            raise Violation("G2", f"attempt {submit.attempt} was answered {first.name}, now {reply.verdict.name}")

    def counted(self, process: "Process", effect: Count) -> None:
        self.counts[effect.name] = self.counts.get(effect.name, 0) + effect.amount
        if process.kind == "scheduler":
            self._tally[effect.name] += effect.amount
        if effect.fault:
            raise Violation("R10", f"{process.kind} counted {effect.name}")

    def before(self, process: "Process", event: Any) -> Any:
        """Note what an event means for clients; for a stale frame, what must not change."""
        if isinstance(event, Received):
            if _is_stale(process, event):
                for effect in process.core.handle(Tick(), self.world.now_ns):
                    self.world._effect(process, effect)
                return _fingerprint(process)
            frame = event.envelope.frame
            if process.kind == "scheduler" and isinstance(frame, ResultFrame) and not frame.error:
                self._tally["tokens"] += len(frame.tokens)
        elif isinstance(event, Start):
            track = self.tracks[event.request_id]
            track.deadline_ns = self.world.now_ns + event.deadline_ms * MS
        elif isinstance(event, ClientGone):
            track = self.tracks[event.request_id]
            track.silent = True
            track.closed_ns = dict.fromkeys(range(track.spec.n), self.world.now_ns)
        elif isinstance(event, StopChoice):
            track = self.tracks[event.request_id]
            track.ended[event.choice] = True
            track.closed_ns[event.choice] = self.world.now_ns
        return None

    def after(self, process: "Process", event: Any, before: Any) -> None:
        """Cheap invariants of the process that has just handled an event."""
        core = process.core
        if before is not None and _fingerprint(process) != before:
            raise Violation("I8", f"a stale frame changed {process.name}")
        if process.kind == "scheduler":
            self._since_audit += 1
            if self._since_audit >= AUDIT_EVERY:
                self._since_audit = 0
                try:
                    core.check()
                except AssertionError as error:
                    raise Violation("I3", f"scheduler: {error}") from error
            elif not audit.adds_up(core.state):
                raise Violation("I3", "a scheduler pool does not add up")
        elif process.kind == "worker":
            if isinstance(event, (Ran, Received)):
                self._check_worker(process)
        else:
            used = core.bytes_used
            if used > core.config.max_bytes or used != sum(entry.bytes for entry in core.entries.values()):
                raise Violation("I11", f"{process.name} counts {used} journal bytes")

    def _check_worker(self, process: "Process") -> None:
        table = process.core.table
        refs = [0] * len(table._refs)
        gens = self._gens[process.name]
        for slot in table.slots.values():
            for page in slot.pages:
                refs[page] += 1
            if slot.gen < gens.get(slot.slot, 0):
                raise Violation("I7", f"slot {slot.slot} went back from generation {gens[slot.slot]} to {slot.gen}")
            gens[slot.slot] = slot.gen
        if refs != table._refs:
            raise Violation("I6", f"{process.name}: page references {table._refs}, found {refs}")
        if table.published != process.seen_pages:
            self._check_published(process)

    def _check_published(self, process: "Process") -> None:
        table, device = process.core.table, process.device
        assert device is not None
        for page, entry in table.published.items():
            if process.seen_pages.get(page) == entry:
                continue
            digest = device.published(page)
            if entry.key not in self._keys_of(digest):
                raise Violation("I5", f"page {page} is published under a key that is not its content's")
        process.seen_pages = dict(table.published)
        for tail, page in table.tails.items():
            device.published_tail(tail, page)

    def _keys_of(self, digest: int) -> list[bytes]:
        if self._names is None:
            self._names = {}
            for track in self.tracks.values():
                for output in track.expected:
                    names = page_names(track.spec.prompt + output.ids, track.spec.tenant)
                    for end, key in names.items():
                        self._names.setdefault(end, []).append(key)
        return self._names.get(digest, [])

    # ---- clients ----------------------------------------------------------------------------------------------------

    def arrived(self, spec: RequestSpec, gateway: "Process") -> None:
        track = self.tracks[spec.request_id]
        track.arrived, track.gateway = True, gateway

    def abandoned(self, spec: RequestSpec) -> None:
        self.tracks[spec.request_id].over = True

    def client_left(self, spec: RequestSpec) -> bool:
        """The client closes its connection, if it is still there."""
        track = self.tracks[spec.request_id]
        was_open, track.over = track.open, True
        return was_open

    def stopped(self, spec: RequestSpec) -> bool:
        """A stop string matched in choice 0, if that is still open."""
        track = self.tracks[spec.request_id]
        return track.open and not track.ended[0]

    def submitted(self, process: "Process", submit: Submit) -> None:
        track = self.tracks[submit.request_id]
        again = submit.attempt == track.attempts  # the same key is the same Submit, whatever has come since
        track.attempts = max(track.attempts, submit.attempt)
        for choice in submit.choices:
            have = len(choice.emitted) if again else track.have[choice.choice]
            if list(choice.emitted) != track.expected[choice.choice].ids[:have]:
                raise Violation("R4", f"request {track.spec.number} resumes from ids that were not emitted")

    def emitted(self, spec: RequestSpec, effect: Emit) -> tuple[int, int]:
        """I1. Returns how many ids the choice had and has."""
        track = self.tracks[spec.request_id]
        have, output = track.have[effect.choice], track.expected[effect.choice]
        where = f"request {spec.number} choice {effect.choice}"
        if track.ended[effect.choice] or track.silent:
            raise Violation("I1", f"{where} got ids after its end")
        if spec.grammar in REFUSED:
            raise Violation("G1", f"{where} got ids under a grammar that cannot work")
        if effect.base != have or not effect.ids:
            raise Violation("I1", f"{where} got ids at {effect.base}, it has {have}")
        end = have + len(effect.ids)
        if list(effect.ids) != output.ids[have:end]:
            raise Violation("I1", f"{where} at {have} got {effect.ids}, right is {output.ids[have:end]}")
        if spec.params.top_logprobs >= 0 and list(effect.logprobs) != output.logprobs[have:end]:
            raise Violation("I1", f"{where} at {have} got wrong logprobs")
        track.have[effect.choice] = end
        self.tokens += len(effect.ids)
        self._quiet_ns = self.world.now_ns
        return have, end

    def ended(self, spec: RequestSpec, effect: Ended) -> None:
        """I2, and that the reason is true."""
        track = self.tracks[spec.request_id]
        output, have = track.expected[effect.choice], track.have[effect.choice]
        where = f"request {spec.number} choice {effect.choice}"
        if track.ended[effect.choice] or track.silent:
            raise Violation("I2", f"{where} ended twice")
        track.ended[effect.choice] = True
        self._quiet_ns = self.world.now_ns
        if effect.reason in (FinishReason.STOP, FinishReason.LENGTH):
            if have != len(output.ids) or effect.reason is not output.finish:
                raise Violation("I1", f"{where} ended by {effect.reason.name} with {have} of {len(output.ids)} ids")
            self.completed += 1
            if spec.grammar:
                self.counts["constrained_completed"] = self.counts.get("constrained_completed", 0) + 1
        elif effect.reason is FinishReason.ABORT:
            if spec.abort_ms < 0:
                raise Violation("I2", f"{where} aborted by nobody")
        elif effect.error_code == "deadline":
            if self.world.now_ns < track.deadline_ns - 2 * MS or spec.deadline_ms >= LONG_DEADLINE_MS:
                raise Violation("I12", f"{where} ended by deadline")
        elif effect.error_code in ("grammar_failed", "sampling_fault", "bad_grammar"):
            self._check_row_error(spec, effect)
        elif effect.error_code == "never_fits":
            if not self._never_fits(spec):
                raise Violation("I2", f"{where} ended with never_fits: {effect.error_message}")
        elif effect.error_code != "request_poisoned" or self.world.faults_fired < 2:
            raise Violation("I2", f"{where} ended with {effect.error_code}: {effect.error_message}")

    def _check_row_error(self, spec: RequestSpec, effect: Ended) -> None:
        """A row that was made to fail, or a grammar service that cannot go on with what another revision began."""
        made = (spec.request_id, effect.choice) in self.world.row_faults
        upgraded = bool(spec.grammar) and self.world.grammars.revision > 1
        made |= effect.error_code == "grammar_failed" and spec.grammar in self.world.grammars.refused
        bad = effect.error_code == "bad_grammar" and spec.grammar in REFUSED
        if not (bad or upgraded or (made and effect.error_code != "bad_grammar")):
            raise Violation("I2", f"request {spec.number} ended with {effect.error_code}: {effect.error_message}")

    def refused(self, spec: RequestSpec, effect: Refused) -> None:
        track, knobs = self.tracks[spec.request_id], self.world.scenario.knobs
        if any(track.have) or any(track.ended) or track.silent:
            raise Violation("I2", f"request {spec.number} refused after it had begun")
        track.over = True
        fair = {
            Verdict.NEVER_FITS: self._never_fits(spec),
            Verdict.QUEUE_FULL: knobs.queue_requests < 1000,
            Verdict.DRAINING: any(fault.kind in ("bye", "rolling") for fault in self.world.scenario.faults),
            Verdict.BAD_GRAMMAR: spec.grammar in REFUSED and effect.place == PLACE,
            Verdict.GRAMMAR_LATER: bool(spec.grammar) and self._grammar_trouble(),
            Verdict.NO_WORKER: self.world.faults_fired > 0 or self.world.now_ns < 300 * MS,
        }
        if not fair.get(effect.verdict, False):
            raise Violation("I2", f"request {spec.number} refused: {effect.verdict.name} {effect.message}")

    def _grammar_trouble(self) -> bool:
        """A grammar may be late: its service has faults, or compiles take about as long as requests wait."""
        knobs = self.world.scenario.knobs
        late = knobs.grammar_ms * 2 + 20 * knobs.delay_ms + 300 > knobs.grammar_wait_ms
        return late or knobs.grammar_trouble > 0 or self.world.faults_fired > 0

    def _never_fits(self, spec: RequestSpec) -> bool:
        pages = -(-(len(spec.prompt) + spec.params.max_tokens - 1) // PAGE_TOKENS)
        return pages > self.world.scenario.knobs.pages

    # ---- ends -------------------------------------------------------------------------------------------------------

    def overdue(self) -> None:
        """I12."""
        world = self.world
        if world.faults_open:
            self._quiet_ns = world.now_ns
        for track in self.tracks.values():
            if not track.open or not track.arrived or track.gateway is None or track.gateway.frozen:
                continue
            if world.now_ns > max(track.deadline_ns, track.gateway.thawed_ns) + 1000 * MS:
                raise Violation("I12", f"request {track.spec.number} is open 1 s after its deadline")
            if world.now_ns > self._quiet_ns + HANG_MS * MS:
                raise Violation("I12", f"request {track.spec.number} hangs: {track.have} ids, attempt {track.attempts}")

    def verdicts_late(self) -> None:
        """G2: a request that was never accepted has its verdict soon, whatever becomes of the grammar service."""
        world = self.world
        if not world.scheduler.alive or world.scheduler.frozen:
            return
        allowed = (world.scenario.knobs.grammar_wait_ms + 1_000) * MS
        for held in world.held.values():
            fresh = held.request.grammar is None or not held.request.grammar.grammar_rev
            if fresh and world.now_ns > max(held.since_ns, world.scheduler.thawed_ns) + allowed:
                raise Violation("G2", f"a Submit of attempt {held.request.attempt} is not answered")

    def cancelled(self) -> None:
        """P10, while nothing has gone wrong: a closed choice has left the scheduler within 250 ms and a few steps."""
        world, knobs = self.world, self.world.scenario.knobs
        if world.faults_fired or not world.scheduler.alive:
            return
        allowed = int((300 + 4 * knobs.step_ms + 12 * knobs.delay_ms) * MS)
        requests = world.scheduler.core.state.requests
        for rid, track in self.tracks.items():
            if not track.closed_ns or rid not in requests:
                continue
            for seq in requests[rid].choices:
                if world.now_ns > track.closed_ns.get(seq.choice, 1 << 62) + allowed:
                    raise Violation("P10", f"request {track.spec.number} choice {seq.choice} runs on after its end")

    def all_ended(self) -> bool:
        return not any(track.open for track in self.tracks.values())

    def at_baseline(self) -> str | None:
        """I13: None if the mesh is as if nothing had happened, else the first difference."""
        world = self.world
        for process in world.processes:
            if not process.alive or process.frozen:
                return f"{process.name} is down"
        if not world.grammars.alive or world.grammars.frozen:
            return "the grammar service is down"
        state = world.scheduler.core.state
        if len(state.workers) != len(world.workers) or not all(w.serving for w in state.workers.values()):
            return "a worker is not attached"
        if len(state.gateways) != len(world.gateways):
            return "a gateway is not attached"
        for name in ("requests", "rows", "queue"):
            if len(getattr(state, name)):
                return f"scheduler.{name} is not empty"
        if state.grammars.by_key or state.grammars.by_ticket or state.queue.held:
            return "scheduler.grammars is not empty"
        if world.held:
            return "a Submit has no answer"
        for worker in state.workers.values():
            for name in ("inflight", "running", "preempting", "closing", "orphans", "retire_pages", "retire_tails"):
                if getattr(worker, name):
                    return f"scheduler: {name} of {worker.name} is not empty"
            for rank in worker.ranks:
                for name in ("pages", "tails", "slots"):
                    pool = getattr(rank, name)
                    if pool.owned or pool.quarantined or len(pool.free) + pool.cached != pool.size:
                        return f"scheduler: {name} of {worker.name}: {pool.owned} owned, {len(pool.free)} free"
        for process in world.workers:
            table, worker = process.core.table, state.workers[process.name]
            if table.slots or any(table._refs):
                return f"{process.name} holds slots"
            if process.masks is not None and process.masks.book._slots:
                return f"{process.name} keeps masks of slots that it gave up"
            attachment = world.grammars.attachments.get(process.name)
            if process.masks is not None and (attachment is None or len(attachment.engine)):
                return f"the grammar service has sessions of {process.name}, or no stream"
            pages, tails = _published(state, worker)
            if sorted(table.published) != pages or table.tails != tails:
                return f"{process.name} has published other pages or tails than the scheduler knows"
        for process in world.gateways:
            if process.core.entries or process.core.bytes_used or process.core._rows._rows or process.core._calls:
                return f"{process.name} has open entries"
        return None

    def finish(self) -> None:
        """I14, I15, and a last audit."""
        scheduler = self.world.scheduler.core
        scheduler.check()
        busy = self.counts.get("resubmit_busy", 0)
        for track in self.tracks.values():
            if track.attempts > 2 + self.world.faults_fired + busy:
                raise Violation("I14", f"request {track.spec.number} took {track.attempts} attempts")
        for name, amount in self._tally.items():
            if scheduler.counters.get(name, 0) != amount:
                raise Violation("I15", f"{name} is counted {scheduler.counters.get(name, 0)}, it was {amount}")


def _published(state: Any, worker: Any) -> tuple[list[int], dict[int, int]]:
    """What the index says a worker has published: pages, and tails with their pages."""
    pages: list[int] = []
    tails: dict[int, int] = {}
    for rank in worker.ranks:
        there = state.index.pools[rank.pool]
        pages += there.trie.page[there.trie.page >= 0].tolist()
        for local in np.flatnonzero(there.tails.row >= 0).tolist():
            tails[local + there.tails.base] = int(there.trie.page[there.tails.row[local]])
    return sorted(pages), tails


def _is_stale(process: "Process", event: Received) -> bool:
    """Whether the frame belongs to no attachment in force at this process."""
    envelope = event.envelope
    if process.kind == "scheduler":
        conn = process.core.state.conns.get(event.conn)
        return conn is None or (conn.owner is not None and conn.attach_id != envelope.attach_id)
    link = process.core._link
    if isinstance(envelope.frame, (WorkerHelloAck, GatewayHelloAck)):
        return bool(event.conn != link._conn)
    return bool(event.conn != link._conn or envelope.attach_id != link.attach_id)


def _fingerprint(process: "Process") -> Any:
    core = process.core
    if process.kind == "scheduler":
        state = core.state
        return (
            [
                (rid, req.attempt, [(seq.choice, len(seq.emitted), seq.phase, seq.length) for seq in req.choices])
                for rid, req in state.requests.items()
            ],
            [(worker.name, len(worker.inflight), len(worker.orphans)) for worker in state.workers.values()],
        )
    if process.kind == "worker":
        slots = [(slot.slot, slot.gen, slot.length, slot.n_emitted) for slot in core.table.slots.values()]
        return slots, list(core.table.published), len(core._queue), core._expected_step, core._dumped
    return [
        (rid, entry.attempt, entry.phase, [len(choice.ids) for choice in entry.choices])
        for rid, entry in core.entries.items()
    ]
