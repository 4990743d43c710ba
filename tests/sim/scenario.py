"""What a seed means: knobs, requests and faults, each drawn from its own generator: shrinking one keeps the others.

A scenario is plain data; `world.run` executes it. Times are virtual milliseconds.
"""

from dataclasses import dataclass, field
from random import Random

from meshkit.types import PAGE_TOKENS, SamplingParams
from scheduler_svc.core.policy import PolicyName
from tests.sim.reference import VOCAB, expected_output

VOCABULARY = range(VOCAB)
FIRST_MS = 60.0
"""From then on requests come: everybody has attached by then."""
BUSY_TURNS = 25
"""An answer takes about so many turns, its prompt and its wait included."""
LONG_DEADLINE_MS = 120_000
"""A deadline that no run may reach: missing it is a hang."""


@dataclass(slots=True, kw_only=True)
class Knobs:
    """Sizes and times of one mesh. The defaults are the tame ones that shrinking goes back to."""

    gateways: int = 1
    workers: int = 1
    ranks: int = 1  # attention-DP ranks of each worker; slots, pages and tails are per rank
    depth: int = 1
    slots: int = 4
    pages: int = 24
    tails: int = 8
    chunk_tokens: int = 1024
    step_ms: int = 10
    delay_ms: float = 1.0
    park: float = 0.0  # chance that a sampling row is parked
    step_error: float = 0.0  # chance that a step fails
    late_ms: int = 0  # for how long frames may still arrive on a stream its owner has closed
    queue_requests: int = 1000
    gateway_grace_ms: int = 3000
    rebind_grace_ms: int = 1000
    orphan_ms: int = 2000
    suspect_ms: int = 1500
    resume_wait_ms: int = 500
    park_ms: int = 4000
    adopt_ids: int = 128
    configured: bool = True  # the scheduler knows its workers' names
    standby: bool = False  # scheduler and grammar service have one: it ends them when they are frozen
    bypass: int = 32
    scan: int = 64
    policy: PolicyName = "fcfs"
    conservativeness: float = 0.0
    grammar_ms: float = 2.0  # of a compile
    grammar_cache: int = 100  # compiled grammars the service keeps
    grammar_trouble: float = 0.0  # chance that a compile breaks or is refused as too many
    grammar_upgrades: bool = False  # the service comes back under another revision
    grammar_wait_ms: int = 20_000
    mask_ring: bool = True  # mask rows lie in shared memory, else they travel inline
    mask_late: float = 0.0  # chance that a mask takes two steps
    row_fault: float = 0.0  # chance that a sampling row fails for good
    leave_early: float = 0.0  # chance that a client leaves while its constrained choice is about to start


@dataclass(slots=True, kw_only=True)
class RequestSpec:
    """One client. Cancel and stop come after so many ids of choice 0, -1 = never."""

    number: int
    at_ms: float
    gateway: int
    prompt: list[int]
    params: SamplingParams
    n: int
    seed: int
    tenant: str
    priority: int
    deadline_ms: int
    cancel_after: int = -1
    stop_after: int = -1
    abort_ms: float = -1.0
    grammar: str = ""  # text of its constraint, empty: none
    thinking: bool = False

    @property
    def request_id(self) -> bytes:
        return self.number.to_bytes(16, "big")


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault: `kind` at `at_ms`, on process `target`; meanings of a and b are the kind's (see world)."""

    kind: str
    at_ms: float
    target: int
    a: float
    b: float


@dataclass(slots=True, kw_only=True)
class Scenario:
    """Everything a run needs beside its generators, which are seeded by `seed` too."""

    seed: int
    knobs: Knobs = field(default_factory=Knobs)
    requests: list[RequestSpec] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def generator(seed: int, concern: str) -> Random:
    """One generator per concern; strings seed independently of the hash seed."""
    return Random(f"{seed}/{concern}")


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    knobs = _knobs(generator(seed, "knobs"))
    workload = generator(seed, "workload")
    shared = [_ids(3 * PAGE_TOKENS, workload) for _ in range(2)]
    turn_ms = _turn_ms(knobs)
    window = min(900.0, workload.choice((2, 10, 40)) * turn_ms)  # how bunched arrivals are
    requests: list[RequestSpec] = []
    for number in range(workload.randint(1, 10)):
        request = _request(number, knobs, shared, window, workload)
        if requests and workload.random() < 0.2:
            _go_on(request, workload.choice(requests), turn_ms, workload)
        requests.append(request)
    busy = Busy(calls_ms=FIRST_MS + window, all_ms=FIRST_MS + window + BUSY_TURNS * turn_ms)
    faults = _faults(busy, generator(seed, "faults"))
    return _constrained(Scenario(seed=seed, knobs=knobs, requests=requests, faults=faults), busy)


