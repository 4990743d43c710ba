"""What constraints cost a worker in throughput: a simulated H200 device, real scheduler, grammar service and masks.

Every choice of the batch is constrained, or none is. The device's time is that of the cost model plus whatever a step
really waited for masks before it could sample; a row without its mask in time is parked and counts no token. Beside it
the same with masks computed serially: accept and fill after the forward, in the step itself, by the same engine.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks._grammar_load import start_load
from grammar_svc import compiler
from grammar_svc.engine import Engine, Entry, Facts
from grammar_svc.limits import SourceLimits
from grammar_svc.session import Kind
from grammar_svc.sources import read_source
from grammar_svc.vocabulary import Vocabulary
from meshkit.testing import ServiceProcess, until
from meshkit.types import GrammarKind, ModelInfo
from worker_svc.compute import ComputeThread
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import SlotInit, StepOutcome
from worker_svc.loop import WorkerLoop
from worker_svc.masks.source import READY, Answer, Ask, MaskRows, Told
from worker_svc.sim.cost import FlashOnH200
from worker_svc.sim.executor import Launched, SimExecutor, Waiting
from worker_svc.sim.state import SlotArrays

BATCHES: Final = (16, 64, 256)
SETTLE: Final = 20  # steps left out after all choices run
ITEM: Final = {"type": "string"}
# They never end by themselves: what is measured is a running batch.
SCHEMAS: Final[list[dict[str, Any]]] = [
    {"type": "array", "minItems": 5000, "items": item}
    for item in (
        {"type": "object", "properties": {"name": ITEM, "age": {"type": "integer"}}, "required": ["name", "age"]},
        {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]},
        {"enum": ["red", "green", "blue"]},
        {"type": "number"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
        {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
        {"type": "object", "properties": {"on": {"type": "string", "format": "date"}}, "required": ["on"]},
        {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 4},
    )
]


class Device(SimExecutor):
    """Counts the tokens of each step beside the time it ended at (nanoseconds)."""

    ends: list[tuple[int, int, int]]  # end, tokens, parked rows

    def collect(self, handle: Launched) -> StepOutcome:
        outcome = super().collect(handle)
        tokens = sum(len(row.tokens) for row in outcome.rows)
        self.ends.append((outcome.t_end_ns, tokens, len(outcome.rows) - tokens))
        return outcome


class SerialMasks:
    """A MaskSource in the worker itself: everything that is to be computed is computed in `take`."""

    def __init__(self, vocabulary: Vocabulary, slots: int, grammars: dict[bytes, Any]) -> None:
        self.words = vocabulary.words
        facts = Facts(
            vocab_size=vocabulary.size, words=self.words, eos_ids=vocabulary.eos_ids, think_end=vocabulary.think_end
        )
        self._rows = np.zeros((2 * slots, self.words), np.int32)
        self._engine = Engine(
            facts,
            self._rows,
            slots,
            1,
            get=grammars.get,
            want=lambda grammar_id: None,
            matchers=compiler.MATCHERS,
        )
        self._told: list[Told] = []
        self._gens: dict[int, int] = {}
        self._entries: dict[int, Entry] = {}

    def bind(self, inits: Sequence[SlotInit]) -> None:
        for init in inits:
            if init.grammar_id:
                self._gens[init.slot] = init.slot_gen
                self._engine.bind(init.slot, init.slot_gen, init.grammar_id, emitted=init.emitted)

    def take(self, asks: Sequence[Ask], out: MaskRows, *, wait_s: float, alone: bool) -> list[Answer]:
        told, self._told = self._told, []
        for row in told:
            self._engine.advance(row.slot, row.slot_gen, row.position, row.tokens)
        self._entries |= {entry.slot: entry for entry in self._engine.take()}
        for at, ask in enumerate(asks):
            entry = self._entries[ask.slot]
            assert entry.kind is Kind.MASKED and entry.position == ask.position, (entry, ask)
            out[at] = self._rows[entry.row]
        return [READY] * len(asks)

    def tell(self, rows: Sequence[Told]) -> None:
        self._told += [row for row in rows if not row.ended]


def model_folder(into: Path, vocabulary_file: Path, vocabulary: Vocabulary) -> Path:
    """A folder that a grammar service reads the vocabulary from."""
    into.mkdir()
    (into / "tokenizer.json").symlink_to(vocabulary_file)
    config = {"vocab_size": vocabulary.size, "eos_token_id": list(vocabulary.eos_ids)}
    (into / "config.json").write_text(json.dumps(config))
    return into


async def rate(
    folder: Path, vocabulary: Vocabulary, grammar: str, cost: FlashOnH200, rows: int, steps: int, how: str
) -> tuple[float, float]:
    """Tokens per second of the device, and the share of rows that were parked. `how`: free, masked or serial."""
    address = f"unix:{folder}/scheduler.sock"
    info = ModelInfo(
        name="sim",
        revision="r",
        vocab_size=vocabulary.size,
        max_context=1 << 20,
        eos_ids=vocabulary.eos_ids,
        kv_layout_id="simulated",
    )
    pools = PoolConfig(slots=rows, pages=rows * 24, tails=4 * rows, max_step_tokens=8192)
    slots = SlotArrays(pools.slots, pools.tails, range(3, info.vocab_size), info.eos_ids[0])
    device, compute = Device(info, slots, cost, Waiting(masks_after=how == "serial")), ComputeThread()
    device.ends = []
    with ServiceProcess(
        "scheduler_svc", "--listen", address, "--grammar", grammar, log=folder / "scheduler.log"
    ) as scheduler:
        await scheduler.ready(address, service="")
        masks = grammar if how == "masked" else ""
        loop = WorkerLoop(device, compute, group="w0", model=info, pools=pools, scheduler=address, grammar=masks)
        if how == "serial":
            device.use_masks(SerialMasks(vocabulary, rows, compiled(vocabulary)))
        serving = asyncio.create_task(loop.run())
        load = await start_load(address, rows, steps + 40 * SETTLE, [] if how == "free" else SCHEMAS)
        try:
            begun = len(device.ends) + SETTLE
            await until(lambda: len(device.ends) > begun + steps, 120 + steps)
        finally:
            with contextlib.suppress(ProcessLookupError):
                load.kill()
            await load.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            compute.stop()
    part = device.ends[begun : begun + steps + 1]
    tokens, parked = sum(step[1] for step in part[1:]), sum(step[2] for step in part[1:])
    return tokens / ((part[-1][0] - part[0][0]) / 1e9), parked / max(1, tokens + parked)


def compiled(vocabulary: Vocabulary) -> dict[bytes, Any]:
    """The load's grammars by id."""
    made = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary)
    revision = compiler.revision(vocabulary)
    sources = [read_source(GrammarKind.JSON_SCHEMA, json.dumps(schema), SourceLimits()) for schema in SCHEMAS]
    return {source.grammar_id(revision): compiler.compile_source(made, source) for source in sources}


