"""The cache of compiled grammars over a compiler of the test's own: single flight, bound, what is remembered."""

import asyncio

import pytest

from grammar_svc.children import ChildError, Compiled
from grammar_svc.grammars import MAX_ALIASES, MAX_SOURCE_BYTES, REFUSED_S, Grammars
from grammar_svc.verdict import Outcome, SourceError
from meshkit.types import GrammarKind as Kind


class Compiler:
    """`answers` by source text: bytes of the result, or an exception. `gate` holds every compile back."""

    def __init__(self):
        self.calls, self.answers, self.gate = [], {}, asyncio.Event()
        self.gate.set()

    async def compile(self, source):
        self.calls.append(source.text)
        await self.gate.wait()
        answer = self.answers.get(source.text, 1000)
        if isinstance(answer, Exception):
            raise answer
        return Compiled(answer, 7)


@pytest.fixture
def compiler():
    return Compiler()


def cache(compiler, **options):
    options.setdefault("max_bytes", 1 << 20)
    return Grammars(compiler, lambda source: f"compiled {source.text}", "rev", **options)


async def test_one_source_is_compiled_once_however_many_ask(compiler):
    grammars = cache(compiler)
    verdicts = await asyncio.gather(*(grammars.compile(Kind.REGEX, "a+") for _ in range(10)))
    again = await grammars.compile(Kind.REGEX, "a+")
    assert compiler.calls == ["a+"] and {v.outcome for v in verdicts} == {Outcome.OK} and again.cached
    assert grammars.get(again.grammar_id) == "compiled a+"


async def test_a_caller_that_goes_away_leaves_the_compile_to_the_others(compiler):
    grammars = cache(compiler)
    compiler.gate.clear()
    first = asyncio.create_task(grammars.compile(Kind.REGEX, "a+"))
    second = asyncio.create_task(grammars.compile(Kind.REGEX, "a+"))
    await asyncio.sleep(0)
    first.cancel()
    compiler.gate.set()
    assert (await second).outcome is Outcome.OK and compiler.calls == ["a+"]


async def test_the_bytes_are_bounded_and_the_oldest_goes_first(compiler):
    grammars = cache(compiler, max_bytes=20_000)
    ids = [(await grammars.compile(Kind.REGEX, f"a{i}")).grammar_id for i in range(5)]
    assert (await grammars.compile(Kind.REGEX, "a0")).cached  # used again: younger than a1
    for i in range(5, 8):
        await grammars.compile(Kind.REGEX, f"a{i}")
    assert grammars.bytes <= 20_000 and len(grammars) == 6
    assert grammars.get(ids[0]) is not None and grammars.get(ids[1]) is None
    compiler.answers["b"] = 30_000
    assert (await grammars.compile(Kind.REGEX, "b")).outcome is Outcome.TOO_LARGE


async def test_refusals_are_remembered_for_a_while_timeouts_and_crashes_never(compiler):
    now = [0.0]
    grammars = cache(compiler, clock=lambda: now[0])
    compiler.answers = {"x": SourceError("no"), "t": ChildError(Outcome.TIMEOUT, "late")}
    compiler.answers["c"] = ChildError(Outcome.CRASHED, "gone")
    for text, outcome in [("x", Outcome.INVALID), ("t", Outcome.TIMEOUT), ("c", Outcome.CRASHED)]:
        for _ in range(2):
            assert (await grammars.compile(Kind.REGEX, text)).outcome is outcome
    assert compiler.calls == ["x", "t", "t", "c", "c"]
    now[0] = REFUSED_S + 1
    compiler.answers = {}
    assert (await grammars.compile(Kind.REGEX, "x")).outcome is Outcome.OK


async def test_too_many_waiting_are_told_to_come_again(compiler):
    grammars = cache(compiler, max_queued=3, max_queued_tenant=2)
    compiler.gate.clear()
    tasks = [asyncio.create_task(grammars.compile(Kind.REGEX, f"a{i}", "one")) for i in range(2)]
    await asyncio.sleep(0)
    busy = await grammars.compile(Kind.REGEX, "a2", "one")
    assert busy.outcome is Outcome.BUSY and busy.retry_after_ms
    tasks.append(asyncio.create_task(grammars.compile(Kind.REGEX, "b0", "two")))
    await asyncio.sleep(0)
    assert (await grammars.compile(Kind.REGEX, "c0", "three")).outcome is Outcome.BUSY
    compiler.gate.set()
    assert {v.outcome for v in await asyncio.gather(*tasks)} == {Outcome.OK}
    assert (await grammars.compile(Kind.REGEX, "a2", "one")).outcome is Outcome.OK


async def test_an_evicted_grammar_comes_back_for_a_slot_that_wants_it(compiler):
    grammars = cache(compiler, max_bytes=7_000)
    first = (await grammars.compile(Kind.REGEX, "a")).grammar_id
    seen = []
    grammars.on_verdict = lambda grammar_id, verdict: seen.append((grammar_id, verdict.outcome))
    for i in range(4):
        await grammars.compile(Kind.REGEX, f"b{i}")
    assert grammars.get(first) is None
    grammars.want(first)
    grammars.want(b"unknown, so nothing")
    await grammars.idle()
    assert seen[-1] == (first, Outcome.OK) and grammars.get(first) == "compiled a"


async def test_thousands_of_schemas_stay_within_their_bytes(compiler):
    grammars = cache(compiler, max_bytes=200_000)
    for at in range(0, 3_000, 50):
        batch = (f"k{n}" for n in range(at, at + 50))
        await asyncio.gather(*(grammars.compile(Kind.REGEX, text, text) for text in batch))
        assert grammars.bytes <= 200_000
    assert len(compiler.calls) == 3_000 and 0 < len(grammars) < 100
    assert len(grammars._aliases) <= MAX_ALIASES and grammars._source_bytes <= MAX_SOURCE_BYTES
