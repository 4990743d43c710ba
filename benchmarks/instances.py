"""Several model instances behind one address: what choosing by prefix and load is worth, against taking turns.

Instances are the scheduler core with a simulated Flash on an H200, in virtual time; the chooser is the gateway's.
Sets: agents whose turns share their history, questions behind the examples of their task, and strangers, which share
nothing and come at random. A hit is a prompt token that one pool without bounds would have served from its cache;
balance is the work of the busiest instance over the mean. `of two`: two instances at random and the one with most of
the prompt are priced, not all. Options: `--instances`, `--gateways` (the processes of a port, which tell each other
where prompts went; untold: gateways that do not), `--rounds`, `--only NAME`.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._prefix_sets import NAMESPACE, Ids, PrefixMesh, Session, Turn, agents, few_shot, pages_of, random_ids
from benchmarks._virtual import Job, S
from gateway.instances.chooser import Ask, Chooser, Pick
from meshkit import frames as f
from meshkit.pages import page_keys
from meshkit.types import PAGE_TOKENS

TITLE = "several instances: prefix hits and balance, chosen by prefix and load or in turn"
SLICE_S = 0.004  # instances advance in turn by so much
STATUS_S = 1.0
Choose = Callable[[Ask, int], Pick]
Figures = dict[str, float | int | str]


class Place(PrefixMesh):
    """One instance; tells what came out of its cache."""

    def __init__(self, *, slots: int, pages: int, tails: int) -> None:
        super().__init__(slots=slots, pages=pages, tails=tails)
        self.on_first: dict[int, Callable[[int], None]] = {}

    def ask(self, prompt: Ids, tokens: int, first: Callable[[int], None], ended: Callable[[Job], None]) -> None:
        """Send a prompt; `first` gets the cached tokens with the first answer."""
        self._ask(prompt, tokens, ended)
        self.on_first[self._row] = first

    def _tokens(self, frame: f.TokenFrame) -> None:
        for row, cached in zip(frame.rows.tolist(), frame.cached.tolist(), strict=True):
            if (first := self.on_first.pop(row, None)) is not None:
                first(cached)
        super()._tokens(frame)


class Gateways:
    """Choosers; a turn comes to any of them. `told`: they tell each other where prompts went."""

    def __init__(self, places: list[Place], count: int, seed: int, *, told: bool = False, **options: Any) -> None:
        names = [f"instance-{i}" for i in range(len(places))]
        self._places, self._rng = places, Random(seed)
        self._choosers = [Chooser(names, Random(seed + number), **options) for number in range(count)]
        self._owner: dict[int, Chooser] = {}
        self._told = told

    def look(self) -> None:
        for i, place in enumerate(self._places):
            status = place.core.state.status()
            for chooser in self._choosers:
                chooser.told(i, status, True, place.now)

    def choose(self, ask: Ask, now_ns: int) -> Pick:
        chooser = self._rng.choice(self._choosers)
        pick = chooser.choose(ask, now_ns)
        assert pick is not None
        for other in self._choosers:
            if self._told and other is not chooser:
                other.heard(pick.index, ask.keys)
        self._owner[id(pick)] = chooser
        return pick

    def answered(self, pick: Pick, cached: int) -> None:
        self._owner[id(pick)].answered(pick, cached)

    def ended(self, pick: Pick) -> None:
        self._owner.pop(id(pick)).ended(pick, 1)


class InTurn(Gateways):
    """Round robin."""

    _next = 0

    def choose(self, ask: Ask, now_ns: int) -> Pick:
        everyone = range(len(self._places))
        self._next += 1
        pick = self._choosers[0].choose(ask, now_ns, set(everyone) - {self._next % len(everyone)})
        assert pick is not None
        self._owner[id(pick)] = self._choosers[0]
        return pick


@dataclass(slots=True)
class Outcome:
    """What clients and instances saw of a set."""

    reusable: int = 0
    reused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    balance: float = 1.0

    @property
    def share(self) -> float:
        return self.reused / max(1, self.reusable)


class Scene:
    """Sessions on instances behind gateways."""

    def __init__(self, places: list[Place], gateways: Gateways) -> None:
        self.places, self.gateways = places, gateways
        self.out = Outcome()
        self._seen: set[bytes] = set()
        self._open = 0
        self._later: list[tuple[float, Session]] = []

    def run(self, sessions: list[tuple[float, Session]]) -> Outcome:
        """(when it starts, session); returns once all have ended."""
        for at_s, session in sessions:
            self._open += 1
            turns = iter(session.turns)
            self.places[0].after(at_s, partial(self._turn, session, np.empty(0, np.int32), turns))
        look_s = 0.0
        while self._open:
            if look_s <= 0:
                self.gateways.look()
                look_s = STATUS_S
            for place in self.places:
                place.run(SLICE_S)
            look_s -= SLICE_S
        for place in self.places:
            assert not place.core.faults, place.core.faults
        work = [place.machine.tokens for place in self.places]
        self.out.balance = max(work) * len(work) / max(1, sum(work))
        return self.out

    def _turn(self, session: Session, past: Ids, turns: Iterator[Turn]) -> None:
        turn = next(turns, None)
        if turn is None:
            self._open -= 1
            return
        prompt = np.concatenate((past, turn.ids))
        keys = page_keys(prompt, NAMESPACE)
        limit = (len(prompt) - 1) // PAGE_TOKENS
        known = next((i for i, key in enumerate(keys[:limit]) if key not in self._seen), limit)
        self.out.reusable += known * PAGE_TOKENS
        self._seen.update(keys)
        pick = self.gateways.choose(Ask(keys, len(prompt), 1), self.places[0].now)
        place = self.places[pick.index]

        def first(cached: int) -> None:
            self.out.reused += cached
            self.gateways.answered(pick, cached)

        def ended(job: Job) -> None:
            self.gateways.ended(pick)
            self.out.ttft_s.append(job.ttft_s)
            self.out.whole_s.append((job.token_ns[-1] - job.sent_ns) / S)
            answer = np.array([2 + (i + 1) % 1000 for i in range(turn.answer)], np.int32)
            whole = np.concatenate((prompt, answer))
            self._seen.update(page_keys(whole[:-1], NAMESPACE))
            self.places[0].after(session.think_s, partial(self._turn, session, whole, turns))

        place.ask(prompt, turn.answer, first, ended)


def strangers(rng: np.random.Generator, count: int) -> list[Session]:
    """Prompts and answers of all lengths that have nothing in common."""
    lengths = np.minimum(16_000, rng.lognormal(7.0, 1.0, count)).astype(int)
    answers = np.minimum(2_000, rng.lognormal(5.0, 0.8, count)).astype(int)
    return [Session([Turn(random_ids(rng, max(20, int(n))), max(2, int(m)))]) for n, m in zip(lengths, answers)]


def scattered(rng: np.random.Generator, sessions: list[Session], per_s: float) -> list[tuple[float, Session]]:
    """Poisson arrivals."""
    starts = np.cumsum(rng.exponential(1 / per_s, len(sessions)))
    return list(zip(starts.tolist(), sessions, strict=True))


def sets(instances: int, rng: np.random.Generator) -> dict[str, tuple[list[tuple[float, Session]], int, int, int]]:
    """name -> sessions with their starts; slots, pages and tails of each instance."""
    found = {}
    agent = agents(rng, 16 * instances, 10)
    found["agents"] = (scattered(rng, agent, 4.0 * instances), 16, pages_of(agent) * 12 // 10 // instances, 96)
    shots = few_shot(rng, 6 * instances, 30)
    found["fewshot"] = (scattered(rng, shots, 8.0 * instances), 16, pages_of(shots) * 12 // 10 // instances, 48)
    alone = strangers(rng, 150 * instances)
    found["strangers"] = (scattered(rng, alone, 3.0 * instances), 32, 8_000, 96)
    return found


POLICIES: dict[str, tuple[type[Gateways], dict[str, Any]]] = {
    "in turn": (InTurn, {"prefixes": False}),
    "load": (Gateways, {"prefixes": False}),
    "prefix": (Gateways, {"told": True}),
    "prefix of two": (Gateways, {"told": True, "candidates": 2}),
    "prefix untold": (Gateways, {}),
}


def run(args: list[str]) -> Figures:
    parser = argparse.ArgumentParser(prog="python -m benchmarks instances")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args(args)
    table = Table("set", "chosen by", "hits", "balance", "TTFT p50", "TTFT p99", "request mean")
    figures: Figures = {}
    for name in ("agents", "fewshot", "strangers"):
        for policy, (kind, extra) in POLICIES.items():
            if options.only and options.only not in (name, policy):
                continue
            outcomes = []
            for seed in range(options.rounds):
                sessions, slots, pages, tails = sets(options.instances, np.random.default_rng(seed))[name]
                places = [Place(slots=slots, pages=pages, tails=tails) for _ in range(options.instances)]
                outcomes.append(Scene(places, kind(places, options.gateways, seed, **extra)).run(sessions))
            row = _row(outcomes)
            table.add_row(name, policy, *(f"{value:.3f}" for value in row.values()))
            key = f"{name}_{policy}".replace(" ", "_")
            figures |= {f"{key}_{what}": round(value, 4) for what, value in row.items()}
    Console().print(table)
    return figures


def _row(outcomes: list[Outcome]) -> dict[str, float]:
    firsts = np.concatenate([it.ttft_s for it in outcomes])
    return {
        "hits": sum(it.reused for it in outcomes) / max(1, sum(it.reusable for it in outcomes)),
        "balance": float(np.mean([it.balance for it in outcomes])),
        "ttft_p50_s": float(np.percentile(firsts, 50)),
        "ttft_p99_s": float(np.percentile(firsts, 99)),
        "mean_s": float(np.mean(np.concatenate([it.whole_s for it in outcomes]))),
    }