async def throughput(
    vocabulary_file: Path, vocabulary: Vocabulary, *, gpus: int, quick: bool
) -> dict[str, float | int | str]:
    """All batches; loss is 1 - constrained / free."""
    cost, result = FlashOnH200(gpus=gpus), dict[str, float | int | str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o700)
        model = model_folder(folder / "model", vocabulary_file, vocabulary)
        grammar = f"unix:{folder}/grammar.sock"
        with ServiceProcess(
            *("grammar_svc", "--listen", grammar, "--model", str(model), "--queue-tenant", "64"),
            log=folder / "grammar.log",
        ) as service:
            await service.ready(grammar)
            print(f"{'batch':8}{'':10}{'tokens/s':>10}{'loss':>9}{'parked':>9}")
            for rows in BATCHES:
                free = 0.0
                for how in ("free", "masked", "serial"):
                    place = folder / f"{rows}-{how}"
                    place.mkdir(mode=0o700)
                    got, parked = await rate(place, vocabulary, grammar, cost, rows, 40 if quick else 200, how)
                    free = free or got
                    loss = round(1 - got / free, 4)
                    print(f"{rows:<8}{how:10}{got:10.0f}{loss:9.4f}{parked:9.4f}")
                    result[f"{how}_tokens_per_s_b{rows}"] = round(got)
                    if how == "masked":
                        result |= {f"throughput_loss_b{rows}": loss, f"parked_share_b{rows}": round(parked, 4)}
                    elif how == "serial":
                        result[f"throughput_loss_serial_b{rows}"] = loss
    return result
