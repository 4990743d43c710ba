"""Constrained requests through a real scheduler, worker and grammar service: nano model and simulated backend.

The grammar service is a process of its own; scheduler and worker run here. Outputs are read back by the standard
library's json and re, not by the compiler that made the masks.
"""

import asyncio
import contextlib
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from meshkit.health import Health
from meshkit.models import DEFAULT_MODEL
from meshkit.obs import Metrics, start_tracing
from meshkit.testing import GatewayProbe, ServiceProcess, serving, until
from meshkit.types import FinishReason, GrammarKind, GrammarSource
from scheduler_svc.core.config import SchedulerLimits
from scheduler_svc.loop import SchedulerLoop
from scheduler_svc.servicer import SchedulerServicer
from worker_svc.compute import ComputeThread
from worker_svc.config import WorkerConfig
from worker_svc.core.table import PoolConfig
from worker_svc.executor import CpuExecutor
from worker_svc.loaded import Loaded
from worker_svc.loop import WorkerLoop
from worker_svc.sim.loading import load as load_sim

EOS, THINK_END = 1, 6
POOLS = PoolConfig(slots=8, pages=32, tails=16, max_step_tokens=128)
SCHEMA = GrammarSource(
    kind=GrammarKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["fox", "owl", "bear"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
                "kind": {"type": "boolean"},
            },
            "required": ["name", "age", "kind"],
            "additionalProperties": False,
        }
    ),
)
WORDS = GrammarSource(kind=GrammarKind.REGEX, text="(red|green|blue)( (red|green|blue)){3}")
CHOICE = GrammarSource(kind=GrammarKind.CHOICE, text=json.dumps(["yes", "no", "perhaps"]))


@pytest.fixture(scope="module")
def tokens():
    """Bytes of each id of the model's vocabulary."""
    data = json.loads((Path(DEFAULT_MODEL) / "tokenizer.json").read_text())
    spelled = {chr(c): bytes([b]) for b, c in _byte_letters().items()}
    table = {i: b"".join(spelled.get(c, c.encode()) for c in text) for text, i in data["model"]["vocab"].items()}
    return table | {entry["id"]: entry["content"].encode() for entry in data["added_tokens"]}


