"""What all faults of a run showed, as plain values: kept in a file after every few faults, and gone on from.

Figures and tables are made of these values alone, so a run that was cut short has the same ones as a whole one.
"""

import itertools
import json
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks._kill_load import KINDS, Run
from benchmarks._kill_parts import AT_ONCE_S, Part, Verdict, pause, quantile

STORES: Final = "pages and journals live in processes' memory: there is no store that could be corrupt or full"

Metrics = dict[str, float | int | str]


@dataclass(slots=True)
class Fault:
    """One fault. The lists have an entry for each stream that was past its first token and went on."""

    part: str
    what: str
    in_flight: int
    phases: dict[str, int]
    whole_s: float  # until every stream had gone on and every process was back
    detected_s: float = -1.0
    took_s: float = -1.0
    pauses: list[float] = field(default_factory=list)  # longest of each until then, in seconds
    resumes: list[float] = field(default_factory=list)  # the pause that began with the fault
    recoveries: list[float] = field(default_factory=list)  # that, less what the stream's prefill takes under this load


@dataclass(slots=True)
class Outcome:
    """Everything so far."""

    faults: list[Fault] = field(default_factory=list)
    calm: dict[str, list[float]] = field(default_factory=dict)  # by part: longest pauses before the first fault
    seconds: dict[str, float] = field(default_factory=dict)  # by part
    ended: list[str] = field(default_factory=list)  # parts that are through
    requests: int = 0
    tokens: int = 0
    lost: int = 0
    doubled: int = 0
    other: int = 0
    logprobs: int = 0
    text: int = 0
    clients_of_killed_gateways: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # why faults were not followed to their end
    cannot_happen: dict[str, int] = field(default_factory=dict)
    tracebacks: int = 0

    def add(self, part: Part, verdict: Verdict) -> None:
        """A part, or a piece of one."""
        first = _first_tokens(part.runs)
        for hurt in part.hurts:
            fault = Fault(part.name, hurt.what, len(hurt.runs), dict(hurt.phases), round(hurt.over - hurt.at, 3))
            fault.detected_s, fault.took_s = round(hurt.detected_s, 3), round(hurt.took_s, 3)
            for run in hurt.runs:
                if run.gateway == hurt.deadly_for or not run.marks or run.marks[0] >= hurt.at:
                    continue
                whole = pause(run, hurt.at, hurt.over)
                if whole is not None:
                    at_once = resume(run, hurt.at, hurt.over)
                    fault.pauses.append(round(whole, 3))
                    fault.resumes.append(round(at_once, 3))
                    fault.recoveries.append(round(max(0.0, at_once - first.get(run.asked.name, 0.0)), 3))
            self.faults.append(fault)
        self.calm.setdefault(part.name, []).extend(round(length, 3) for length in part.calm)
        self.requests += verdict.requests
        self.tokens += verdict.tokens
        self.clients_of_killed_gateways += verdict.clients_of_killed_gateways
        self.refused += len(verdict.refused)
        self.errors += verdict.errors
        self.different += verdict.different
        for name in ("lost", "doubled", "other", "logprobs", "text"):
            setattr(self, name, getattr(self, name) + getattr(verdict.difference, name))

    def blame(self, faults: Mapping[str, int], tracebacks: int) -> None:
        """What the services' logs had."""
        self.cannot_happen = dict(Counter(self.cannot_happen) + Counter(faults))
        self.tracebacks += tracebacks

    def of(self, part: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.part == part]

    def save(self, file: Path) -> None:
        """Whole or not at all."""
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.rename(file)

    @classmethod
    def load(cls, file: Path) -> "Outcome":
        values = json.loads(file.read_text())
        return cls(**values | {"faults": [Fault(**fault) for fault in values["faults"]]})


def resume(run: Run, at: float, until: float) -> float:
    """The longest time without a token that began with a fault, or within a second of it: tokens were on their way."""
    marks = [at, *(mark for mark in run.marks if at < mark < until)]
    return max((b - a for a, b in itertools.pairwise(marks) if a - at <= AT_ONCE_S), default=0.0)


def _first_tokens(runs: Sequence[Run]) -> dict[str, float]:
    """Median time to the first token of each request of the catalogue, in seconds: mostly those met no fault."""
    waits: dict[str, list[float]] = {}
    for run in runs:
        if run.marks:
            waits.setdefault(run.asked.name, []).append(run.marks[0] - run.started)
    return {name: statistics.median(values) for name, values in waits.items()}


def _flat(faults: Sequence[Fault], name: str) -> list[float]:
    return [value for fault in faults for value in getattr(fault, name)]


