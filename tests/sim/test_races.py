"""Three races of the resumption protocol, each in both orders, on the real cores: a test delivers every frame by hand.

A gateway resubmits while its old scheduler still lives; a worker restarts while its last word is under way; a finish
meets a cancel. Whatever comes first, the client has the right ids once, and every pool is back where it was.
"""

from collections import Counter, deque
from random import Random

import numpy as np
import pytest

from gateway.journal.events import ClientGone, Emit, Ended, Start, StopChoice
from gateway.journal.journal import Journal, JournalConfig
from meshkit.core import Call, Called, Close, Closed, Count, Dial, Opened, Received, Replied, Reply, Send, Tick
from meshkit.frames import ResultFrame, StepFrame, TokenFrame
from meshkit.pages import page_keys
from meshkit.types import FinishReason, RequestId, SamplingParams
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from tests.sim.device import Device
from tests.sim.reference import expected_output, namespace
from tests.sim.world import MODEL
from worker_svc.core.effects import Ran, Run
from worker_svc.core.slots import SlotMachine, SlotMachineConfig
from worker_svc.core.table import PoolConfig

MS = 1_000_000
PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
REQUEST = RequestId((1).to_bytes(16, "big"))


class Node:
    """A core, what it has sent and nobody has delivered, and what it has counted."""

    def __init__(self, name, core):
        self.name, self.core = name, core
        self.peers = {}  # conn -> (node, conn there)
        self.out = deque()  # (conn, envelope)
        self.dials, self.calls, self.runs = deque(), deque(), deque()
        self.replies = {}
        self.counts = Counter()
        self.conns = 0


class Mesh:
    """One gateway, one worker, and as many schedulers as a test starts. Time passes only by `wait`."""

    def __init__(self):
        self.now = 0
        self.ids, self.ends = {}, []
        self.gateway = Node(
            "gateway", Journal(JournalConfig(name="g", boot=1, build="t", deterministic=True), Random(1))
        )
        self.schedulers = []
        self.scheduler = self.new_scheduler()  # whom dials and calls reach
        self.worker = self.new_worker(boot=1)
        for node in (self.gateway, self.worker):
            self.event(node, Tick())
            self.connect(node)
        self.settle()

    def new_scheduler(self):
        number = len(self.schedulers) + 1
        limits = SchedulerLimits(depth=1, build="t", resume_wait_ms=100)
        self.schedulers.append(Node(f"scheduler{number}", Scheduler(limits, Random(number), boot=number)))
        return self.schedulers[-1]

    def new_worker(self, boot):
        pools = PoolConfig(slots=2, pages=8, tails=2, ranks=1, max_step_tokens=256)
        config = SlotMachineConfig(group="w", boot=boot, build="t", model=MODEL, pools=pools)
        node = Node(f"worker{boot}", SlotMachine(config, Random(boot)))
        node.device = Device(node.core.table, None)
        return node

    def event(self, node, event):
        for effect in node.core.handle(event, self.now):
            match effect:
                case Send(conn=conn, envelope=envelope):
                    if conn in node.peers:
                        node.out.append((conn, envelope))
                case Close(conn=conn):
                    self.cut(node, conn)
                case Dial(conn=conn):
                    node.dials.append(conn)
                case Call():
                    node.calls.append(effect)
                case Reply(call=call, reply=reply):
                    node.replies[call] = reply
                case Run():
                    node.runs.append(effect)
                case Emit():
                    have = self.ids.setdefault(effect.request_id, [])
                    assert effect.base == len(have)
                    have += effect.ids
                case Ended():
                    self.ends.append((effect.request_id, effect.reason))
                case Count(name=name, fault=fault):
                    assert not fault, name
                    node.counts[name] += 1

    def connect(self, node):
        """Its dial reaches the scheduler of the day."""
        other, conn = self.scheduler, node.dials.popleft()
        other.conns += 1
        node.peers[conn], other.peers[other.conns] = (other, other.conns), (node, conn)
        self.event(other, Opened(other.conns, "gateway" if node is self.gateway else "worker"))
        self.event(node, Opened(conn, "scheduler"))

    def cut(self, node, conn, told=True):
        """The stream is gone: what was under way is lost. `told`: both ends learn of it, else `node` alone."""
        other, there = node.peers.pop(conn)
        node.out = deque(pair for pair in node.out if pair[0] != conn)
        self.event(node, Closed(conn))
        if told and there in other.peers:
            del other.peers[there]
            self.event(other, Closed(there))

    def deliver(self, node, only=object):
        """What it has sent arrives, in order; frames of other types than `only` stay."""
        kept = deque()
        while node.out:
            conn, envelope = node.out.popleft()
            if not isinstance(envelope.frame, only):
                kept.append((conn, envelope))
            elif conn in node.peers:
                other, there = node.peers[conn]
                self.event(other, Received(there, envelope))
        node.out = kept + node.out

    def call(self):
        """The gateway's oldest call is executed; answers reach it by `answer`."""
        call = self.gateway.calls.popleft()
        self.event(self.scheduler, Called(call.call, call.request))
        return call

    def answer(self, call):
        self.event(self.gateway, Replied(call.call, self.scheduler.replies.pop(call.call)))

    def compute(self):
        """The worker's device does all it has been given."""
        while self.worker.runs:
            run = self.worker.runs.popleft()
            self.event(self.worker, Ran(self.worker.device.run(run.work, set(), set(), {0: "t", 1: "t"})))

    def wait(self, ms):
        self.now += ms * MS
        for node in (self.gateway, self.scheduler, self.worker):
            self.event(node, Tick())

    def settle(self, rounds=60):
        """Everything goes its way, with a little time."""
        for _ in range(rounds):
            for node in (self.gateway, self.worker):
                if node.dials:
                    self.connect(node)
            while self.gateway.calls:
                self.answer(self.call())
            for node in (self.gateway, self.worker, self.scheduler):
                self.deliver(node)
            self.compute()
            self.wait(5)

    def start(self, number=1, params=PARAMS):
        prompt = np.array(PROMPT, np.int32)
        name = RequestId(number.to_bytes(16, "big"))
        names = namespace("t")
        start = Start(
            request_id=name,
            prompt=prompt,
            page_keys=tuple(page_keys(prompt, names)),
            params=params,
            seed=9,
            n=1,
            tenant="t",
            priority=0,
            deadline_ms=60_000,
            namespace=names,
        )
        self.event(self.gateway, start)
        return name

    def run_until(self, count):
        """Step by step, until the client has so many ids."""
        while len(self.ids.get(REQUEST, ())) < count:
            self.settle(1)
        assert len(self.ids[REQUEST]) == count

    def stream_of(self, node):
        (conn,) = node.peers
        return conn

    def slot(self):
        (slot,) = self.worker.core.table.slots.values()
        return slot.slot, slot.gen

    def check_end(self, *requests):
        """Right ids, one end each, nothing left anywhere."""
        for name in requests:
            assert self.ids[name] == expected_output(PROMPT, 9, 0, PARAMS).ids
            assert self.ends.count((name, FinishReason.LENGTH)) == 1
        self.check_idle()

    def check_idle(self):
        self.scheduler.core.check()
        assert not self.scheduler.core.state.requests and not self.worker.core.table.slots
        assert not self.gateway.core.entries
        for worker in self.scheduler.core.state.workers.values():
            for rank in worker.ranks:
                assert rank.slots.owned == rank.pages.owned == rank.tails.owned == 0


