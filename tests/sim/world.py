"""The simulated mesh: one heap of virtual time, processes around the real cores, streams and calls between them.

The network behaves as grpcio does: a stream is FIFO, then may break with any prefix delivered and the ends noticing at
different times; a call runs zero, one or two times with an outcome the caller may not learn; across streams there is no
order. Every frame and every call goes through real protobuf bytes.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from meshpb.v1 import scheduler_pb2

from gateway.journal.events import AbortRequest, ClientGone, Emit, Ended, Refused, Start, StopChoice
from gateway.journal.journal import Journal, JournalConfig
from meshkit.core import Call, Called, Close, Closed, Count, Dial, Opened, Received, Replied, Reply, Send, Tick, WakeAt
from meshkit.frames import Bye, Envelope, Submit, SubmitReply
from meshkit.pages import page_keys
from meshkit.types import GrammarKind, GrammarSource, ModelInfo, RequestId
from meshkit.wire import Link, decode_submit, decode_submit_reply, dumps, encode_submit, encode_submit_reply, loads
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.events import Compile, Drain, Drained
from scheduler_svc.core.scheduler import Scheduler
from tests.sim.checker import Checker
from tests.sim.device import LAYERS, Device, Violation
from tests.sim.grammar import GrammarService
from tests.sim.masks import DEAD_MS, MaskLink
from tests.sim.reference import EOS, KV_LAYOUT, MODEL_REVISION, VOCAB, namespace
from tests.sim.scenario import Fault, RequestSpec, Scenario, generator
from worker_svc.core.effects import Freed, Ran, Run
from worker_svc.core.slots import SlotMachine, SlotMachineConfig
from worker_svc.core.table import PoolConfig

MS = 1_000_000
MODEL = ModelInfo(
    name="sim",
    revision=MODEL_REVISION,
    vocab_size=VOCAB,
    max_context=2048,
    eos_ids=(EOS,),
    kv_layout_id=KV_LAYOUT,
    layers=LAYERS,
)
STANDBY_MS = 2_000
"""A standby ends a frozen process after so long, and serves in its place within a few hundred milliseconds."""
SETTLE_MS = 15_000
"""After the last request has ended the mesh must be back at its baseline within this time."""


@dataclass(slots=True, eq=False)
class Stream:
    """One stream between a dialler (side 0) and the scheduler (side 1)."""

    link: tuple[Link, Link]  # frames sent by side 0, by side 1
    ends: list["Process"]
    epochs: list[int]
    conns: list[int]
    last_ns: list[int] = field(default_factory=lambda: [0, 0])  # latest arrival booked per direction
    cut_ns: list[int] = field(default_factory=lambda: [1 << 62, 1 << 62])  # sent at or after this is lost
    stalled_ns: list[int] = field(default_factory=lambda: [0, 0])  # nothing of this direction arrives before
    closed: list[bool] = field(default_factory=lambda: [False, False])  # that end has been told
    dead: bool = False  # half open: nothing arrives any more
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A Submit at the scheduler."""

    request: Submit
    since_ns: int
    answer: Callable[[SubmitReply | None], None]


