"""Scheduler and worker cores joined by function calls, for benchmarks of what they cost: no gRPC, no protobuf.

Frames travel as the values that they are. Whoever uses it runs the steps and says when one is over.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from meshkit.clock import MonotonicClock
from meshkit.core import Called, Dial, Opened, Received, Reply, Send, Tick
from meshkit.frames import Envelope, GatewayHello, GatewayHelloAck, Heartbeat, Submit, SubmitChoice, Verdict
from meshkit.types import PROTO_REV, RequestId, SamplingParams
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.request import Phase
from scheduler_svc.core.scheduler import Scheduler
from worker_svc.core.effects import Ran, Run
from worker_svc.core.slots import SlotMachine

GATEWAY, WORKER = 1, 2
BEAT_STEPS = 16


class Loopback:
    """A gateway, a scheduler and a worker's slot machine in one thread."""

    def __init__(self, machine: SlotMachine, depth: int) -> None:
        self.scheduler = Scheduler(SchedulerLimits(depth=depth, chunk_tokens=8192), Random(7), 11)
        self.machine = machine
        self.attach_id = 0
        self._launch: Callable[[Run], None] | None = None
        self._clock = MonotonicClock()
        self._results = 0

    def attach(self, launch: Callable[[Run], None]) -> None:
        """Gateway and worker introduce themselves; from now on each step goes to `launch`."""
        self._launch = launch
        self.to_scheduler(Opened(GATEWAY, "gateway"))
        self.to_scheduler(Received(GATEWAY, Envelope(0, GatewayHello("bench", 1, "bench", PROTO_REV))))
        self.to_worker(Tick())

    @property
    def decoding(self) -> int:
        """Choices past their prompt."""
        (worker,) = self.scheduler.state.workers.values()
        return sum(seq.phase is Phase.DECODE for seq in worker.running)

    def to_scheduler(self, event: Any) -> None:
        """One event, and what follows from it on both sides."""
        for effect in self.scheduler.handle(event, self._clock.now_ns()):
            if isinstance(effect, Reply):
                assert effect.reply.verdict is Verdict.ACCEPTED, effect.reply
            elif not isinstance(effect, Send):
                continue
            elif effect.conn == WORKER:
                self.to_worker(Received(1, effect.envelope))
            elif isinstance(effect.envelope.frame, GatewayHelloAck):
                self.attach_id = effect.envelope.attach_id

    def to_worker(self, event: Any) -> None:
        """One event, and what follows from it on both sides."""
        for effect in self.machine.handle(event, self._clock.now_ns()):
            if isinstance(effect, Dial):
                self.to_scheduler(Opened(WORKER, "worker"))
                self.to_worker(Opened(1, "scheduler"))
            elif isinstance(effect, Send):
                self.to_scheduler(Received(WORKER, effect.envelope))
            elif isinstance(effect, Run):
                assert self._launch is not None, "attach comes first"
                self._launch(effect)

    def ran(self, event: Ran) -> None:
        """The oldest step is over."""
        self._results += 1
        if self._results % BEAT_STEPS == 0:
            self.to_scheduler(Received(GATEWAY, Envelope(self.attach_id, Heartbeat())))
        self.to_worker(event)

    def submit(self, row: int, prompt: Sequence[int], tokens: int) -> None:
        """One choice; it must be accepted."""
        request = Submit(
            attach_id=self.attach_id,
            request_id=RequestId(row.to_bytes(16, "big")),
            attempt=1,
            choices=(SubmitChoice(0, row, 1),),
            params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            seed=row,
            remaining_ms=10_000_000,
            prompt=np.array(prompt, np.int32),
        )
        self.to_scheduler(Called(row, request))