def one_step(mesh):
    """One step is computed and its result lies in the worker's socket."""
    mesh.deliver(mesh.scheduler, StepFrame)
    mesh.compute()
    assert any(isinstance(envelope.frame, ResultFrame) for _, envelope in mesh.worker.out)


@pytest.mark.parametrize("result_first", [True, False])
def test_race_1a_the_old_scheduler_thaws_and_is_asked_again(result_first):
    """It has booked ids into a stream that is gone, more come, and the gateway resubmits under a new attachment."""
    mesh = Mesh()
    mesh.start()
    mesh.run_until(5)
    slot, old_conn = mesh.slot(), mesh.stream_of(mesh.gateway)
    one_step(mesh)
    mesh.deliver(mesh.worker)  # booked, and its ids stay in a stream that now breaks
    assert any(isinstance(envelope.frame, TokenFrame) for _, envelope in mesh.scheduler.out)
    one_step(mesh)  # its result waits in the socket of the frozen scheduler
    there = mesh.gateway.peers[old_conn][1]
    mesh.cut(mesh.gateway, old_conn, told=False)
    mesh.wait(0)
    while not mesh.gateway.dials:
        mesh.now += 20 * MS
        mesh.event(mesh.gateway, Tick())
    mesh.connect(mesh.gateway)
    assert [pair for pair in mesh.scheduler.out if pair[0] == there], "rows under the old attachment are still queued"
    mesh.deliver(mesh.gateway)  # Hello: the old attachment is superseded, its rows die
    mesh.deliver(mesh.scheduler)  # HelloAck
    while not mesh.gateway.calls:
        mesh.now += 20 * MS
        mesh.event(mesh.gateway, Tick())
    if result_first:
        mesh.deliver(mesh.worker)
    call = mesh.call()
    assert call.request.attempt == 2 and len(call.request.choices[0].emitted) == 5
    if not result_first:
        mesh.deliver(mesh.worker)
    if there in mesh.scheduler.peers:
        del mesh.scheduler.peers[there]
        mesh.event(mesh.scheduler, Closed(there))  # at last it learns of the break
    mesh.answer(call)
    mesh.deliver(mesh.scheduler)
    assert mesh.slot() == slot, "the worker has not noticed"
    assert mesh.scheduler.core.counters["rebinds"] == 1
    mesh.settle()
    mesh.check_end(REQUEST)