class Process:
    """A process: its core, its clock wish, whether it lives, is frozen or slow."""

    def __init__(self, world: "World", kind: str, index: int) -> None:
        self.world = world
        self.kind = kind
        self.index = index
        self.name = f"{kind}{index}"
        self.epoch = 0
        self.alive = False
        self.frozen = False
        self.leaving = False
        self.thawed_ns = 0
        self.slow = 1.0
        self.core: Any = None
        self.device: Device | None = None
        self.masks: MaskLink | None = None
        self.device_free_ns = 0  # when it will have done all steps launched so far
        self.failed_era = -1  # no further step of this era happens
        self.inbox: deque[Any] = deque()
        self.wish_ns = -1
        self.streams: dict[int, Stream] = {}
        self.conns = 0
        self.kill_at_effect = -1
        self.seen_pages: dict[int, Any] = {}

    def start(self) -> None:
        """A fresh process: new boot, empty state."""
        world, knobs = self.world, self.world.scenario.knobs
        self.epoch += 1
        self.alive, self.frozen, self.leaving, self.slow = True, False, False, 1.0
        self.inbox.clear()
        self.streams = {}
        self.wish_ns = -1
        self.kill_at_effect = -1
        boot = world.rng_ids.getrandbits(63) + 1
        if self.kind == "scheduler":
            self.core = Scheduler(_limits(knobs), world.rng_ids, boot)
            if world.grammars.alive:
                world.grammars.watched()
        elif self.kind == "worker":
            pools = PoolConfig(
                slots=knobs.slots,
                pages=knobs.pages,
                tails=knobs.tails,
                ranks=knobs.ranks,
                max_step_tokens=max(knobs.chunk_tokens, 16),
            )
            config = SlotMachineConfig(
                group=self.name, boot=boot, build="sim", model=MODEL, pools=pools, park_ns=knobs.park_ms * MS
            )
            self.core = SlotMachine(config, world.rng_network)
            constrained = any(request.grammar for request in world.scenario.requests)
            self.masks = MaskLink(world, self, pools.slots * pools.ranks) if constrained else None
            self.device = Device(self.core.table, self.masks.book if self.masks is not None else None)
            self.device_free_ns, self.failed_era = 0, -1
            self.seen_pages = {}
        else:
            self.core = Journal(
                JournalConfig(name=self.name, boot=boot, build="sim", deterministic=True), world.rng_network
            )
        world.checker.started(self)
        world.after(0, lambda: self.deliver(Tick()))

    def deliver(self, event: Any) -> None:
        """Hand an event to the core, or keep it while the process is frozen."""
        if not self.alive:
            return
        if self.frozen:
            self.inbox.append(event)
            return
        self.world.step(self, event)

    def wake(self, wish_ns: int, epoch: int) -> None:
        if self.epoch == epoch and self.wish_ns == wish_ns:
            self.wish_ns = -1
            self.deliver(Tick())


def _limits(knobs: Any) -> SchedulerLimits:
    return SchedulerLimits(
        depth=knobs.depth,
        chunk_tokens=knobs.chunk_tokens,
        workers=tuple(f"worker{i}" for i in range(knobs.workers)) if knobs.configured else (),
        build="sim",
        queue_requests=knobs.queue_requests,
        gateway_grace_ms=knobs.gateway_grace_ms,
        rebind_grace_ms=knobs.rebind_grace_ms,
        orphan_ms=knobs.orphan_ms,
        suspect_ms=knobs.suspect_ms,
        resume_wait_ms=knobs.resume_wait_ms,
        adopt_ids=knobs.adopt_ids,
        bypass=knobs.bypass,
        scan=knobs.scan,
        policy=knobs.policy,
        conservativeness=knobs.conservativeness,
        grammar=True,
        compile_ms=2_000,
        grammar_wait_ms=knobs.grammar_wait_ms,
    )


