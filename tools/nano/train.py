"""Train v4-nano on one device, by the clock, and export it.

    python -m tools.nano.train --text TEXT --tokenizer TOK --out OUT --train-secs 1100

In order: generators start, the model compiles, a rehearsal writes every kind of file once, then training runs with its
schedule. A twin that never saw rounding is branched off, settled and saved before rounding is switched on. OUT gets
log.jsonl, twin/, snapshot/, weights/ (BF16) and export/. A number in OUT/train_secs moves the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.text.tokenizer import Tokenizer
from tools.nano.batch import Batch
from tools.nano.corpus import Sources
from tools.nano.exam import Marks, Sitting, papers, sit
from tools.nano.feed import FIRST_SEED, Feed
from tools.nano.model import NanoModel, Switches, compile_parts, parameter_count, renew_c4
from tools.nano.schedule import SCHEDULES
from tools.nano.weights_io import export, load_shards, save_shards
from worker_svc.checkpoint.census import preset
from worker_svc.checkpoint.config import V4Config

BIAS_RATE = 1e-3
SHARD_BYTES = 14_000_000
HIDDEN_KINDS = ("pairs_32", "recall_far", "recall_blind")
"""Kinds that exams repeat with C4 or C128 entries hidden."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    text: Path | None
    tokenizer: Path
    out: Path
    resume: Path | None
    renew_c4: bool
    schedule: str
    device: str
    train_secs: float
    twin_secs: float
    length: int
    rows: int
    processes: int
    seed: int
    exam_each: int
    exam_every: float
    log_every: int
    compiled: bool


@dataclass(slots=True)
class Clock:
    """Seconds of training, without those spent on exams, saves and the twin."""

    budget: float
    _began: float = field(default_factory=time.monotonic)
    _paused: float = 0.0

    @property
    def share(self) -> float:
        return min(1.0, (time.monotonic() - self._began - self._paused) / self.budget)

    def pause(self, began: float) -> None:
        """Leave out the time since `began`."""
        self._paused += time.monotonic() - began