def _byte_letters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: b for b in plain} | {b: 256 + i for i, b in enumerate(rest)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    folder.chmod(0o700)
    return folder


def grammar_process(folder):
    args = ("--listen", f"unix:{folder}/g.sock", "--model", str(DEFAULT_MODEL), "--ring-dir", str(folder))
    return ServiceProcess("grammar_svc", *args, "--compilers", "1", "--spares", "0", log=folder / "grammar.log")


@pytest.fixture(scope="module")
def grammar(folder):
    with grammar_process(folder) as process:
        yield process


@pytest.fixture(scope="module")
def nano():
    before = torch.get_num_threads()
    executor = CpuExecutor.load(DEFAULT_MODEL, slots=8, pages=32, tails=16, max_verify=1, threads=1)
    yield Loaded(executor, executor.info, POOLS)
    torch.set_num_threads(before)


@pytest.fixture
def sim():
    return load_sim(WorkerConfig(backend="sim", slots=8, pages=32, tails=16, max_step_tokens=128, sim_step_ms=2.0))


class Mesh:
    def __init__(self, scheduler, gateway, worker, metrics):
        self.scheduler, self.gateway, self.worker, self.metrics = scheduler, gateway, worker, metrics

    async def start(self, source, prompt=(0, 5, 9), **params):
        (row,) = await self.gateway.accepted(prompt, grammar=source, **{"max_tokens": 60, **params})
        return row

    async def end(self, *rows):
        await until(lambda: all(row in self.gateway.finished for row in rows), 60)

    def text(self, row, tokens):
        """Output of a row that finished with stop, without its last id."""
        assert self.gateway.finished[row] is FinishReason.STOP, (row, self.gateway.errors, self.gateway.tokens.get(row))
        ids = self.gateway.tokens[row]
        assert ids[-1] == EOS
        return b"".join(tokens[i] for i in ids[:-1]).decode()

    def number(self, name):
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.metrics.render().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextlib.asynccontextmanager
async def mesh(folder, loaded, service, worker_grammar=None):
    address = f"unix:{folder}/g.sock"
    await service.ready(address)
    limits, metrics = SchedulerLimits(depth=2), Metrics()
    loop = SchedulerLoop(limits, Health(), Metrics(), start_tracing("scheduler"), address)
    compute = ComputeThread()
    async with serving(folder, "scheduler", SchedulerServicer(loop).add_to) as scheduler:
        worker = WorkerLoop(
            loaded.executor,
            compute,
            group="w0",
            model=loaded.info,
            pools=loaded.pools,
            scheduler=scheduler,
            grammar=address if worker_grammar is None else worker_grammar,
            metrics=metrics,
        )
        running = [asyncio.create_task(loop.run()), asyncio.create_task(worker.run())]
        try:
            async with GatewayProbe(scheduler) as gateway:
                await until(lambda: gateway.status is not None and gateway.status.ready, 60)
                yield Mesh(loop, gateway, worker, metrics)
            assert not [task for task in running if task.done()]
            assert loop.core.faults == {}
            loop.core.check()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            compute.stop()


def check_schema(text):
    value = json.loads(text)
    assert set(value) == {"name", "age", "kind"} and value["name"] in {"fox", "owl", "bear"}
    assert value["kind"] in (True, False) and 0 <= value["age"] <= 99


async def test_the_model_writes_what_its_grammars_say(folder, grammar, nano, tokens):
    async with mesh(folder, nano, grammar) as m:
        schemas = [await m.start(SCHEMA, temperature=t) for t in (0.0, 0.7, 1.0)]
        words = [await m.start(WORDS, temperature=1.0, presence_penalty=0.5, bias=((7, 2.0),)) for _ in range(2)]
        (choice,) = [await m.start(CHOICE, temperature=1.0, top_p=0.9, min_tokens=1)]
        (free,) = await m.gateway.accepted((0, 5, 9), max_tokens=40, temperature=0.0, ignore_eos=True)
        await m.end(*schemas, *words, choice, free)
        for row in schemas:
            check_schema(m.text(row, tokens))
        for row in words:
            assert re.fullmatch(WORDS.text, m.text(row, tokens))
        assert m.text(choice, tokens) in {"yes", "no", "perhaps"}
        assert len(m.gateway.tokens[free]) == 40
        await until(lambda: m.number("v4mesh_mask_slots") == 0)
        assert m.number('v4mesh_mask_rows_total{outcome="ready"}') >= sum(len(m.gateway.tokens[r]) for r in schemas)


async def test_the_constraint_arms_after_the_thought(folder, grammar, nano, tokens):
    async with mesh(folder, nano, grammar) as m:
        source = GrammarSource(kind=CHOICE.kind, text=CHOICE.text, thinking=True)
        bias = ((THINK_END, 100.0),)
        row = await m.start(source, temperature=0.0, bias=bias, min_tokens=2)
        await m.end(row)
        assert m.gateway.tokens[row][0] == THINK_END
        assert m.text(row, tokens).removeprefix(tokens[THINK_END].decode()) in {"yes", "no", "perhaps"}
        # Before its end the thought is free, but it cannot end the answer.
        bias = ((EOS, 50.0),)
        row = await m.start(source, temperature=0.0, bias=bias, max_tokens=5)
        await m.end(row)
        assert EOS not in m.gateway.tokens[row] and m.gateway.finished[row] is FinishReason.LENGTH


async def test_the_simulated_backend_draws_legal_tokens(folder, grammar, sim, tokens):
    async with mesh(folder, sim, grammar) as m:
        rows = [await m.start(source) for source in (SCHEMA, WORDS, CHOICE) * 2]
        plain = (await m.gateway.accepted((0, 5, 9), max_tokens=30))[0]
        await m.end(*rows, plain)
        for row, kind in zip(rows, "swc" * 2, strict=True):
            text = m.text(row, tokens)
            if kind == "s":
                check_schema(text)
            elif kind == "w":
                assert re.fullmatch(WORDS.text, text)
            else:
                assert text in {"yes", "no", "perhaps"}


async def test_a_worker_without_a_grammar_service_says_so(folder, grammar, sim):
    async with mesh(folder, sim, grammar, worker_grammar="") as m:
        row = await m.start(CHOICE)
        await m.end(row)
        assert m.gateway.finished[row] is FinishReason.ERROR and m.gateway.errors[row] == "grammar_failed"


async def test_logits_that_are_no_numbers_end_one_choice(folder, grammar, nano, monkeypatch):
    forward = nano.executor.model.forward
    monkeypatch.setattr(nano.executor.model, "forward", lambda inputs: forward(inputs) * float("nan"))
    async with mesh(folder, nano, grammar) as m:
        (row,) = await m.gateway.accepted((0, 5, 9), max_tokens=30)
        await m.end(row)
        assert m.gateway.finished[row] is FinishReason.ERROR and m.gateway.errors[row] == "sampling_fault"
        name = 'v4mesh_core_events_total{event="row_fault_sampling_fault",fault="0"}'
        assert m.number(name) == 1 and m.gateway.tokens.get(row, []) == []


def test_vocabulary_of_the_test_is_the_models(tokens):
    assert len(tokens) == 4096 and tokens[EOS].endswith("｜>".encode()) and np.all(np.diff(sorted(tokens)) == 1)


async def test_a_grammar_service_that_is_killed_costs_time_only(folder, grammar, sim, tokens):
    long = GrammarSource(kind=GrammarKind.REGEX, text="(red|green|blue)( (red|green|blue)){30}")
    async with mesh(folder, sim, grammar) as m:
        rows = [await m.start(long, max_tokens=200) for _ in range(3)]
        await until(lambda: all(len(m.gateway.tokens.get(row, ())) > 3 for row in rows))
        grammar.process.send_signal(signal.SIGKILL)
        grammar.process.wait()
        (free,) = await m.gateway.accepted((0, 5, 9), max_tokens=30)
        await m.end(free)
        assert not set(rows) & set(m.gateway.finished)
        with grammar_process(folder):
            await m.end(*rows)
        for row in rows:
            assert re.fullmatch(long.text, m.text(row, tokens))
        assert m.number('v4mesh_mask_rows_total{outcome="parked"}') > 0
