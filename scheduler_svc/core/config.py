"""Limits and times of the scheduler core: one frozen value, with the mesh's documented defaults.

The shell fills it from the configuration file; the simulator draws small ones. Times are in milliseconds.
"""

from dataclasses import dataclass

from scheduler_svc.core.policy import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the core may hold and how long it waits for others."""

    depth: int = 1  # step frames in a worker's hands at once, 1..3
    chunk_tokens: int = 2048  # most tokens of one step frame (a worker's max_step_tokens also binds)
    workers: tuple[str, ...] = ()  # names of the worker groups this instance is configured with
    build: str = ""

    queue_requests: int = 4096  # waiting choices
    queue_bytes: int = 1 << 30  # of waiting prompts and resumed ids
    max_choices: int = 128
    bypass: int = 32  # admissions that may pass one waiting choice whose KV does not fit yet
    scan: int = 64  # waiting choices looked at per frame
    policy: PolicyName = "fcfs"
    conservativeness: float = 0.0  # share of the expected output for which admission keeps pages free, 0..1
    quantum: int = 1024  # tokens a waiting tenant earns per round
    tenant_choices: int = 0  # of one key, waiting and running; 0 = no limit
    tenant_queue_bytes: int = 0  # of one key's waiting prompts; 0 = no limit
    first_token_ms: int = 600_000  # a request that would wait longer for its first token is refused

    itl_factor: float = 2.0  # a step with prefill takes at most so many times its decode rows alone, ...
    prefill_floor: float = (
        1.5  # ... or so many times what a chunk costs beside its tokens: 1.5 is a third efficient, ...
    )
    itl_floor_ms: int = 20  # ... or this long: nobody reads faster
    step_ms: int = 500  # no chunk makes a step longer, unless a prefill is late
    prefill_share: float = 0.125  # of a step's prefill tokens for the oldest prefill, however long it is, ...
    late_share: float = 0.5  # ... and when it is late: when it has waited longer than that share should have taken
    late_ms: int = 2_000  # nobody is late before
    prefix_cache: bool = True  # share pages between requests
    tail_windows: int = 0  # tails saved inside a prompt beside its end and branches, 0 = one every 32k tokens

    heartbeat_ms: int = 500
    dead_ms: int = 2_000  # a peer that says nothing for so long is dead
    step_deadline_ms: int = 1_000  # a step may always take this long, ...
    step_deadline_factor: int = 10  # ... or this multiple of its predicted time
    warm_steps: int = 3  # steps before the prediction is believed
    warm_deadline_ms: int = 60_000  # deadline of a step until then
    lost_frame_ms: int = 10_000  # an idle worker that never answered a frame for so long has lost it

    resume_wait_ms: int = 1_000  # after start: resubmitted requests wait so long for the workers' dumps
    no_worker_grace_ms: int = 30_000  # after start: requests may wait for a first worker
    orphan_ms: int = 5_000  # a dumped slot waits so long for its request
    grammar: bool = False  # there is a grammar service: constrained requests are served
    grammar_bytes: int = 1 << 20  # longest source of a grammar
    compile_ms: int = 10_000  # deadline of one compile
    grammar_wait_ms: int = 20_000  # a new request waits so long for its grammar, tries included
    refresh_ms: int = 10_000  # a grammar that was asked for longer ago is asked for again when a slot will need it, ...
    refresh_parked_ms: int = 1_000  # ... and after so long when a row waits for its masks

    gateway_grace_ms: int = 30_000  # requests of a vanished gateway live on so long
    rebind_grace_ms: int = 5_000  # the same once that gateway is back and has not resubmitted them
    suspect_ms: int = 5_000  # a lost worker that is not back by then has crashed
    tombstone_ms: int = 60_000
    tombstones: int = 65_536
    status_ms: int = 1_000
    tick_ms: int = 250  # grain of all checks but request deadlines

    poison_kills: int = 2  # worker crashes a request may have been running at
    adopt_ids: int = 128  # ids a slot may be ahead of its journal and still be adopted
    recount_steps: int = 1_000

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 3:
            raise ValueError(f"depth: {self.depth} is not in 1..3; use 1 unless round trips are longer than steps")
        for name in ("conservativeness", "prefill_floor", "itl_floor_ms", "tenant_choices", "tenant_queue_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative; use 0 to do without")
        if self.itl_factor <= 1:
            raise ValueError(f"itl_factor: {self.itl_factor} leaves no time for prefill; use a number above 1")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} is not positive; 2048 suits GPUs, 256 a CPU")