@pytest.mark.parametrize("thaws_first", [True, False])
def test_race_1b_two_schedulers_and_one_driver(thaws_first):
    """Another scheduler has taken over; the old one thaws before or after the worker has told the new one its slots."""
    mesh = Mesh()
    mesh.start()
    mesh.run_until(5)
    slot, old = mesh.slot(), mesh.scheduler
    mesh.deliver(old, StepFrame)
    mesh.compute()  # its result is lost with the stream
    for node in (mesh.gateway, mesh.worker):
        mesh.cut(node, mesh.stream_of(node), told=False)
    links = dict(old.peers)  # it does not know yet
    mesh.scheduler = mesh.new_scheduler()

    def thaw():
        """What it wrote reaches both by streams that they have left."""
        mesh.event(old, Tick())
        for conn, envelope in old.out:
            node, there = links[conn]
            before = list(mesh.worker.core.table.slots)
            mesh.event(node, Received(there, envelope))
            assert list(mesh.worker.core.table.slots) == before
        for conn in links:
            old.peers.pop(conn, None)
            mesh.event(old, Closed(conn))

    for node in (mesh.gateway, mesh.worker):
        while not node.dials:
            mesh.now += 20 * MS
            mesh.event(node, Tick())
    frame = old.core.state.workers["w"].attach_id
    if thaws_first:
        thaw()
    for node in (mesh.worker, mesh.gateway):
        mesh.connect(node)
        mesh.deliver(node)
    mesh.deliver(mesh.scheduler)
    if not thaws_first:
        thaw()
    assert mesh.worker.core._link.attach_id not in (0, frame)
    mesh.settle(2)
    assert mesh.slot() == slot, "the slot was adopted"
    mesh.settle()
    assert mesh.scheduler.core.counters["slots_adopted"] == 1
    mesh.check_end(REQUEST)


@pytest.mark.parametrize("result_first", [True, False])
def test_race_2_a_worker_restarts_while_its_last_result_is_under_way(result_first):
    """The new process says Hello before or after the old one's result is read; its memory is blank either way."""
    mesh = Mesh()
    mesh.start()
    mesh.run_until(5)
    old_attach = mesh.scheduler.core.state.workers["w"].attach_id
    one_step(mesh)
    dead, conn = mesh.worker, mesh.stream_of(mesh.worker)
    (there,) = (there for there, (node, _) in mesh.scheduler.peers.items() if node is dead)
    last = [envelope for at, envelope in dead.out if at == conn]
    mesh.worker = mesh.new_worker(boot=2)
    mesh.event(mesh.worker, Tick())
    if result_first:
        for envelope in last:
            mesh.event(mesh.scheduler, Received(there, envelope))
    mesh.connect(mesh.worker)
    mesh.deliver(mesh.worker)  # Hello under the same name: the older attachment is superseded
    if not result_first:
        before = mesh.scheduler.counts["stale_conn"]
        emitted = [len(s.emitted) for r in mesh.scheduler.core.state.requests.values() for s in r.choices]
        for envelope in last:
            mesh.event(mesh.scheduler, Received(there, envelope))
        after = [len(s.emitted) for r in mesh.scheduler.core.state.requests.values() for s in r.choices]
        assert emitted == after, "a result of the dead process was booked"
        assert mesh.scheduler.counts["stale_conn"] > before or there not in mesh.scheduler.core.state.conns
    mesh.scheduler.peers.pop(there, None)
    mesh.event(mesh.scheduler, Closed(there))
    mesh.settle(4)
    assert mesh.slot(), "it is placed again"
    assert mesh.scheduler.core.state.workers["w"].attach_id != old_attach
    mesh.settle()
    mesh.check_end(REQUEST)


@pytest.mark.parametrize("how", ["gone", "stop string"])
@pytest.mark.parametrize("finish_first", [True, False])
def test_race_3_a_finish_meets_a_cancel(finish_first, how):
    """The last step's result and the client's end cross between gateway and scheduler; the slot is free once."""
    mesh = Mesh()
    mesh.start()
    mesh.run_until(15)
    old_slot = mesh.slot()
    one_step(mesh)  # the sixteenth id, by which the choice ends
    close = ClientGone(REQUEST) if how == "gone" else StopChoice(REQUEST, 0, 12)
    if finish_first:
        mesh.deliver(mesh.worker)  # FINISHED; the row waits in the gateway's socket
        mesh.event(mesh.gateway, close)
        mesh.deliver(mesh.gateway)
        mesh.deliver(mesh.scheduler)
    else:
        mesh.event(mesh.gateway, close)
        mesh.deliver(mesh.gateway)  # CLOSING
        mesh.deliver(mesh.worker)
        mesh.deliver(mesh.scheduler)
    again = mesh.start(2)
    mesh.settle(1)
    mesh.settle()
    assert len(mesh.ids[REQUEST]) == 15, "nothing after the end"
    ends = [reason for name, reason in mesh.ends if name == REQUEST]
    assert not ends, "the caller has closed it; nobody closes it again"
    assert mesh.worker.core.table.slots == {} and old_slot[1] < mesh.scheduler.core.state.workers["w"].gen + 1
    mesh.check_end(again)
