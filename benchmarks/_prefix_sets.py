"""Sets of prompts that share prefixes, served by the scheduler core and a worker in virtual time.

What of a prompt could have been reused is counted against a pool without bounds that has a tail at every page: all
pages of all prompts sent before and of all answers ended before. No token values matter, so the worker invents them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from benchmarks._virtual import GATEWAY, MODEL, VOCAB, WORKER, Job, Machine, VirtualMesh
from meshkit import frames as f
from meshkit.core import Called, Opened
from meshkit.pages import namespace_key, page_keys
from meshkit.types import PAGE_TOKENS, PROTO_REV, RequestId, SamplingParams
from scheduler_svc.core.config import SchedulerLimits
from worker_svc.sim.cost import FlashOnH200

LAYERS = 43
NAMESPACE = namespace_key("bench", "", "virtual", "virtual")
Ids = NDArray[np.int32]


@dataclass(slots=True)
class Turn:
    """One request of a session: so many new ids after all that came before, and so many ids of answer."""

    ids: Ids
    answer: int


@dataclass(slots=True)
class Session:
    """Turns one after another; each prompt is everything before it and the turn's ids."""

    turns: list[Turn]
    think_s: float = 0.0


@dataclass(slots=True)
class Served:
    """What came of a set. Tokens; `windows` is what plain LRU of as many windows would have reused."""

    reusable: int = 0
    reused: int = 0
    windows: int = 0
    prompts: int = 0
    requests: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.reused / max(1, self.reusable)


class PrefixMachine(Machine):
    """Also refreshes spare tails at page boundaries, as a worker does."""

    def __init__(self, cost: FlashOnH200, rng: Random) -> None:
        super().__init__(cost, rng)
        self.spares: dict[int, int] = {}

    def run(self, frame: f.StepFrame, start_ns: int) -> f.ResultFrame:
        for free in frame.frees:
            self.spares.pop(free.slot, None)
        gone = {tail.tail for tail in frame.publish_tails}
        self.spares = {slot: tail for slot, tail in self.spares.items() if tail not in gone}
        for spare in frame.spares:
            self.spares[spare.slot] = spare.tail
        samples = dict(zip(frame.chunk_rows.tolist(), frame.chunk_samples.tolist(), strict=True))
        numbers = frame.slots.tolist()
        starts = {init.slot: init.start for init in frame.inits}
        before = [starts[n] if n in starts else self.slots[n].length for n in numbers]
        result = super().run(frame, start_ns)
        rows, positions = [], []
        for i, number in enumerate(numbers):
            sure = self.slots[number].length - samples.get(i, 0)
            pos = sure // PAGE_TOKENS * PAGE_TOKENS
            if number in self.spares and pos > before[i] and not (self.slots[number].finished and i not in samples):
                rows.append(i)
                positions.append(pos)
        return replace(result, spare_rows=np.array(rows, np.int32), spare_positions=np.array(positions, np.int32))


