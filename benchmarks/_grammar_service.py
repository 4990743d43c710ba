"""The service in this process with real compile processes: compile times, bombs, memory; masks in _grammar_masks."""

import asyncio
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _grammar_cases as cases
from benchmarks._grammar_masks import mask_round_trips
from grammar_svc import compiler
from grammar_svc.children import ChildLimits, Children
from grammar_svc.grammars import Grammars
from grammar_svc.limits import SourceLimits
from grammar_svc.sources import read_source
from grammar_svc.verdict import Outcome
from grammar_svc.vocabulary import Vocabulary
from meshkit.types import GrammarKind


async def service(folder: Path, vocabulary: Vocabulary, *, quick: bool) -> dict[str, float | int | str]:
    """Compile processes, cache and mask stream as the service runs them, in this process and over a unix socket."""
    metrics: dict[str, float | int | str] = {}
    children = Children(folder, ChildLimits(), vocab_size=vocabulary.size, eos_ids=vocabulary.eos_ids)
    started = time.perf_counter()
    grammar_rev = await children.start()
    metrics["children_start_s"] = round(time.perf_counter() - started, 2)
    build = compiler.Builder(compiler.tokenizer_info(vocabulary), vocabulary)
    grammars = Grammars(children, build, grammar_rev, max_bytes=512 << 20, max_queued_tenant=64)
    try:
        metrics["child_rss_mib"] = round(sum(map(rss_mib, children.pids)) / len(children.pids))
        metrics |= await compiles(grammars)
        metrics |= await bombs(grammars, children)
        metrics |= await mask_round_trips(grammars, vocabulary, 200 if quick else 1000)
        metrics |= await many_schemas(children, build, grammar_rev, 500 if quick else 10_000)
    finally:
        await grammars.stop()
        await children.stop()
    return metrics


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


async def compiles(grammars: Grammars) -> dict[str, float | int | str]:
    """Typical schemas, cold (each once: wall time of the whole call) and cached."""
    cold, inside = [], []
    for schema in cases.SCHEMAS:
        started = time.perf_counter()
        verdict = await grammars.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        cold.append((time.perf_counter() - started) * 1e3)
        assert verdict.outcome is Outcome.OK, verdict
        inside.append(verdict.compile_us / 1e3)
    text = json.dumps(cases.SCHEMAS[0])
    cached = await timed(lambda: grammars.compile(GrammarKind.JSON_SCHEMA, text), 2000)
    source = read_source(GrammarKind.JSON_SCHEMA, text, SourceLimits())
    started = time.perf_counter()
    for _ in range(20):
        grammars._build(source)
    build_ms = (time.perf_counter() - started) / 20 * 1e3
    started = time.perf_counter()
    verdict = await grammars.compile(GrammarKind.DSML_TOOLS, json.dumps(cases.many_tools(20)))
    tools_ms = (time.perf_counter() - started) * 1e3
    assert verdict.outcome is Outcome.OK, verdict
    return {
        "compile_ms_typical": round(statistics.median(cold), 2),
        "compile_ms_worst_of_typical": round(max(cold), 2),
        "compile_ms_in_child": round(statistics.median(inside), 2),
        "compile_us_cached": round(cached * 1e6, 1),
        "build_ms_in_parent": round(build_ms, 2),
        "compile_ms_20_tools": round(tools_ms, 1),
    }


async def timed(call: Callable[[], Any], times: int) -> float:
    """Median seconds of an awaited call."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


async def bombs(grammars: Grammars, children: Children) -> dict[str, float | int | str]:
    """Thirty patterns in one schema; then a runaway that is killed while typical schemas go on beside it."""
    started = time.perf_counter()
    bomb = await grammars.compile(GrammarKind.JSON_SCHEMA, json.dumps(cases.thirty_patterns()))
    bomb_ms = (time.perf_counter() - started) * 1e3
    started = time.perf_counter()
    runaway = asyncio.create_task(grammars.compile(GrammarKind.JSON_SCHEMA, json.dumps(cases.runaway())))
    beside, number = [], 0
    while not runaway.done():
        await asyncio.sleep(0.1)
        number += 1
        schema = {"type": "object", "properties": {f"beside{number}": {"type": "string"}}}
        began = time.perf_counter()
        verdict = await grammars.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        assert verdict.outcome is Outcome.OK, verdict
        beside.append((time.perf_counter() - began) * 1e3)
    verdict = await runaway
    return {
        "bomb_30_regexes_ms": round(bomb_ms),
        "bomb_30_regexes_verdict": bomb.outcome.name,
        "runaway_verdict": verdict.outcome.name,
        "runaway_killed_after_s": round(time.perf_counter() - started, 2),
        "compiles_beside_runaway": len(beside),
        "compile_ms_beside_runaway_p50": round(statistics.median(beside), 1),
        "compile_ms_beside_runaway_max": round(max(beside), 1),
        "child_deaths": children.deaths,
    }


async def many_schemas(
    children: Children, build: compiler.Builder, grammar_rev: str, count: int
) -> dict[str, float | int | str]:
    """Distinct schemas through a cache of 16 MiB: its bytes, and what this process grew by."""
    cache = 16 << 20
    grammars = Grammars(children, build, grammar_rev, max_bytes=cache, max_queued_tenant=64)
    before, peak, growth_half = rss_mib(os.getpid()), 0, 0.0
    started = time.perf_counter()
    for at in range(0, count, 16):
        batch = range(at, min(at + 16, count))
        texts = [json.dumps({"properties": {f"key{n}": {"type": "integer"}}}) for n in batch]
        verdicts = await asyncio.gather(*(grammars.compile(GrammarKind.JSON_SCHEMA, text) for text in texts))
        assert all(verdict.outcome is Outcome.OK for verdict in verdicts), verdicts
        peak = max(peak, grammars.bytes)
        if at <= count // 2:
            growth_half = rss_mib(os.getpid()) - before
    taken = time.perf_counter() - started
    await grammars.stop()
    return {
        "distinct_schemas": count,
        "distinct_cache_limit_mib": cache >> 20,
        "distinct_cache_peak_mib": round(peak / 2**20, 2),
        "distinct_rss_growth_half_mib": round(growth_half, 1),
        "distinct_rss_growth_mib": round(rss_mib(os.getpid()) - before, 1),
        "distinct_compiles_per_s": round(count / taken, 1),
    }