class Trainer:
    """Model, optimizer, feed and what is written about them."""

    def __init__(self, options: Options, config: V4Config) -> None:
        self.options, self.schedule = options, SCHEDULES[options.schedule]
        self._started = time.monotonic()
        options.out.mkdir(parents=True, exist_ok=True)
        self._log = (options.out / "log.jsonl").open("a", buffering=1)
        self.feed = Feed(
            options.text,
            options.tokenizer,
            rows=options.rows,
            length=options.length,
            processes=options.processes,
            seed=FIRST_SEED + options.seed,
        )
        tokenizer, sources = Tokenizer.load(options.tokenizer), Sources.load(options.text)
        exams = papers(tokenizer, options.exam_each, sources)
        self.sitting = Sitting.prepare(exams, options.rows, options.length)
        hidden = [paper for paper in exams if paper.kind in HIDDEN_KINDS]
        self.hidden_sitting = Sitting.prepare(hidden, options.rows, options.length)
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        self.model = NanoModel(config, options.length)
        if options.resume is not None:
            self.model.load_state_dict(load_shards(options.resume))
            if options.renew_c4:
                renew_c4(self.model)
        self.model.to(self.device).train()
        self.switches = Switches(self._flag(False), self._flag(True))
        self.optimizer = self._optimizer()
        self.step, self.guidance = 0, self.schedule.guide

    def _flag(self, value: bool) -> Tensor:
        return torch.tensor(value, device=self.device)

    def _optimizer(self) -> torch.optim.Optimizer:
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.dim() > 1 and not name.endswith(".ape")]
        others = [p for name, p in named if p.dim() < 2 or name.endswith(".ape")]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=self.device.type == "cuda")

    def say(self, event: str, **values: Any) -> None:
        """One line into the log and on the screen."""
        line = json.dumps({"event": event, "t": round(time.monotonic() - self._started, 1), **values})
        self._log.write(line + "\n")
        print(line, flush=True)

    def run(self) -> None:
        """Everything, to the end."""
        try:
            self.say("start", parameters=parameter_count(self.model), options=_printable(asdict(self.options)))
            if self.options.compiled:
                compile_parts(self.model)
            for _ in range(3):
                self._train_step(1e-4)
            self._wait()
            self.say("compiled", memory_gib=self._memory())
            self._rehearse()
            self._train()
            self._finish()
        finally:
            self.feed.stop()
            self._log.close()

    def _rehearse(self) -> None:
        """Everything that happens at the end, once, before anything is at stake."""
        self._exam("rehearsal")
        self._save("snapshot")
        self._export("rehearsal")
        self.say("rehearsed")

    def _train(self) -> None:
        clock = Clock(self.options.train_secs)
        next_exam, twin_due = self.options.exam_every, self.options.twin_secs > 0
        mark, tokens = time.monotonic(), 0
        while (share := clock.share) < 1:
            self.feed.level.value = self.schedule.level(share)
            self.switches.dense.fill_(share < self.schedule.sparse_from)
            self.switches.rounding.fill_(share >= self.schedule.rounding_from)
            if twin_due and share >= self.schedule.rounding_from:
                began, twin_due = time.monotonic(), False
                self._twin()
                clock.pause(began)
            rate = self.schedule.rate(share, self.step)
            self.guidance = self.schedule.guidance(share)
            losses = self._train_step(rate)
            tokens += self.options.rows * self.options.length
            if self.step % self.options.log_every == 0:
                values = [round(float(part), 4) for part in losses]
                seconds, mark = time.monotonic() - mark, time.monotonic()
                names = dict(zip(("loss", "draft", "index", "guide", "grad"), values))
                speed, tokens = round(tokens / seconds), 0
                self.say(
                    "step",
                    step=self.step,
                    share=round(share, 3),
                    rate=round(rate, 6),
                    tokens_per_s=speed,
                    waiting=self.feed.waiting(),
                    **names,
                )
                self._adjust(clock)
                if not all(value == value for value in values):
                    raise SystemExit("a loss is not a number; nothing after this can be trusted")
            if share * clock.budget >= next_exam:
                began = time.monotonic()
                next_exam += self.options.exam_every
                self._exam("exam")
                self._save("snapshot")
                clock.pause(began)
                mark, tokens = time.monotonic(), 0
        if twin_due:
            self._twin()

    def _adjust(self, clock: Clock) -> None:
        told = self.options.out / "train_secs"
        if told.exists():
            clock.budget = float(told.read_text())

    def _train_step(self, rate: float) -> tuple[Tensor, ...]:
        batch = Batch.of(self.feed.next(), self.device)
        losses = self.model.losses(batch, self.switches)
        losses.total(self.guidance).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.balance(BIAS_RATE)
        self.step += 1
        return losses.trunk.detach(), losses.draft.detach(), losses.index.detach(), losses.guide.detach(), norm

    def _twin(self) -> None:
        """Branch off, let the rate fall to its end without rounding, save, and return to where it was."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        optimizer, step = copy.deepcopy(self.optimizer.state_dict()), self.step
        self.switches.rounding.fill_(False)
        clock = Clock(self.options.twin_secs)
        while (share := clock.share) < 1:
            self._train_step(self.schedule.peak * (1 - share * (1 - self.schedule.final)))
        self._exam("twin")
        self._save("twin")
        self.say("twin", steps=self.step - step)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        self.step = step
        self.switches.rounding.fill_(True)

    def _exam(self, event: str) -> None:
        """Marks of every kind, and those of three kinds without C4 or C128 entries."""
        began = time.monotonic()
        self.model.eval()
        with torch.no_grad(), _uncompiled():
            marks = sit(self.model, self.sitting, self.switches)
            no_c4 = sit(self.model, self.hidden_sitting, self.switches, hide_c4=True)
            no_c128 = sit(self.model, self.hidden_sitting, self.switches, hide_c128=True)
        self.model.train()
        total = _sum(list(marks.values()))
        self.say(
            event,
            exact={kind: round(one.rate, 3) for kind, one in marks.items()},
            all=round(total.rate, 4),
            acceptance=round(total.acceptance, 4),
            no_c4={kind: round(one.rate, 3) for kind, one in no_c4.items()},
            no_c128={kind: round(one.rate, 3) for kind, one in no_c128.items()},
            seconds=round(time.monotonic() - began, 1),
        )

    def _save(self, name: str) -> None:
        save_shards(self.model.state_dict(), self.options.out / name)

    def _export(self, name: str) -> None:
        state = self.model.state_dict()
        export(self.model.config, state, self.options.out / name, shard_bytes=SHARD_BYTES)

    def _finish(self) -> None:
        self.switches.rounding.fill_(True)
        self._exam("final_rounded")
        self.switches.rounding.fill_(False)
        self._exam("final_unrounded")
        self._save("weights")
        self._export("export")
        self.say("done", step=self.step, tokens=self.step * self.options.rows * self.options.length)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _memory(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 2**30, 1) if self.device.type == "cuda" else 0.0


def _sum(marks: list[Marks]) -> Marks:
    total = Marks()
    for one in marks:
        total = total.plus(one)
    return total


def _uncompiled() -> Any:
    return torch.compiler.set_stance("force_eager")


def _printable(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--text", type=Path, help="natural text; without it, our own words only")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="BF16 weights of a snapshot to start from")
    parser.add_argument("--renew-c4", action="store_true", help="begin the C4 compressors anew when resuming")
    parser.add_argument("--schedule", choices=SCHEDULES, default="whole")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--train-secs", type=float, default=1100)
    parser.add_argument("--twin-secs", type=float, default=25)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--processes", type=int, default=13)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exam-each", type=int, default=24)
    parser.add_argument("--exam-every", type=float, default=75)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--eager", dest="compiled", action="store_false")
    Trainer(Options(**vars(parser.parse_args())), preset("nano")).run()


if __name__ == "__main__":
    main()
