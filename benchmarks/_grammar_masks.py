"""What masks cost: round trips timed by a process of its own over a unix socket, and the engine's processor time alone.

64 rows over the function schemas of bfcl-eval on the real vocabulary. Rows sample like an answer being written: in one
of four cases a token that closes something, where one is legal, otherwise a legal id, low (frequent) ones preferred.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks._grammar_client import ROWS, sampled
from benchmarks._grammar_judges import function_schemas
from grammar_svc import compiler
from grammar_svc.attach import Attachments, Host
from grammar_svc.engine import Engine, Facts
from grammar_svc.grammars import Grammars
from grammar_svc.limits import SourceLimits
from grammar_svc.servicer import GrammarServicer
from grammar_svc.session import Kind
from grammar_svc.sources import read_source
from grammar_svc.vocabulary import Vocabulary
from meshkit.config import environment
from meshkit.health import Health
from meshkit.obs import Metrics
from meshkit.server import Serving, start_server
from meshkit.types import GrammarKind

CLOSERS: Final = frozenset(['"', '",', '"}', "}", "]", "]}", "},", "],", '"]', '":', ",", ":"])
SEED: Final = 20260424


def closing_ids(vocabulary: Vocabulary) -> list[int]:
    """Tokens that end a string, a list or an object."""
    return [token for token, text in enumerate(vocabulary.tokens) if text in CLOSERS]


def facts_of(vocabulary: Vocabulary) -> Facts:
    """The engine's view of a vocabulary."""
    return Facts(
        vocab_size=vocabulary.size,
        words=vocabulary.words,
        eos_ids=vocabulary.eos_ids,
        think_end=vocabulary.think_end,
    )


async def mask_round_trips(grammars: Grammars, vocabulary: Vocabulary, rounds: int) -> dict[str, float | int | str]:
    """64 sampled tokens up, 64 rows readable: back to back over a unix socket, rows in the ring; then inline."""
    host_metrics = Metrics()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o700)
        host = Host(
            grammars=grammars,
            facts=facts_of(vocabulary),
            matchers=compiler.MATCHERS,
            boot=1,
            build="benchmark",
            ring_dir=Path("/dev/shm"),
            ring_bytes=1 << 30,
            counted=host_metrics.counter("v4mesh_mask_events_total", "What mask streams counted", event=None),
        )
        servicer = GrammarServicer(grammars, Attachments(host), host_metrics)
        server, address = await start_server(Serving(listen=f"unix:{name}/g.sock"), Health(), servicer.add_to)
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks._grammar_client",
            str(address),
            str(vocabulary.size),
            str(rounds),
            json.dumps(function_schemas()),
            json.dumps(closing_ids(vocabulary)),
            env={**environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdout=asyncio.subprocess.PIPE,
        )
        before = time.process_time()
        out, _ = await client.communicate()
        spent = time.process_time() - before
        await server.stop(0)
    measured = json.loads(out)
    result: dict[str, float | int | str] = dict(measured)
    result["mask_server_cpu_us_per_row_with_rpc"] = round(spent / measured["mask_rows_total"] * 1e6, 2)
    return result | engine_cost(grammars, vocabulary, rounds)


class Walk:
    """64 slots in one engine; a slot whose grammar ended is bound anew."""

    def __init__(self, vocabulary: Vocabulary, compiled: dict[bytes, Any], max_verify: int) -> None:
        self.rows = np.zeros((2 * ROWS * max_verify, vocabulary.words), np.int32)
        facts = Facts(
            vocab_size=vocabulary.size,
            words=vocabulary.words,
            eos_ids=vocabulary.eos_ids,
            think_end=vocabulary.think_end,
        )
        self.engine = Engine(
            facts,
            self.rows,
            ROWS,
            max_verify,
            get=compiled.get,
            want=lambda grammar_id: None,
            matchers=compiler.MATCHERS,
        )
        self.ids = list(compiled)
        self.gens, self.positions = [0] * ROWS, [0] * ROWS
        self.masks: list[Any] = [None] * ROWS

    def fill(self) -> None:
        """Bind what has ended."""
        for slot in range(ROWS):
            if self.masks[slot] is None:
                self.gens[slot] += 1
                self.positions[slot] = 0
                self.engine.bind(slot, self.gens[slot], self.ids[slot % len(self.ids)])
        self.take()

    def take(self) -> None:
        for entry in self.engine.take():
            self.masks[entry.slot] = self.rows[entry.row] if entry.kind is Kind.MASKED else None
            self.positions[entry.slot] = entry.position

    def step(self, tokens: list[int], draft_counts: list[int], drafts: list[int]) -> float:
        """One round; seconds of processor time."""
        slots = range(ROWS)
        began = time.thread_time()
        self.engine.advance_rows(slots, self.gens, self.positions, [1] * ROWS, tokens, draft_counts, drafts)
        self.take()
        return time.thread_time() - began


def engine_cost(grammars: Grammars, vocabulary: Vocabulary, rounds: int) -> dict[str, float | int | str]:
    """Processor time of accept + fill per row, and of an entry with three drafts (four rows)."""
    compiled = {}
    for schema in function_schemas():
        source = read_source(GrammarKind.JSON_SCHEMA, json.dumps(schema), SourceLimits())
        grammar_id = source.grammar_id(grammars.grammar_rev)
        compiled[grammar_id] = grammars.get(grammar_id)
        assert compiled[grammar_id] is not None
    result: dict[str, float | int | str] = {}
    closing = closing_ids(vocabulary)
    for name, drafts in (("mask_cpu_us_per_row", 0), ("mask_cpu_us_per_entry_of_3_drafts", 3)):
        rng, walk, spent = random.Random(SEED), Walk(vocabulary, compiled, 1 + drafts), []
        for _ in range(rounds):
            walk.fill()
            tokens = [sampled(mask, rng, closing) for mask in walk.masks]
            ahead = [sampled(mask, rng, closing) for mask in walk.masks for _ in range(drafts)]
            spent.append(walk.step(tokens, [drafts] * ROWS, ahead))
        spent = sorted(spent[rounds // 10 :])  # the first rounds touch tables for the first time
        result[name] = round(sum(spent) / len(spent) / ROWS * 1e6, 2)
        result[f"{name}_p50"] = round(spent[len(spent) // 2] / ROWS * 1e6, 2)
    return result