def figures(outcome: Outcome, services: Sequence[str]) -> Metrics:
    """Of each part, then of all."""
    found: Metrics = {}
    for part in dict.fromkeys(fault.part for fault in outcome.faults):
        faults = outcome.of(part)
        found |= {
            f"{part}_faults": len(faults),
            f"{part}_in_flight_median": statistics.median(fault.in_flight for fault in faults),
            f"{part}_in_flight_least": min(fault.in_flight for fault in faults),
            f"{part}_invalid": int(not any(fault.in_flight for fault in faults)),
            f"{part}_pause_p99_s_undisturbed": round(quantile(outcome.calm.get(part, []), 0.99), 3),
        }
        for what in dict.fromkeys(fault.what for fault in faults):
            found |= _figures_of(part, what, [fault for fault in faults if fault.what == what], services)
    return found | {
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "tokens_lost": outcome.lost,
        "tokens_doubled": outcome.doubled,
        "ids_different": outcome.other,
        "logprobs_different": outcome.logprobs,
        "texts_different": outcome.text,
        "client_errors": len(outcome.errors),
        "refused_with_retry_after": outcome.refused,
        "clients_of_killed_gateways": outcome.clients_of_killed_gateways,
        "not_followed": len(outcome.broken),
        "cannot_happen": sum(outcome.cannot_happen.values()),
        "tracebacks": outcome.tracebacks,
        "stores": STORES,
        "load_average": os.getloadavg()[0],
    }


def _figures_of(part: str, what: str, faults: Sequence[Fault], services: Sequence[str]) -> Metrics:
    name = what.replace(" ", "_").replace("-", "_")
    found: Metrics = {}
    if what in services:
        met = Counter(phase for fault in faults for phase in fault.phases)
        found[f"kills_{name}"] = len(faults)
        found[f"kills_{name}_least_phase"] = min(met[kind] for kind in KINDS)
        found[f"whole_s_{name}_median"] = round(statistics.median(fault.whole_s for fault in faults), 2)
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            found[f"resume_{label}_s_{name}"] = round(quantile(_flat(faults, "resumes"), share), 3)
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            found[f"resume_less_prefill_{label}_s_{name}"] = round(quantile(_flat(faults, "recoveries"), share), 3)
    found[f"pause_max_s_{name}"] = round(max(_flat(faults, "pauses"), default=-1.0), 3)
    if part == "freezes":
        found[f"detected_s_{name}"] = round(max(fault.detected_s for fault in faults), 3)
    if any(fault.took_s >= 0 for fault in faults):
        found[f"left_after_s_{name}"] = round(max(fault.took_s for fault in faults), 2)
    return found


def show(console: Console, outcome: Outcome) -> None:
    """A table for each part, one row per kind of fault, and what went wrong in words."""
    for part in dict.fromkeys(fault.part for fault in outcome.faults):
        phases = KINDS if part in ("kills", "quick") else ()
        columns = ("resume p50 s", "p99", "less prefill p99", "pause max", "whole s", "seen / left s")
        table = Table("fault", "times", "in flight", *phases, *columns)
        table.title = f"{part}: phases are the number of faults that met at least one request in it"
        for what in dict.fromkeys(fault.what for fault in outcome.of(part)):
            faults = [fault for fault in outcome.of(part) if fault.what == what]
            met = Counter(phase for fault in faults for phase in fault.phases)
            resumes, recoveries = _flat(faults, "resumes"), _flat(faults, "recoveries")
            seen = max(max(fault.detected_s, fault.took_s) for fault in faults)
            table.add_row(
                what,
                str(len(faults)),
                f"{statistics.median(fault.in_flight for fault in faults):.0f}",
                *(str(met[kind]) for kind in phases),
                *(f"{quantile(resumes, share):.2f}" for share in (0.5, 0.99)),
                f"{quantile(recoveries, 0.99):.2f}",
                f"{max(_flat(faults, 'pauses'), default=-1.0):.2f}",
                f"{statistics.median(fault.whole_s for fault in faults):.1f}",
                f"{seen:.2f}" if seen >= 0 else "",
            )
        console.print(table)
    console.print(
        f"{outcome.requests} requests, {outcome.tokens} tokens: {outcome.lost} lost, {outcome.doubled} doubled, "
        f"{outcome.other} different, {outcome.logprobs} log-probabilities and {outcome.text} texts differ, "
        f"{len(outcome.errors)} errors, {outcome.refused} refused with Retry-After, "
        f"{outcome.clients_of_killed_gateways} clients of a killed gateway"
    )
    console.print(STORES)
    for line in [*outcome.errors[:8], *outcome.different[:8], *outcome.broken[:8]]:
        console.print(f"[red]  {line}", markup=True, highlight=False)
    if outcome.cannot_happen:
        console.print("[red]what cannot happen:", outcome.cannot_happen)
