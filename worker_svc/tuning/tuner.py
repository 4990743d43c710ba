"""Times the candidates of every choice over a hollow model, and picks. What wins is in force for the choices behind it.

A choice whose backends are not both there is left out, and so is one without a size that the model's steps have.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from meshkit.errors import GpuError
from worker_svc import tuning
from worker_svc.ops import registry
from worker_svc.ops.bf16_gemm import DEEP_ROWS
from worker_svc.ops.bf16_gemm import SKINNY_ROWS as BF16_SKINNY_ROWS
from worker_svc.ops.fp8_gemm import PARTS_ROWS
from worker_svc.ops.fp8_gemm import SKINNY_ROWS as FP8_SKINNY_ROWS
from worker_svc.tuning import Value
from worker_svc.tuning.cases import Case, Cases
from worker_svc.tuning.choices import CHOICES, Cut, Options
from worker_svc.tuning.chooser import LOST, Point, Times, Verdict, by_cut, choose, total
from worker_svc.tuning.file import TunedChoice
from worker_svc.tuning.timing import Timer, race

NEEDS: Mapping[str, Mapping[str, str]] = {  # backends between which, or of which, something is chosen
    "hyper_boundary": {"hyper_boundary": "triton"},
    "fp8_gemm": {"fp8_gemm": "deep_gemm", "skinny_gemm": "triton"},
    "bf16_gemm.deep_rows": {"bf16_gemm": "deep_gemm"},
    "bf16_gemm.skinny_rows": {"skinny_gemm": "triton"},
    "sparse_attention": {"paged_attention": "triton"},
    "attention": {"paged_attention": "triton"},
    "fp4_experts": {"experts": "humming", "large_experts": "nvrtc"},
}
BESIDE: Mapping[str, Mapping[str, Value]] = {  # in force while a choice is timed: that its program runs at all sizes
    "bf16_gemm.deep_rows": {"bf16_gemm.skinny_rows": 0},
    "sparse_attention.tile_few": {"attention.joined_rows": 64, "sparse_attention.few_tokens": 64},
    "sparse_attention.tile_many": {"attention.joined_rows": 64, "sparse_attention.few_tokens": 0},
    "sparse_attention.few_tokens": {"attention.joined_rows": 64},
}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Found:
    """Of one choice: what was timed under each label, the same by candidate, and the verdict."""

    name: str
    builtin: Value
    verdict: Verdict
    times: Mapping[Value, Times]
    timed: dict[str, dict[Point, float]] = field(default_factory=dict)

    def line(self) -> str:
        """For people: microseconds of all sizes together by candidate, the winner, its gain."""
        base = self.times[self.builtin]
        sums = {value: total(base, own) for value, own in self.times.items()}
        each = ", ".join(f"{shown(v)} {f'{s:.0f}' if math.isfinite(s) else 'lost'}" for v, s in sums.items())
        won, gain = shown(self.verdict.value), self.verdict.gain
        kept = self.verdict.value == self.builtin
        return f"{self.name}: {each} us -> {won} " + ("(built in)" if kept else f"({gain:.2f} x as fast)")

    def choice(self) -> TunedChoice:
        """For the file."""
        micros = {
            label: {f"{point.size} {point.what}": _told(micros) for point, micros in times.items()}
            for label, times in self.timed.items()
        }
        return TunedChoice(self.verdict.value, self.builtin, round(self.verdict.gain, 4), micros)


def tune(cases: Cases, timer: Timer, say: Callable[[str], None]) -> dict[str, TunedChoice]:
    """Every choice of this model on this device; `say` gets a line for each. Leaves the values in use as they were.

    GpuError if the device is lost.
    """
    done: dict[str, TunedChoice] = {}
    won: dict[str, Value] = {}
    for number, name in enumerate(CHOICES, 1):
        began = time.perf_counter()
        lacking = _lacking(name)
        if lacking:
            say(f"{name}: not timed, {lacking}")
            continue
        log.info("tuning %d of %d: %s, the %s", number, len(CHOICES), name, CHOICES[name].what)
        try:
            with torch.inference_mode(), tuning.trial(won | dict(BESIDE.get(name, {}))):
                found = _tune_one(name, cases, timer)
        except Exception as error:  # inputs that do not fit, most likely: the other choices are none the worse for it
            log.exception("%s cannot be timed", name)
            say(f"{name}: not timed, {type(error).__name__}: {str(error)[:200]}")
            continue
        finally:
            _free(name)
        if found is None:
            say(f"{name}: not timed, no step of this model has such a size")
            continue
        say(found.line())
        done[name] = found.choice()
        if done[name].changed:
            won[name] = done[name].value
        log.info("%s is %s after %.1f s", name, shown(done[name].value), time.perf_counter() - began)
    return done


def builtin_value(name: str) -> Value:
    """The constant that an operation has for a choice."""
    if name.startswith("hyper_boundary"):
        choice = CHOICES[name]
        assert not isinstance(choice, Cut)
        return choice.candidates[0]
    constants: dict[str, Value] = {
        "fp8_gemm.skinny_rows": FP8_SKINNY_ROWS,
        "fp8_gemm.parts_rows": PARTS_ROWS,
        "bf16_gemm.deep_rows": DEEP_ROWS,
        "bf16_gemm.skinny_rows": BF16_SKINNY_ROWS,
    }
    if name in constants:
        return constants[name]
    if name == "attention.joined_rows":
        from worker_svc.gpu.step import JOINED_ROWS

        return JOINED_ROWS
    if name == "fp4_experts.many_rows":
        from worker_svc.ops.fp4_experts.humming import MANY_ROWS

        return MANY_ROWS
    from worker_svc.ops.sparse_attention import triton

    if name == "sparse_attention.few_tokens":
        return int(triton.FEW_TOKENS)
    tile = triton.TILE_FEW if name == "sparse_attention.tile_few" else triton.TILE_MANY
    return (tile.keys, tile.heads, tile.warps, tile.stages)


def _tune_one(name: str, cases: Cases, timer: Timer) -> Found | None:
    """A winner has to win twice: a second time against the built-in value alone, at the sizes that it changes."""
    builtin, choice = builtin_value(name), CHOICES[name]
    first = _timed(name, choice, builtin, cases.of(name, choice.sizes()), timer)
    won = first.verdict.value
    if not first.times[builtin]:
        return None
    if won != builtin:
        sizes = sorted({point.size for point in first.times[won]})
        second = _timed(name, _between(choice, builtin, won), builtin, cases.of(name, sizes), timer)
        if second.verdict.value != won:
            log.info("%s: %s won once and not again", name, shown(won))
        first.verdict = second.verdict
    return first


def _between(choice: Cut | Options, builtin: Value, other: Value) -> Cut | Options:
    """The same choice with two candidates."""
    if isinstance(choice, Cut):
        assert isinstance(builtin, int) and isinstance(other, int)
        return replace(choice, candidates=(builtin, other))
    assert isinstance(builtin, tuple) and isinstance(other, tuple)
    return replace(choice, candidates=(builtin, other))


def _timed(name: str, choice: Cut | Options, builtin: Value, cases: Iterator[Case], timer: Timer) -> Found:
    if isinstance(choice, Cut):
        assert isinstance(builtin, int), builtin
        timed = _timed_cut(name, choice, builtin, cases, timer)
        times = by_cut(choice, builtin, timed["few"], timed["many"])
    else:
        values = [builtin, *(value for value in choice.candidates if value != builtin)]
        variants = {shown(value): {name: value} for value in values}
        timed = {label: {} for label in variants}
        for case in _told_of(cases):
            for label, micros in race(variants, case.calls, case.result, timer).items():
                timed[label][case.point] = micros
        times = dict(zip(values, timed.values()))
    return Found(name, builtin, choose(builtin, times), times, timed)


def _timed_cut(
    name: str, choice: Cut, builtin: int, cases: Iterator[Case], timer: Timer
) -> dict[str, dict[Point, float]]:
    """Both programs at all points; at each the built-in value's own is what the other has to agree with."""
    few, many = {name: choice.few}, {name: choice.many}
    timed: dict[str, dict[Point, float]] = {"few": {}, "many": {}}
    for case in _told_of(cases):
        first = choice.runs_few(builtin, case.point.size)
        variants = {"few": few, "many": many} if first else {"many": many, "few": few}
        for label, micros in race(variants, case.calls, case.result, timer).items():
            timed[label][case.point] = micros
    return timed


def _told_of(cases: Iterator[Case]) -> Iterator[Case]:
    """With a line now and then of how far they are."""
    told = time.monotonic()
    for number, case in enumerate(cases, 1):
        if time.monotonic() - told > 10:
            told = time.monotonic()
            log.info("  case %d: %s, size %d", number, case.point.what, case.point.size)
        yield case


def _lacking(name: str) -> str:
    """Why a choice is none on this machine; empty if it is one."""
    needs = NEEDS[name] if name in NEEDS else NEEDS[name.partition(".")[0]]
    others = [f"{op} runs on {registry.backend(op)}" for op, wanted in needs.items() if registry.backend(op) != wanted]
    return " and ".join(others)


def _free(name: str) -> None:
    """Graphs and inputs of a choice, before the next one's. GpuError if a candidate took the device with it."""
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise GpuError(f"a candidate of {name} broke the GPU's context, so nothing is tuned: {error}") from error


def shown(value: Value) -> str:
    """A value in a line of text."""
    return str(value) if isinstance(value, int) else "/".join(map(str, value))


def _told(micros: float) -> float | None:
    return None if micros == LOST else round(micros, 3)