def _turn_ms(knobs: Knobs) -> float:
    """About how long one more token takes: a step, and its way to the worker and back."""
    return knobs.step_ms + 2 * knobs.delay_ms


def _ids(n: int, rng: Random) -> list[int]:
    return rng.choices(VOCABULARY, k=n)


def _constrained(scenario: Scenario, busy: "Busy") -> Scenario:
    """Half of all scenarios have a grammar service in use; it draws from generators of its own."""
    rng, knobs = generator(scenario.seed, "grammars"), scenario.knobs
    if rng.random() < 0.5:
        return scenario
    knobs.grammar_ms = rng.choice((1.0, 1.0, 20.0, 300.0))
    knobs.grammar_cache = rng.choice((1, 2, 100))
    knobs.grammar_trouble = rng.choice((0.0, 0.0, 0.0, 0.2))
    knobs.grammar_upgrades = rng.random() < 0.1
    knobs.grammar_wait_ms = rng.choice((400, 3_000, 20_000))
    knobs.mask_ring = rng.random() < 0.7
    knobs.mask_late = rng.choice((0.0, 0.05, 0.3))
    knobs.row_fault = rng.choice((0.0, 0.0, 0.0, 0.01))
    for request in scenario.requests:
        if rng.random() < 0.6:
            request.grammar = rng.choice(GRAMMARS)
            request.thinking = rng.random() < 0.2
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        scenario.faults.append(_fault(rng, rng.choice(GRAMMAR_KINDS), busy))
    knobs.leave_early = rng.choice((0.0, 0.0, 0.3))
    return scenario


def _knobs(rng: Random) -> Knobs:
    step_ms = rng.choice((2, 10, 40, 150))
    return Knobs(
        gateways=rng.randint(1, 2),
        workers=rng.randint(1, 2),
        ranks=rng.choice((1, 1, 1, 2)),
        depth=rng.randint(1, 3),
        slots=rng.randint(1, 8),
        pages=rng.choice((3, 4, 4, 5, 6, 8, 12, 24, 64)),
        tails=rng.choice((1, 2, 4, 8, 8, 16, 16)),
        chunk_tokens=rng.choice((16, 48, 100, 100, 256, 300, 1024, 1024) if step_ms < 40 else (100, 256, 1024)),
        step_ms=step_ms,
        delay_ms=rng.choice((0.2, 1.0, 8.0)),
        park=rng.choice((0.0, 0.0, 0.1, 0.3)),
        step_error=rng.choice((0.0, 0.0, 0.0, 0.01)),
        late_ms=rng.choice((0, 20, 1500, 1500)),
        queue_requests=rng.choice((1000, 1000, 3)),
        gateway_grace_ms=rng.choice((500, 3000)),
        rebind_grace_ms=rng.choice((200, 1000)),
        orphan_ms=rng.choice((300, 2000)),
        suspect_ms=rng.choice((300, 1500)),
        resume_wait_ms=rng.choice((100, 500)),
        park_ms=rng.choice((500, 4000)),
        adopt_ids=rng.choice((0, 2, 128)),
        configured=rng.random() < 0.7,
        standby=rng.random() < 0.3,
        bypass=rng.choice((0, 2, 32)),
        scan=rng.choice((2, 64)),
        policy=rng.choice(("fcfs", "fcfs", "lpm", "priority")),
        conservativeness=rng.choice((0.0, 0.0, 0.5, 1.0)),
    )


