"""Does one client's load spoil another's service? A huge prompt, a flood of prefills, a tenant with ten times the load.

Virtual time, one H200 by its roofline at 60 %, the scheduler's own core and its default limits at depth 2. The last
part is the demo model on a processor that is too slow for its load: nobody may starve there.
"""

import argparse
import statistics
from itertools import pairwise
from random import Random

from benchmarks._virtual import Job, NanoOnCpu, S, VirtualMesh
from scheduler_svc.core.config import SchedulerLimits

TITLE = "a 900K prompt among short ones, prefill beside decode, light and heavy tenants, a slow machine (virtual time)"
CLIENTS = 64


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


# ---- one long prompt ------------------------------------------------------------------------------------------------


def short_clients(mesh: VirtualMesh, done: list[Job]) -> None:
    """64 clients that ask, read the answer, think, and ask again."""

    def ask() -> None:
        mesh.submit(mesh.rng.randint(256, 1536), mesh.rng.randint(32, 128), on_end=again)

    def again(job: Job) -> None:
        done.append(job)
        mesh.after(mesh.rng.expovariate(1 / 4.0), ask)

    for i in range(CLIENTS):
        mesh.after(i * 0.1, ask)


def long_prompt(seed: int, tokens: int, seconds: float) -> dict[str, float]:
    """Median time to first token of the short ones while the long one is computed, against none."""
    medians, prefill_s = {}, 0.0
    for with_long in (False, True):
        mesh = VirtualMesh(seed)
        done: list[Job] = []
        short_clients(mesh, done)
        mesh.run(30.0)
        begin = mesh.now
        long = mesh.submit(tokens, 16) if with_long else None
        end = begin + int(seconds * S)
        while mesh.now < end and not (long is not None and long.token_ns):
            mesh.run(5.0)
        inside = [job for job in done if begin <= job.sent_ns and job.token_ns[0] <= mesh.now]
        medians[with_long] = statistics.median(job.ttft_s for job in inside)
        print(
            f"  {'with' if with_long else 'without'} it: {len(inside)} short requests, "
            f"TTFT p50 {medians[with_long] * 1e3:.0f} ms, p99 {p99([job.ttft_s for job in inside]) * 1e3:.0f} ms"
        )
        if long is not None:
            (worker,) = mesh.core.state.workers.values()
            left = next((s.total - s.fed for s in worker.running if len(s.req.prompt) == tokens), 0)
            prefill_s = (mesh.now - begin) / S
            print(f"  {tokens - left:,} of its {tokens:,} tokens were computed in {prefill_s:.0f} s")
    return {
        "ttft_ratio_long_prompt": medians[True] / medians[False],
        "ttft_ms_short_alone": medians[False] * 1e3,
        "long_prompt_s": prefill_s,
    }


# ---- prefill beside decode ------------------------------------------------------------------------------------------


def gaps_ms(jobs: list[Job], begin: int, end: int) -> list[float]:
    """Times between successive tokens of these jobs within a span."""
    out = []
    for job in jobs:
        times = [t for t in job.token_ns if begin <= t < end]
        out += [(b - a) / 1e6 for a, b in pairwise(times)]
    return out


def prefill_flood(seed: int, seconds: float) -> dict[str, float]:
    """Inter-token latency of 64 decoding requests, alone and while prompts of 8k tokens always wait."""
    mesh = VirtualMesh(seed)
    jobs = [mesh.submit(2048, 100_000) for _ in range(CLIENTS)]
    mesh.run(20.0)
    begin = mesh.now
    mesh.run(seconds)
    alone = gaps_ms(jobs, begin, mesh.now)
    computed = 0

    def ask(job: Job | None = None) -> None:
        nonlocal computed
        computed += len(job.sub.prompt) if job is not None else 0
        mesh.submit(8192, 1, on_end=ask)

    for _ in range(16):
        ask()
    begin = mesh.now
    mesh.run(seconds)
    beside = gaps_ms(jobs, begin, mesh.now)
    for name, gaps in (("alone", alone), ("beside prefill", beside)):
        print(f"  {name}: ITL p50 {statistics.median(gaps):.1f} ms, p99 {p99(gaps):.1f} ms, max {max(gaps):.1f} ms")
    print(f"  prefill beside 64 decoding: {computed / seconds:,.0f} tokens/s")
    return {
        "itl_p99_ratio_prefill": p99(beside) / p99(alone),
        "itl_p50_ratio_prefill": statistics.median(beside) / statistics.median(alone),
        "prefill_tokens_per_s_beside_decode": computed / seconds,
    }


# ---- two tenants ----------------------------------------------------------------------------------------------------


