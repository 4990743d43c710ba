"""Scheduler core, one simulated worker and clients in virtual time: minutes of serving in seconds, the same every run.

The worker keeps lengths only and takes as long for a step as Flash on an H200 (the roofline of `worker_svc.sim`) or as
the demo model on a processor, give or take a few per cent. Frames travel as values with a fixed delay; no sockets, no
protobuf, no prefix is shared.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

import numpy as np

from meshkit import frames as f
from meshkit.core import Called, Opened, Received, Reply, Send, Tick, WakeAt
from meshkit.types import PROTO_REV, FinishReason, ModelInfo, RequestId, SamplingParams
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from worker_svc.sim.cost import FlashOnH200, Load

S = 1_000_000_000
GATEWAY, WORKER = 1, 2
VOCAB = 129_280
MODEL = ModelInfo(
    name="flash", revision="virtual", vocab_size=VOCAB, max_context=1 << 20, eos_ids=(1,), kv_layout_id="virtual"
)


@dataclass(slots=True, eq=False)
class Job:
    """One request and what its client saw. Times are virtual nanoseconds; `token_ns` one per token."""

    sub: f.Submit
    sent_ns: int
    token_ns: list[int] = field(default_factory=list)
    refused: f.SubmitReply | None = None
    on_end: Callable[["Job"], None] | None = None

    @property
    def ttft_s(self) -> float:
        return (self.token_ns[0] - self.sent_ns) / S


@dataclass(slots=True, eq=False)
class _Slot:
    length: int
    emitted: int
    max_tokens: int
    finished: bool = False


class Cost(Protocol):
    """What a step takes."""

    def step_ns(self, load: Load) -> int: ...


@dataclass(frozen=True, slots=True)
class NanoOnCpu:
    """The demo model in deterministic mode on one core (fitted to 1 to 32 rows beside chunks of 0 to 256 tokens).

    `slow`: how many times longer other work on the machine makes it.
    """

    slow: float = 1.0

    def step_ns(self, load: Load) -> int:
        tokens = load.rows + load.chunk_tokens
        ms = 20 + 3.0 * min(tokens, 4) + 4.0 * load.rows + 1.15 * load.chunk_tokens + 0.0003 * load.chunk_context
        return int(self.slow * ms * 1e6)


class Machine:
    """The worker: slots with their lengths, and the time a frame takes."""

    def __init__(self, cost: Cost, rng: Random) -> None:
        self.cost = cost
        self.rng = rng
        self.slots: dict[int, _Slot] = {}
        self.tokens = 0  # prefill and decode tokens computed

    def run(self, frame: f.StepFrame, start_ns: int) -> f.ResultFrame:
        """Execute a frame; the result says when it ended."""
        for free in frame.frees:
            del self.slots[free.slot]
        for init in frame.inits:
            self.slots[init.slot] = _Slot(init.start, init.n_emitted, init.params.max_tokens)
        for copy in frame.copies:
            self.slots[copy.dst].length = self.slots[copy.src].length
        chunks = {
            row: (start, n, sample)
            for row, start, n, sample in zip(
                frame.chunk_rows.tolist(),
                frame.chunk_starts.tolist(),
                frame.chunk_lens.tolist(),
                frame.chunk_samples.tolist(),
                strict=True,
            )
        }
        states, tokens, counts = [], [], []
        rows = context = work = 0
        for i, number in enumerate(frame.slots.tolist()):
            slot = self.slots[number]
            if i in chunks:
                start, n, sample = chunks[i]
                assert start == slot.length, "a chunk starts where the slot is"
                slot.length += n
                work += n * (start + n // 2)
            else:
                rows += 1
                context += slot.length
                slot.length += 1
                sample = 1
            if slot.finished:
                states.append(f.RowState.FINISHED_BEFORE)
            elif not sample:
                states.append(f.RowState.CHUNK)
            else:
                slot.emitted += 1
                slot.finished = slot.emitted >= slot.max_tokens
                states.append(f.RowState.FINISHED if slot.finished else f.RowState.SAMPLED)
                tokens.append(2 + slot.emitted % 1000)
            counts.append(int(states[-1] in (f.RowState.SAMPLED, f.RowState.FINISHED)))
        chunk_tokens = sum(n for _, n, _ in chunks.values())
        self.tokens += rows + chunk_tokens
        took = self.cost.step_ns(Load(rows, context, chunk_tokens, work)) * self.rng.uniform(0.98, 1.03)
        return f.ResultFrame(
            step=frame.step,
            t_start_ns=start_ns,
            t_end_ns=start_ns + int(took),
            states=np.array(states, np.uint8),
            counts=np.array(counts, np.uint8),
            tokens=np.array(tokens, np.int32),
        )


class VirtualMesh:
    """One gateway, one scheduler, one worker. `at` schedules what clients do; `run` passes time."""

    def __init__(
        self,
        seed: int = 0,
        *,
        limits: SchedulerLimits | None = None,
        cost: Cost | None = None,
        slots: int = 256,
        pages: int = 16_384,
        delay_ns: int = 100_000,
    ) -> None:
        self.now = S
        self.rng = Random(seed)
        self.core = Scheduler(limits or SchedulerLimits(depth=2, chunk_tokens=8192), Random(seed), 7)
        self.machine = Machine(cost or FlashOnH200(), self.rng)
        self.delay_ns = delay_ns
        self.jobs: dict[int, Job] = {}  # open ones by row
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._row = 0
        self._attach: dict[int, int] = {GATEWAY: 0, WORKER: 0}
        self._frames: deque[f.StepFrame] = deque()
        self._busy = False
        self._wake_ns = 0
        self._call: Job | None = None
        self._join(slots, pages)

    # ---- for clients ----

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + int(seconds * S), self._order, action))

    def submit(
        self,
        prompt: int,
        max_tokens: int,
        *,
        tenant: str = "",
        priority: int = 0,
        remaining_s: float = 3600.0,
        on_end: Callable[[Job], None] | None = None,
    ) -> Job:
        """Ask now, with a random prompt of so many tokens."""
        self._row += 1
        ids = np.random.default_rng(self.rng.getrandbits(32)).integers(2, VOCAB, prompt, dtype=np.int32)
        sub = f.Submit(
            attach_id=self._attach[GATEWAY],
            request_id=RequestId(self._row.to_bytes(16, "big")),
            attempt=1,
            choices=(f.SubmitChoice(0, self._row, 1, ()),),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            seed=self._row,
            remaining_ms=int(remaining_s * 1000),
            prompt=ids,
            tenant=tenant,
            priority=priority,
        )
        job = self._call = Job(sub, self.now, on_end=on_end)
        self.jobs[self._row] = job
        self._handle(Called(self._row, sub))
        if job.refused is not None:
            del self.jobs[self._row]
        return job

    def run(self, seconds: float) -> None:
        """Pass so much virtual time."""
        end = self.now + int(seconds * S)
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    # ---- plumbing ----

    def _join(self, slots: int, pages: int) -> None:
        self._handle(Opened(GATEWAY, "gateway"))
        self._receive(GATEWAY, f.GatewayHello("virtual", 1, "virtual", PROTO_REV))
        self._handle(Opened(WORKER, "worker"))
        hello = f.WorkerHello(
            group="virtual",
            boot=1,
            build="virtual",
            proto_rev=PROTO_REV,
            model=MODEL,
            ranks=1,
            slots=slots,
            pages=pages,
            tails=2 * slots,
            max_gen=0,
            max_step_tokens=16_384,
            max_verify=1,
        )
        self._receive(WORKER, hello)
        self._receive(WORKER, f.Dump(last=True))
        self._beat()

    def _beat(self) -> None:
        for conn in (GATEWAY, WORKER):
            self._receive(conn, f.Heartbeat(0, 0))
        self.after(0.4, self._beat)

    def _receive(self, conn: int, frame: f.Frame) -> None:
        self._handle(Received(conn, f.Envelope(self._attach[conn], frame)))

    def _handle(self, event: Any) -> None:
        for effect in self.core.handle(event, self.now):
            match effect:
                case Reply(reply=reply):
                    assert self._call is not None
                    self._call.refused = None if reply.verdict is f.Verdict.ACCEPTED else reply
                case WakeAt(at_ns=at):
                    self._wake_ns = at
                    self.after(max(0, at - self.now) / S, partial(self._tick, at))
                case Send(conn=conn, envelope=envelope):
                    self._attach[conn] = envelope.attach_id
                    frame = envelope.frame
                    if isinstance(frame, f.StepFrame):
                        self.after(self.delay_ns / S, partial(self._step, frame))
                    elif isinstance(frame, f.TokenFrame):
                        self._tokens(frame)
                    elif isinstance(frame, f.Bye):
                        raise AssertionError(f"the scheduler hung up: {frame.reason}")

    def _tick(self, at: int) -> None:
        if at == self._wake_ns:
            self._handle(Tick())

    def _step(self, frame: f.StepFrame) -> None:
        self._frames.append(frame)
        if not self._busy:
            self._start()

    def _start(self) -> None:
        self._busy = True
        result = self.machine.run(self._frames.popleft(), self.now)

        def end() -> None:
            self.after(self.delay_ns / S, lambda: self._receive(WORKER, result))
            self._busy = False
            if self._frames:
                self._start()

        self.after((result.t_end_ns - self.now) / S, end)

    def _tokens(self, frame: f.TokenFrame) -> None:
        for row, count, finish in zip(frame.rows.tolist(), frame.counts.tolist(), frame.finishes.tolist(), strict=True):
            job = self.jobs[row]
            job.token_ns += [self.now] * count
            if finish != FinishReason.NONE:
                assert finish == FinishReason.LENGTH, frame.errors
                del self.jobs[row]
                if job.on_end is not None:
                    self.after(0.0, partial(job.on_end, job))
