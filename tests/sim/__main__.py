"""Command line: `python -m tests.sim --seeds 5000 --jobs 2`, `--seed S` for one run, `--mutants` for the planted bugs.

Prints the seed of every failure first, then a shrunk scenario and the end of its trace. Exit code 1 if anything failed.
SIGUSR1 adds a process: whoever started this beside something else says so when the other cores are free.
"""

import argparse
import os
import secrets
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path

from tests.sim.runner import Tally, run
from tests.sim.saved import save
from tests.sim.scenario import Knobs, Scenario, draw
from tests.sim.score import score
from tests.sim.shrink import Failure, attempt, shrink

INTERESTING = (
    "preemptions",
    "prefix_hits",
    "replays",
    "resumed_from_tail",
    "rebinds",
    "slots_adopted",
    "slots_not_adopted",
    "orphans_expired",
    "workers_lost",
    "gateways_lost",
    "step_errors",
    "stale_row",
    "stale_conn",
    "result_without_scheduler",
    "requests_poisoned",
    "constrained_completed",
    "grammar_boots",
    "grammars_later",
    "grammars_lost",
    "rows_failed",
)


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds")
    parser.add_argument("--start", type=int, default=-1, help="first seed (default: fresh)")
    parser.add_argument("--seed", type=int, default=-1, help="run one seed and show its trace if it fails")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--trace", type=int, default=60, help="lines of trace shown for a failure")
    parser.add_argument("--mutants", action="store_true", help="plant each known bug and print which ones are found")
    parser.add_argument("--cpu-s", type=float, default=120.0, help="processor seconds to look for one planted bug")
    parser.add_argument("--write", action="store_true", help="keep the seeds that show planted bugs, for the test lane")
    parser.add_argument("--only", default="", help="of the planted bugs, those whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write the score of the planted bugs")
    parser.add_argument("--save", type=Path, help="where to write the shrunk scenario of a failure")
    options = parser.parse_args()
    if options.mutants:
        return score(options.only, options.cpu_s, options.jobs, write=options.write, file=options.json)
    if options.seed >= 0:
        return _one(options)
    return _many(options)


def _many(options: argparse.Namespace) -> int:
    first = options.start if options.start >= 0 else secrets.randbits(40)
    print(f"first seed {first}", flush=True)
    jobs: list[int] = [options.jobs]

    def one_more(*_: object) -> None:
        jobs[0] = min(jobs[0] + 1, os.cpu_count() or 1)

    signal.signal(signal.SIGUSR1, one_more)
    started, shown = time.monotonic(), 0.0
    total, told = Tally(), 0
    for total in run(first, options.seeds, lambda: jobs[0], options.minutes, most_jobs=os.cpu_count() or 1):
        for seed, failure in list(total.failures.items())[told:]:
            print(f"seed {seed} failed: {failure.message}", flush=True)
        told = len(total.failures)
        if time.monotonic() - shown > 15:
            shown = time.monotonic()
            print(f"  {total.seeds} seeds, {len(total.failures)} failed", flush=True)
    _report(total, time.monotonic() - started)
    if total.failures:
        seed, failure = next(iter(total.failures.items()))
        _explain(draw(seed), failure, options)
    return 1 if total.failures else 0


def _report(total: Tally, seconds: float) -> None:
    print(
        f"{total.seeds} seeds in {seconds:.1f} s = {total.seeds / seconds * 60:,.0f} seeds/minute; "
        f"{total.events:,} events ({total.events / seconds:,.0f}/s), {total.frames:,} frames, {total.tokens:,} tokens, "
        f"{total.completed:,} choices completed, {total.faults:,} faults, {total.virtual_s / 3600:.2f} virtual hours; "
        f"{len(total.failures)} failed"
    )
    print("  " + ", ".join(f"{name} {total.counts[name]:,}" for name in INTERESTING))


def _one(options: argparse.Namespace) -> int:
    seed = options.seed
    print(f"seed {seed}", flush=True)
    world, failure = attempt(draw(seed))
    if failure is None:
        print(f"held: {world.events} events, {world.checker.tokens} tokens, {world.now_ns / 1e9:.2f} virtual s")
        return 0
    _explain(draw(seed), failure, options)
    return 1


def _explain(scenario: Scenario, failure: Failure, options: argparse.Namespace) -> None:
    """Shrink and show."""
    lines: int = options.trace
    print(f"seed {scenario.seed} failed: {failure.message}\nshrinking ...", flush=True)
    small = shrink(scenario, failure.rule)
    if options.save is not None:
        save(small, options.save)
        print(f"written to {options.save}")
    trace: list[str] = []
    _, failure_now = attempt(small, trace)
    tame = Knobs()
    knobs = {f.name: getattr(small.knobs, f.name) for f in fields(Knobs)}
    print("knobs:", {name: value for name, value in knobs.items() if value != getattr(tame, name)})
    for fault in small.faults:
        print(" ", fault)
    for request in small.requests:
        print(
            f"  request {request.number}: at {request.at_ms:.1f} ms, {len(request.prompt)} prompt ids, n {request.n}, "
            f"deadline {request.deadline_ms} ms, cancel after {request.cancel_after}, stop after {request.stop_after}, "
            f"{request.params}"
        )
    print(f"trace ({len(trace)} lines, the last {lines}):")
    for line in trace[-lines:]:
        print(line[:240])
    print(failure_now.message if failure_now is not None else "the shrunk scenario no longer fails")


if __name__ == "__main__":
    sys.exit(main())