def tenants(seed: int, seconds: float) -> dict[str, float]:
    """Tokens of a light tenant within the time, beside one that sends ten times as much, against alone."""
    capacity = _capacity(seed, seconds)
    rate = 0.45 * capacity
    tokens = {}
    for heavy in (0.0, 10.0):
        mesh = VirtualMesh(seed, slots=64)
        light, other = _open_loop(mesh, "light", rate), _open_loop(mesh, "heavy", heavy * rate) if heavy else []
        mesh.run(seconds)
        tokens[heavy] = sum(len(job.token_ns) for job in light)
        refused = {
            "light": sum(j.refused is not None for j in light),
            "heavy": sum(j.refused is not None for j in other),
        }
        waits = [job.ttft_s for job in light if job.token_ns]
        print(
            f"  light {'beside heavy' if heavy else 'alone'}: {tokens[heavy]} tokens of {len(light)} requests, "
            f"TTFT p50 {statistics.median(waits):.2f} s; refused: {refused}; "
            f"heavy: {sum(len(job.token_ns) for job in other)} tokens of {len(other)} requests"
        )
    return {"light_tenant_share": tokens[10.0] / tokens[0.0], "capacity_requests_per_s": capacity}


def _capacity(seed: int, seconds: float) -> float:
    """Requests a second when more always wait."""
    mesh = VirtualMesh(seed, slots=64)
    ended: list[Job] = []

    def again(job: Job | None = None) -> None:
        if job is not None:
            ended.append(job)
        mesh.submit(mesh.rng.randint(256, 2048), mesh.rng.randint(32, 192), on_end=again)

    for _ in range(128):
        again()
    mesh.run(seconds)
    return len(ended) / seconds


def _open_loop(mesh: VirtualMesh, tenant: str, rate: float) -> list[Job]:
    """Requests at random times at this rate, whatever becomes of them."""
    jobs: list[Job] = []
    rng = Random(tenant)  # its own: the same requests whoever else is there

    def ask() -> None:
        jobs.append(mesh.submit(rng.randint(256, 2048), rng.randint(32, 192), tenant=tenant))
        mesh.after(rng.expovariate(rate), ask)

    mesh.after(rng.expovariate(rate), ask)
    return jobs


# ---- a slow machine -------------------------------------------------------------------------------------------------

MIX = ((330, 8), (20, 64), (40, 64), *((20, 42),) * 3, (20, 64), (150, 64))  # prompt and answer of the kill matrix
LONGEST = max(prompt for prompt, _ in MIX)


def slow_machine(seed: int, slow: float, streams: int, seconds: float) -> dict[str, float]:
    """Clients that ask again at once, on a machine whose decode steps alone take as long as a step should."""
    limits = SchedulerLimits(depth=1, chunk_tokens=256)
    mesh = VirtualMesh(seed, limits=limits, cost=NanoOnCpu(slow), slots=32, pages=640)
    jobs: list[Job] = []

    def ask(_: Job | None = None) -> None:
        jobs.append(mesh.submit(*MIX[len(jobs) % len(MIX)], on_end=ask))

    for i in range(streams):
        mesh.after(i * 0.05, ask)
    mesh.run(seconds)
    warm = [job for job in jobs if job.sent_ns > seconds / 5 * S]
    waits: dict[bool, list[float]] = {True: [], False: []}
    for job in warm:
        first_ns = job.token_ns[0] if job.token_ns else mesh.now
        waits[len(job.sub.prompt) == LONGEST].append((first_ns - job.sent_ns) / S)
    gaps = gaps_ms(warm, 0, mesh.now)
    for name, long in ((f"prompts of {LONGEST} tokens", True), ("shorter ones", False)):
        p50 = statistics.median(waits[long])
        print(f"  {slow:.0f}x, {streams} streams: {name}: TTFT p50 {p50:.1f} s, p99 {p99(waits[long]):.1f} s")
    print(f"  {slow:.0f}x, {streams} streams: ITL p50 {statistics.median(gaps):.0f} ms, p99 {p99(gaps):.0f} ms")
    return {
        f"slow{slow:.0f}_streams{streams}_ttft_p99_s_long": p99(waits[True]),
        f"slow{slow:.0f}_streams{streams}_ttft_p99_s_short": p99(waits[False]),
        f"slow{slow:.0f}_streams{streams}_itl_p99_ms": p99(gaps),
    }


def run(args: list[str]) -> dict[str, float | int | str]:
    """All four, each printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fairness", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual seconds of each part")
    parser.add_argument("--long-tokens", type=int, default=900_000)
    parser.add_argument("--long-seconds", type=float, default=600.0, help="at most, of the long prompt's part")
    options = parser.parse_args(args)
    metrics: dict[str, float | int | str] = {}
    print(f"one prompt of {options.long_tokens:,} tokens among {CLIENTS} clients with short ones")
    metrics |= long_prompt(options.seed, options.long_tokens, options.long_seconds)
    print(f"{CLIENTS} requests decode, prompts of 8k flood in")
    metrics |= prefill_flood(options.seed, options.seconds)
    print("two tenants, one sends ten times the other's load")
    metrics |= tenants(options.seed, options.seconds)
    print("the demo model on a busy processor: so many times slower, so many clients that ask again at once")
    for slow, streams in ((1.0, 20), (4.0, 20), (4.0, 32), (8.0, 32)):
        metrics |= slow_machine(options.seed, slow, streams, 5 * options.seconds)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in metrics.items()}