class World:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        self.scenario = scenario
        self.trace = trace
        self.now_ns = 0
        self.events = 0
        self.frames = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self.rng_network = generator(scenario.seed, "network")
        self.rng_ids = generator(scenario.seed, "ids")
        self.rng_device = generator(scenario.seed, "device")
        self.rng_grammar = generator(scenario.seed, "grammar service")
        self.rng_masks = generator(scenario.seed, "mask streams")
        self.checker = Checker(self)
        knobs = scenario.knobs
        self.scheduler = Process(self, "scheduler", 0)
        self.gateways = [Process(self, "gateway", i) for i in range(knobs.gateways)]
        self.workers = [Process(self, "worker", i) for i in range(knobs.workers)]
        self.processes = [self.scheduler, *self.gateways, *self.workers]
        self.grammars = GrammarService(self)
        self.row_faults: set[tuple[bytes, int]] = set()  # (request, choice) whose row was made to fail
        self.held: dict[int, Held] = {}  # calls that the scheduler has not answered
        self._call_count = 0
        self._call_faults: deque[str] = deque()
        self.faults_open = 0  # faults whose effect is not over yet
        self.faults_fired = 0
        self.names = {request.request_id: request for request in scenario.requests}

    # ---- time -------------------------------------------------------------------------------------------------------

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_ns, self.now_ns), self._sequence, action))

    def after(self, ms: float, action: Callable[[], None]) -> None:
        self.at(self.now_ns + int(ms * MS), action)

    def run(self) -> None:
        """Until every request has ended, all faults are over and the mesh is back at its baseline. Raises Violation."""
        for process in self.processes:
            process.start()
        self.grammars.start()
        for request in self.scenario.requests:
            self.after(request.at_ms, partial(self._arrive, request))
        self.faults_open = len(self.scenario.faults)
        for fault in self.scenario.faults:
            self.after(fault.at_ms, partial(self._fault, fault))
        quiet_since = -1
        check_ns = 0
        while self._heap:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()
            if self.now_ns < check_ns:
                continue
            check_ns = self.now_ns + 100 * MS
            self.checker.overdue()
            self.checker.cancelled()
            self.checker.verdicts_late()
            if self.faults_open or not self.checker.all_ended():
                quiet_since = -1
                continue
            if quiet_since < 0:
                quiet_since = self.now_ns
            if self.checker.at_baseline() is None:
                self.checker.finish()
                return
            if self.now_ns > quiet_since + SETTLE_MS * MS:
                raise Violation("I13", f"not at baseline {SETTLE_MS} ms after the end: {self.checker.at_baseline()}")
        raise Violation("I12", "nothing left to happen, yet requests are open")

    def log(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_ns / MS:10.3f} {text}")

    # ---- cores ------------------------------------------------------------------------------------------------------

    def step(self, process: Process, event: Any) -> None:
        """One event into one core, its effects out, the invariants after it."""
        self.events += 1
        if self.trace is not None:
            self.log(f"{process.name} <- {_short(event)}")
        before = self.checker.before(process, event)
        effects = process.core.handle(event, self.now_ns)
        limit = -1
        if process.kill_at_effect >= 0:
            limit = min(process.kill_at_effect, len(effects))
        for number, effect in enumerate(effects):
            if number == limit:
                break
            self._effect(process, effect)
            if not process.alive:
                return
        if limit >= 0:
            self._crash(process, self.rng_network.uniform(5, 1500))
            return
        self.checker.after(process, event, before)

    def _effect(self, process: Process, effect: Any) -> None:
        if self.trace is not None and not isinstance(effect, WakeAt):
            self.log(f"    {process.name} -> {_short(effect)}")
        if isinstance(effect, Send):
            self._send(process, effect)
        elif isinstance(effect, WakeAt):
            process.wish_ns = effect.at_ns
            if effect.at_ns < 1 << 61:
                wish, epoch = effect.at_ns, process.epoch
                self.at(wish, lambda: process.wake(wish, epoch))
        elif isinstance(effect, Count):
            self.checker.counted(process, effect)
        elif isinstance(effect, Run):
            self._run(process, effect)
        elif isinstance(effect, Freed):
            if process.masks is not None:
                process.masks.book.free(effect.slot, effect.slot_gen)
        elif isinstance(effect, Compile):
            self.grammars.call(effect)
        elif isinstance(effect, (Emit, Ended, Refused)):
            self._client(process, effect)
        elif isinstance(effect, Dial):
            self._dial(process, effect.conn)
        elif isinstance(effect, Close):
            self._close(process, effect.conn)
        elif isinstance(effect, Call):
            self._call(process, effect)
        elif isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Drained):
            pass
        else:
            raise Violation("effect", f"{process.name} produced {effect!r}")

    # ---- the worker's device ----------------------------------------------------------------------------------------

    def _run(self, process: Process, effect: Run) -> None:
        work, epoch, rng = effect.work, process.epoch, self.rng_device
        knobs = self.scenario.knobs
        tokens = sum(len(row.ids) or 1 for row in work.rows)
        duration = (knobs.step_ms * rng.uniform(0.7, 1.3) + 0.02 * tokens) * process.slow
        parked = {i for i in range(len(work.rows)) if knobs.park and rng.random() < knobs.park}
        fails = bool(knobs.step_error) and rng.random() < knobs.step_error
        self.faults_fired += fails
        slots = process.core.table.slots
        faulty = {i for i in range(len(work.rows)) if knobs.row_fault and self.rng_grammar.random() < knobs.row_fault}
        self.row_faults |= {(s.request_id, s.choice) for i in faulty if (s := slots.get(work.rows[i].slot))}
        tenants = {init.slot: self.names[slots[init.slot].request_id].tenant for init in work.inits}
        start_ns = max(self.now_ns, process.device_free_ns)
        process.device_free_ns = start_ns + int(duration * MS)

        def begin() -> None:
            if process.epoch == epoch and process.failed_era != effect.era:
                assert process.device is not None
                process.device.constraints.begin(work.inits)

        if work.inits:
            self.at(start_ns, begin)
            if knobs.leave_early and start_ns > self.now_ns:
                self._leave_early([slots[init.slot].request_id for init in work.inits if init.grammar_id])

        def done() -> None:
            if process.epoch != epoch or not process.alive:
                return
            assert process.device is not None
            if fails or process.failed_era == effect.era:
                process.failed_era = effect.era
                process.deliver(Ran(None, "simulated"))
            else:
                process.deliver(Ran(process.device.run(work, parked, faulty, tenants)))

        self.at(process.device_free_ns, done)

    def mask_delay_ns(self) -> int:
        """One way between a worker and the grammar service of its host; now and then the service is busy."""
        knobs, rng = self.scenario.knobs, self.rng_masks
        late = knobs.step_ms * 2 if rng.random() < knobs.mask_late else 0.0
        if self.now_ns < self.grammars.busy_ns and rng.random() < 0.5:
            late = knobs.step_ms * rng.uniform(0, 3)
        return int((rng.expovariate(10 / knobs.delay_ms) + late) * MS)

    # ---- streams ----------------------------------------------------------------------------------------------------

    def _delay_ns(self) -> int:
        return int(self.rng_network.expovariate(1 / (self.scenario.knobs.delay_ms * MS)))

    def _dial(self, process: Process, conn: int) -> None:
        if process.leaving:
            return
        links = (
            (Link.GATEWAY_UP, Link.GATEWAY_DOWN) if process.kind == "gateway" else (Link.WORKER_UP, Link.WORKER_DOWN)
        )
        stream = Stream(links, [process, self.scheduler], [process.epoch, -1], [conn, -1])
        process.streams[conn] = stream
        self.at(self.now_ns + self._delay_ns(), lambda: self._accept(stream))

    def _accept(self, stream: Stream) -> None:
        """The scheduler's side of a new stream; a process that is not there refuses it."""
        scheduler = self.scheduler
        if stream.closed[0]:
            return
        if not scheduler.alive or stream.dead:
            if not stream.dead:
                self._tell_closed(stream, 0, self._delay_ns(), "refused")
            return
        scheduler.conns += 1
        stream.epochs[1], stream.conns[1], stream.opened = scheduler.epoch, scheduler.conns, True
        scheduler.streams[scheduler.conns] = stream
        peer: Literal["gateway", "worker"] = "gateway" if stream.ends[0].kind == "gateway" else "worker"
        scheduler.deliver(Opened(scheduler.conns, peer))
        self._book(stream, 1, lambda: self._deliver(stream, 0, Opened(stream.conns[0], "scheduler")))

    def _book(self, stream: Stream, side: int, action: Callable[[], None]) -> None:
        """Something sent by `side` arrives at the other end, in order, unless the stream is cut by then."""
        if stream.dead or self.now_ns >= stream.cut_ns[side]:
            return
        arrival = max(self.now_ns + self._delay_ns(), stream.stalled_ns[side], stream.last_ns[side] + 1)
        stream.last_ns[side] = arrival  # also of what is lost: nothing sent behind it arrives either
        if arrival >= stream.cut_ns[side]:
            return
        self.at(arrival, action)

    def _send(self, process: Process, effect: Send) -> None:
        self.checker.sent(process, effect.envelope.frame)
        stream = process.streams.get(effect.conn)
        if stream is None:
            return  # the stream has ended under the core: its Closed is on the way
        side = stream.ends.index(process)
        data = dumps(effect.envelope, stream.link[side])
        self.frames += 1

        self._book(
            stream,
            side,
            lambda: self._deliver(stream, 1 - side, Received(stream.conns[1 - side], loads(data, stream.link[side]))),
        )

    def _deliver(self, stream: Stream, side: int, event: Any) -> None:
        process = stream.ends[side]
        lost = stream.dead or self.now_ns >= stream.cut_ns[1 - side]
        if process.epoch == stream.epochs[side] and not stream.closed[side] and not lost:
            process.deliver(event)

    def _close(self, process: Process, conn: int) -> None:
        """An end closes: what it sent before still arrives, then the other end is told; it is told itself at once."""
        stream = process.streams.pop(conn, None)
        if stream is None:
            return
        side = stream.ends.index(process)
        late = self.scenario.knobs.late_ms * self.rng_network.uniform(0.3, 1.0)
        self._tell_closed(stream, side, int(late * MS), "closed by us")
        if stream.opened:
            self._book(stream, side, lambda: self._tell_closed(stream, 1 - side, 0, "closed by peer"))

    def _tell_closed(self, stream: Stream, side: int, delay_ns: int, reason: str) -> None:
        """Give one end its Closed, once."""

        def tell() -> None:
            process = stream.ends[side]
            if stream.closed[side] or process.epoch != stream.epochs[side]:
                return
            stream.closed[side] = True
            process.streams.pop(stream.conns[side], None)
            process.deliver(Closed(stream.conns[side], reason))

        self.at(self.now_ns + delay_ns, tell)

    def _cut(self, stream: Stream, notice_ms: tuple[float, float]) -> None:
        """The connection is gone: any prefix of what is under way arrives, each end notices in its own time."""
        for side in (0, 1):
            stream.cut_ns[side] = min(stream.cut_ns[side], self.now_ns + int(self.rng_network.uniform(0, 3) * MS))
            told = max(stream.cut_ns[side], self.now_ns) - self.now_ns
            self._tell_closed(stream, 1 - side, told + int(notice_ms[1 - side] * MS), "reset")

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, process: Process, effect: Call) -> None:
        data = encode_submit(effect.request).SerializeToString()
        epoch, call = process.epoch, effect.call
        self.checker.submitted(process, effect.request)
        done = [False]

        def answer(reply: SubmitReply | None) -> None:
            if not done[0] and process.epoch == epoch:
                done[0] = True
                process.deliver(Replied(call, reply))

        fault = self._call_faults.popleft() if self._call_faults else ""
        self.after(effect.timeout_ms, lambda: answer(None))
        if fault != "call_lost":
            self.at(self.now_ns + self._delay_ns(), lambda: self._execute(data, answer, fault == "reply_lost"))
        if fault == "call_twice":
            again = self.rng_network.choice((1, 50, 800))
            self.after(again, lambda: self._execute(data, answer, lost=True))
        if fault in ("call_lost", "reply_lost"):
            self.after(self.rng_network.uniform(1, 1500), lambda: answer(None))

    def _execute(self, data: bytes, answer: Callable[[SubmitReply | None], None], lost: bool) -> None:
        scheduler = self.scheduler
        if not scheduler.alive:
            if not lost:
                self.at(self.now_ns + self._delay_ns(), lambda: answer(None))
            return
        self._call_count += 1
        number = self._call_count
        request: Submit = decode_submit(scheduler_pb2.SubmitRequest.FromString(data))
        self.held[number] = Held(request, self.now_ns, (lambda reply: None) if lost else answer)
        scheduler.deliver(Called(number, request))

    def _reply(self, effect: Reply) -> None:
        held = self.held.pop(effect.call)
        self.checker.answered(held.request, effect.reply)
        data = encode_submit_reply(effect.reply).SerializeToString()
        reply = decode_submit_reply(scheduler_pb2.SubmitReply.FromString(data))
        self.at(self.now_ns + self._delay_ns(), lambda: held.answer(reply))

    # ---- clients ----------------------------------------------------------------------------------------------------

    def _arrive(self, request: RequestSpec) -> None:
        gateway = self.gateways[request.gateway % len(self.gateways)]
        if not gateway.alive:
            self.checker.abandoned(request)
            return
        prompt = np.array(request.prompt, np.int32)
        start = Start(
            request_id=RequestId(request.request_id),
            prompt=prompt,
            page_keys=tuple(page_keys(prompt, namespace(request.tenant))),
            params=request.params,
            seed=request.seed,
            n=request.n,
            tenant=request.tenant,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
            namespace=namespace(request.tenant),
            grammar=GrammarSource(kind=GrammarKind.EBNF, text=request.grammar, thinking=request.thinking)
            if request.grammar
            else None,
        )
        self.checker.arrived(request, gateway)
        gateway.deliver(start)
        if request.cancel_after == 0:
            self._leave(request, gateway)
        if request.abort_ms >= 0:
            self.after(request.abort_ms, lambda: gateway.deliver(AbortRequest(RequestId(request.request_id))))

    def _leave(self, request: RequestSpec, gateway: Process) -> None:
        """The client goes; the gateway learns of it later."""

        def gone() -> None:
            if self.checker.client_left(request):
                gateway.deliver(ClientGone(RequestId(request.request_id)))

        self.after(self.rng_network.uniform(0, 5), gone)

    def _leave_early(self, request_ids: list[RequestId]) -> None:
        """Some of these clients go: a frame frees their slots that is prepared before the one that starts them runs."""
        for request_id in dict.fromkeys(request_ids):
            gateway = self.checker.tracks[request_id].gateway
            if gateway is not None and self.rng_grammar.random() < self.scenario.knobs.leave_early:
                self._leave(self.names[request_id], gateway)

    def _client(self, process: Process, effect: Emit | Ended | Refused) -> None:
        request = self.names[effect.request_id]
        if isinstance(effect, Refused):
            self.checker.refused(request, effect)
            return
        if isinstance(effect, Ended):
            self.checker.ended(request, effect)
            return
        had, have = self.checker.emitted(request, effect)
        if effect.choice == 0 and had < request.cancel_after <= have:
            self._leave(request, process)
        if effect.choice == 0 and had < request.stop_after <= have:
            stop = StopChoice(RequestId(request.request_id), 0, request.stop_after)

            def tell() -> None:
                if self.checker.stopped(request):
                    process.deliver(stop)

            self.after(0, tell)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault) -> None:
        """Start a fault. `a` and `b` are uniform draws that decide its duration and details."""
        self.faults_fired += 1
        process = self.processes[fault.target % len(self.processes)]
        self.log(f"== fault {fault.kind} on {process.name} a={fault.a:.2f} b={fault.b:.2f}")
        if fault.kind in ("call_lost", "call_twice", "reply_lost"):
            self._call_faults.append(fault.kind)
        elif fault.kind in ("compile_lost", "compile_reply_lost"):
            self.grammars.lost.append(fault.kind)
        elif fault.kind.startswith("grammar"):
            self._fault_of_grammars(fault)
            return
        elif not process.alive:
            pass
        elif fault.kind in ("break", "half_open", "one_way", "stall"):
            self._break(process, fault)
        elif fault.kind == "crash":
            if fault.b < 0.4:
                process.kill_at_effect = int(fault.b * 20)
            else:
                self._crash(process, 5 + fault.a * 1500)
        elif fault.kind == "bye":
            self._bye(process, fault.a)
        elif fault.kind == "rolling":
            self._roll(fault)
        elif fault.kind == "freeze" and not process.frozen:
            self._freeze(process, 20 + fault.a**2 * 5000, fault.b)
            return
        elif fault.kind == "slow":
            process.slow = 10.0
            self.after(200 + fault.a * 2000, lambda: self._end_slow(process))
            return
        self.faults_open -= 1

    def _fault_of_grammars(self, fault: Fault) -> None:
        grammars = self.grammars
        if fault.kind == "grammar_slow":
            grammars.slow = 30.0
            self.after(200 + fault.a * 2000, self._end_slow_grammars)
            return
        if fault.kind == "grammar_freeze" and grammars.alive and not grammars.frozen:
            grammars.freeze(20 + fault.a**2 * 5000)
            return
        if fault.kind == "grammar_mask_break":
            self._break_masks(fault, again=int(fault.b * 16) % 4)
            return
        if fault.kind == "grammar_crash" and grammars.alive:
            grammars.crash(5 + fault.a * 2500)
        self.faults_open -= 1

    def _break_masks(self, fault: Fault, again: int, patience: int = 20) -> None:
        """A mask stream in use breaks, and so do some of its successors, some steps later: what is said anew overlaps.

        Half of them keep the service busy when they come again: its answer about a position may be too late for it.
        """
        grammars, step_ms = self.grammars, self.scenario.knobs.step_ms
        streams = [it.stream for it in grammars.attachments.values() if len(it.engine)]
        if not streams and patience:
            self.after(step_ms, lambda: self._break_masks(fault, again, patience - 1))
            return
        grammars.busy_when_attached = fault.b * 64 % 1 < 0.5
        if streams := streams or grammars.streams:
            slow_ms = 2000 * fault.b if fault.b > 0.5 else 0.0
            notice = (slow_ms, 0.0) if fault.a * 16 % 1 < 0.5 else (0.0, slow_ms)
            streams[int(fault.a * len(streams))].cut(notice)
        if again:
            pause_ms = 45 + 3 * step_ms * (fault.a * 64 % 1)
            self.after(pause_ms, lambda: self._break_masks(fault, again - 1))
        else:
            self.faults_open -= 1

    def _end_slow_grammars(self) -> None:
        self.grammars.slow = 1.0
        self.faults_open -= 1

    def _end_slow(self, process: Process) -> None:
        process.slow = 1.0
        self.faults_open -= 1

    def _break(self, process: Process, fault: Fault) -> None:
        streams = list(process.streams.values())
        if not streams:
            return
        stream = streams[int(fault.a * len(streams))]
        if fault.kind == "stall":
            until = self.now_ns + int((1000 + 3000 * fault.b) * MS)
            stream.stalled_ns[int(fault.a * 16) % 2] = until
            return
        if fault.kind == "one_way":
            stream.cut_ns[int(fault.a * 16) % 2] = self.now_ns
            for side in (0, 1):
                self._tell_closed(stream, side, 7000 * MS, "no answer to pings")
            return
        slow_end = 7000 * (fault.b - 0.5) * 2 if fault.b > 0.5 else 0.0
        if fault.kind == "half_open":
            stream.dead = True
            notice = (7000.0, 7000.0)
        else:
            notice = (slow_end, 0.0) if fault.a * 16 % 1 < 0.5 else (0.0, slow_end)
        self._cut(stream, notice)

    def _crash(self, process: Process, down_ms: float) -> None:
        """kill -9: peers see resets within milliseconds; a new process comes up later."""
        if not process.alive:
            return
        self.log(f"== {process.name} dies")
        self.faults_open += 1
        process.alive = False
        process.epoch += 1
        process.inbox.clear()
        self.checker.died(process)
        if process.masks is not None:
            process.masks.died()
        for stream in list(process.streams.values()):
            notice = self.rng_network.uniform(0, 5)
            self._cut(stream, (notice, notice))
        process.streams = {}
        if process is self.scheduler:
            calls, self.held = self.held, {}
            for held in calls.values():
                self.after(self.rng_network.uniform(0, 5), partial(held.answer, None))

        def restart() -> None:
            self.faults_open -= 1
            process.start()

        self.after(down_ms, restart)

    def _roll(self, fault: Fault) -> None:
        """Everybody is replaced, one after the other, sometimes before the one in front is back."""
        first = fault.target % len(self.processes)
        order = self.processes[first:] + self.processes[:first]
        self.faults_open += len(order)

        def replace(process: Process) -> None:
            self.faults_open -= 1
            if process.alive:
                self._bye(process, fault.a)

        for number, process in enumerate(order):
            self.after(number * (50 + 800 * fault.b), partial(replace, process))

    def _bye(self, process: Process, wait: float) -> None:
        """A planned end: the scheduler drains first, the others say Bye; then a new process."""
        if process.frozen:
            return
        epoch = process.epoch
        if process is self.scheduler:
            process.deliver(Drain())
        else:
            process.leaving = True  # its last word: attached again, and then ended, it would have crashed
            if process.core.attached:
                link = process.core._link
                self._send(process, Send(link._conn, Envelope(link.attach_id, Bye("simulated"))))
            for conn in list(process.streams):
                self._close(process, conn)
        self.faults_open += 1

        def leave() -> None:
            self.faults_open -= 1
            if process.epoch == epoch:
                self._crash(process, 300 * wait)

        self.after(5 + 300 * wait, leave)

    def _freeze(self, process: Process, duration_ms: float, tick_first: float) -> None:
        """SIGSTOP: events pile up in order; on SIGCONT they come at once, the timer before or after them."""
        process.frozen = True
        epoch = process.epoch
        if process.masks is not None:
            self.after(DEAD_MS, lambda: process.epoch != epoch or not process.frozen or process.masks.silent())
        if self.scenario.knobs.standby and process is self.scheduler and duration_ms > STANDBY_MS:
            self.after(STANDBY_MS, lambda: process.epoch != epoch or self._crash(process, 100 + 300 * tick_first))

        def again(event: Any) -> None:
            if process.epoch == epoch:
                process.deliver(event)

        def thaw() -> None:
            self.faults_open -= 1
            if process.epoch != epoch:
                return
            self.log(f"== {process.name} thaws")
            process.frozen, process.thawed_ns = False, self.now_ns
            waiting, process.inbox = list(process.inbox), deque()
            if tick_first < 0.5:
                waiting.insert(0, Tick())
            for event in waiting:
                self.at(self.now_ns, partial(again, event))

        self.after(duration_ms, thaw)


def _short(value: Any) -> str:
    with np.printoptions(threshold=6, edgeitems=2, linewidth=10_000):
        text = repr(value)
    text = text.replace(", dtype=int32", "").replace(", dtype=uint8", "").replace("dtype=float32", "").replace("\n", "")
    return text if len(text) < 900 else text[:900] + "..."