class PrefixMesh(VirtualMesh):
    """A mesh whose clients are sessions."""

    def __init__(self, *, slots: int, pages: int, tails: int) -> None:
        self.tails = tails
        limits = SchedulerLimits(depth=2, chunk_tokens=8192)
        super().__init__(limits=limits, slots=slots, pages=pages)
        self.machine = PrefixMachine(FlashOnH200(), Random(3))
        self.served = Served()
        self.seen: dict[bytes, None] = {}
        self.open = 0
        self.started = 0
        self._windows: OrderedDict[bytes, None] = OrderedDict()

    def _join(self, slots: int, pages: int) -> None:
        self._handle(Opened(GATEWAY, "gateway"))
        self._receive(GATEWAY, f.GatewayHello("virtual", 1, "virtual", PROTO_REV))
        self._handle(Opened(WORKER, "worker"))
        hello = f.WorkerHello(
            group="virtual",
            boot=1,
            build="virtual",
            proto_rev=PROTO_REV,
            model=replace(MODEL, layers=LAYERS),
            ranks=1,
            slots=slots,
            pages=pages,
            tails=self.tails,
            max_gen=0,
            max_step_tokens=16_384,
            max_verify=1,
        )
        self._receive(WORKER, hello)
        self._receive(WORKER, f.Dump(last=True))
        self._beat()

    def play(self, session: Session, on_end: Callable[[], None] | None = None) -> None:
        """Start a session now; its turns follow one another."""
        self.open += 1
        self.started += 1
        turns = iter(session.turns)
        self._turn(session, np.empty(0, np.int32), turns, on_end)

    def _turn(self, session: Session, past: Ids, turns: Iterator[Turn], on_end: Callable[[], None] | None) -> None:
        turn = next(turns, None)
        if turn is None:
            self.open -= 1
            if on_end is not None:
                on_end()
            return
        prompt = np.concatenate((past, turn.ids))

        def ended(job: Job) -> None:
            answer = np.array([2 + (i + 1) % 1000 for i in range(turn.answer)], np.int32)
            whole = np.concatenate((prompt, answer))
            self.seen.update(dict.fromkeys(page_keys(whole[:-1], NAMESPACE)))
            self._window(page_keys(whole[:-1], NAMESPACE))
            self.after(session.think_s, lambda: self._turn(session, whole, turns, on_end))

        self._ask(prompt, turn.answer, ended)

    def _ask(self, prompt: Ids, max_tokens: int, on_end: Callable[[Job], None]) -> None:
        keys = page_keys(prompt, NAMESPACE)
        limit = (len(prompt) - 1) // PAGE_TOKENS
        known = next((i for i, key in enumerate(keys[:limit]) if key not in self.seen), limit)
        served = self.served
        served.requests += 1
        served.prompts += len(prompt)
        served.reusable += known * PAGE_TOKENS
        live = [i + 1 for i, key in enumerate(keys[:known]) if key in self._windows]
        served.windows += live[-1] * PAGE_TOKENS if live else 0
        self.seen.update(dict.fromkeys(keys))
        self._window(keys)
        self._row += 1
        sub = f.Submit(
            attach_id=self._attach[GATEWAY],
            request_id=RequestId(self._row.to_bytes(16, "big")),
            attempt=1,
            choices=(f.SubmitChoice(0, self._row, 1, ()),),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            seed=self._row,
            remaining_ms=3_600_000,
            prompt=prompt,
            page_keys=tuple(keys),
            namespace=NAMESPACE,
            tenant="bench",
        )
        job = self._call = Job(sub, self.now, on_end=on_end)
        self.jobs[self._row] = job
        self._handle(Called(self._row, sub))
        assert job.refused is None, job.refused

    def _window(self, keys: list[bytes]) -> None:
        """Plain LRU: every page a request passes leaves its window, the oldest go."""
        for key in keys[-self.tails :]:
            self._windows[key] = None
            self._windows.move_to_end(key)
        while len(self._windows) > self.tails:
            self._windows.popitem(last=False)

    def _tokens(self, frame: f.TokenFrame) -> None:
        for row, base, cached in zip(frame.rows.tolist(), frame.bases.tolist(), frame.cached.tolist(), strict=True):
            if base == 0 and row in self.jobs:
                self.served.reused += cached
        super()._tokens(frame)

    def finish(self) -> Served:
        """Run until all sessions have ended."""
        while self.open:
            self.run(1.0)
        assert not self.core.faults, self.core.faults
        self.served.counters = dict(self.core.counters)
        return self.served


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(2, VOCAB, count, dtype=np.int32)


def pages_of(sessions: list[Session]) -> int:
    """Distinct full pages of everything that is ever fed."""
    keys: dict[bytes, None] = {}
    for session in sessions:
        whole = np.empty(0, np.int32)
        for turn in session.turns:
            answer = np.array([2 + (i + 1) % 1000 for i in range(turn.answer)], np.int32)
            whole = np.concatenate((whole, turn.ids, answer))
        keys.update(dict.fromkeys(page_keys(whole, NAMESPACE)))
    return len(keys)


def two_sessions(rng: np.random.Generator, tokens: int = 500_000, turns: int = 12) -> list[Session]:
    """Two long sessions; whoever plays them lets their turns alternate."""
    return [
        Session(
            [
                Turn(random_ids(rng, tokens if turn == 0 else int(rng.integers(300, 4000))), int(rng.integers(50, 600)))
                for turn in range(turns)
            ],
            think_s=30.0,
        )
        for _ in range(2)
    ]


def agents(rng: np.random.Generator, count: int = 48, turns: int = 30) -> list[Session]:
    """Agents with one 8k system prompt: tool output comes in, a short call goes out."""
    system = random_ids(rng, 8192 - 100)

    def turn(least: int, before: Ids | None = None) -> Turn:
        ids = random_ids(rng, int(rng.integers(least, 1500)))
        return Turn(ids if before is None else np.concatenate((before, ids)), int(rng.integers(20, 160)))

    return [
        Session([turn(100, system), *(turn(50) for _ in range(turns - 1))], think_s=float(rng.uniform(0.5, 3.0)))
        for _ in range(count)
    ]


def few_shot(rng: np.random.Generator, tasks: int = 8, questions: int = 60) -> list[Session]:
    """Questions of several tasks, each behind its task's examples, as sessions of one turn."""
    examples = [random_ids(rng, int(rng.integers(4000, 9000))) for _ in range(tasks)]
    out = [
        Session([Turn(np.concatenate((shots, random_ids(rng, int(rng.integers(30, 300))))), int(rng.integers(8, 40)))])
        for shots in examples
        for _ in range(questions)
    ]
    return [out[i] for i in rng.permutation(len(out)).tolist()]