def _request(number: int, knobs: Knobs, shared: list[list[int]], window: float, rng: Random) -> RequestSpec:
    turn_ms = _turn_ms(knobs)
    return RequestSpec(
        number=number + 1,
        at_ms=FIRST_MS + rng.uniform(0, window),
        gateway=rng.randrange(knobs.gateways),
        prompt=_prompt(shared, rng),
        params=_params(rng),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        seed=rng.getrandbits(64),
        tenant=rng.choice(("t0", "t1")),
        priority=rng.choice((0, 0, 0, 1)),
        deadline_ms=20 + int(rng.uniform(2, 60) * turn_ms) if rng.random() < 0.08 else LONG_DEADLINE_MS,
        cancel_after=rng.choice((0, rng.randint(1, 8))) if rng.random() < 0.14 else -1,
        stop_after=rng.randint(1, 8) if rng.random() < 0.1 else -1,
        abort_ms=rng.uniform(1, 30) * turn_ms if rng.random() < 0.04 else -1.0,
    )


def _go_on(request: RequestSpec, before: RequestSpec, turn_ms: float, rng: Random) -> None:
    """The next turn of an earlier request: its prompt, its answer and a few ids more, some time later."""
    answer = expected_output(before.prompt, before.seed, 0, before.params).ids  # as if without a constraint
    prompt = before.prompt + answer + _ids(rng.randint(0, 30), rng)
    if len(prompt) < 4 * PAGE_TOKENS:
        request.prompt, request.tenant = prompt, before.tenant
        request.at_ms = before.at_ms + rng.uniform(0, min(1500.0, 60 * turn_ms))


def _prompt(shared: list[list[int]], rng: Random) -> list[int]:
    """Short ones, ones that end near a page boundary, long ones; some share a prefix."""
    near = rng.choice((1, 1, 2)) * PAGE_TOKENS - rng.choice((-3, -1, 0, 1, 2, 5, 8, 12))
    length = rng.choice((rng.randint(1, 40), near, near))
    if rng.random() < 0.2:
        length = rng.randint(1, 3 * PAGE_TOKENS)
    kind = rng.random()
    if kind < 0.5:
        return shared[rng.randrange(2)][:length]
    if kind < 0.75:
        same = rng.choice((1, 1, 2, 2, 3)) * PAGE_TOKENS
        return shared[rng.randrange(2)][:same] + _ids(rng.randint(1, 60), rng)
    return _ids(length, rng)


def _params(rng: Random) -> SamplingParams:
    max_tokens = rng.choice((1, rng.randint(2, 8), rng.randint(2, 16), rng.randint(8, 24), rng.randint(8, 24)))
    penalty = rng.random()
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.15 else 0,
        ignore_eos=rng.random() < 0.3,
        stop_ids=(rng.randrange(2, VOCAB),) if rng.random() < 0.3 else (),
        presence_penalty=0.5 if penalty < 0.12 else 0.0,
        repetition_penalty=1.2 if penalty > 0.9 else 1.0,
        top_logprobs=rng.choice((0, 2)) if rng.random() < 0.25 else -1,
    )


GRAMMARS = ("a", "a", "b", "c", "d", "bad", "big")
GRAMMAR_KINDS = (
    "grammar_crash",
    "grammar_crash",
    "grammar_freeze",
    "grammar_mask_break",
    "grammar_mask_break",
    "grammar_slow",
    "compile_lost",
    "compile_reply_lost",
)
KINDS = (
    "break",
    "half_open",
    "one_way",
    "stall",
    "crash",
    "bye",
    "rolling",
    "freeze",
    "slow",
    "call_lost",
    "call_twice",
    "reply_lost",
)


@dataclass(frozen=True, slots=True)
class Busy:
    """Until when requests come, and until when some are answered if nothing goes wrong."""

    calls_ms: float
    all_ms: float


def _faults(busy: Busy, rng: Random) -> list[Fault]:
    enabled = [kind for kind in KINDS if rng.random() < 0.5]
    count = rng.choice((0, 1, 1, 2, 2, 3, 4)) if enabled else 0
    return [_fault(rng, rng.choice(enabled), busy) for _ in range(count)]


def _fault(rng: Random, kind: str, busy: Busy) -> Fault:
    """Faults of calls come while requests arrive, the others while they are answered; some while others are cured."""
    last_ms = busy.calls_ms if kind.startswith(("call", "reply", "compile")) else busy.all_ms
    if rng.random() < 0.25:
        last_ms = max(last_ms, 1800.0)
    return Fault(kind=kind, at_ms=rng.uniform(50, last_ms), target=rng.randrange(100), a=rng.random(), b=rng.random())
