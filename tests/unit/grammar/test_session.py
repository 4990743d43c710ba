"""Sessions: masks follow the sampled ids, thinking arms late, drafts are looked through, nothing is rolled back."""

import random

import numpy as np
import pytest

from grammar_svc import compiler
from grammar_svc.session import Kind, Session
from meshkit.types import GrammarKind

EOS, THINK_END, WORDS = 256, 257, 10


def allowed(row):
    return {i for i in range(320) if int(row[i >> 5]) >> (i & 31) & 1}


@pytest.fixture
def session(small):
    def make(kind, text, *, thinking=False, stop_ids=(), give=True):
        made = Session(b"g" * 16, (EOS,), stop_ids, THINK_END if thinking else None)
        made.late = lambda: made.give(small.compile(kind, text), compiler.MATCHERS)
        if give:
            made.late()
        return made

    return make


def rows(n=1):
    return np.zeros((n, WORDS), np.int32)


def test_masks_follow_the_sampled_ids_to_the_end(session):
    it, row = session(GrammarKind.REGEX, "ab|ac"), rows()
    assert it.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {ord("a")}
    it.advance([ord("a")])
    assert it.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {ord("b"), ord("c")}
    it.advance([ord("c")])
    assert it.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {EOS}
    it.advance([EOS])
    assert it.write(row) == (Kind.DONE, 0) and it.position == 3


def test_an_id_outside_the_grammar_fails_the_slot_and_names_it(session):
    it = session(GrammarKind.REGEX, "ab")
    it.advance([ord("a"), ord("x"), ord("b")])
    assert it.write(rows()) == (Kind.FAILED, 0)
    assert it.error == f"token {ord('x')} at output position 1 is outside the grammar"


def test_stop_ids_and_eos_wait_for_the_end(session):
    it, row = session(GrammarKind.REGEX, "[0-9]{2}", stop_ids=[ord("5"), ord("z")]), rows()
    it.write(row)
    assert allowed(row[0]) == {*b"012346789"}
    it.advance(b"12")
    it.write(row)
    assert allowed(row[0]) == {EOS, ord("5"), ord("z")}
    it.advance([ord("z")])
    assert it.write(row) == (Kind.DONE, 0)


def test_thinking_is_free_until_its_end(session):
    it, row = session(GrammarKind.REGEX, "ab", thinking=True), rows()
    it.advance(b"whatever")
    assert it.write(row) == (Kind.FREE, 0)
    it.advance([THINK_END])
    assert it.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {ord("a")}


def test_an_end_inside_the_thinking_is_a_failure(session):
    it = session(GrammarKind.REGEX, "ab", thinking=True)
    it.advance([*b"hm", EOS])
    assert it.write(rows()) == (Kind.FAILED, 0) and "position 2" in it.error


def test_ids_that_came_before_the_grammar_are_replayed(session):
    it, row = session(GrammarKind.REGEX, "ab", thinking=True, give=False), rows()
    it.advance(b"hm")
    assert it.write(row) == (Kind.FREE, 0)  # thinking needs no grammar
    it.advance([THINK_END, ord("a")])
    assert it.write(row) is None
    it.late()
    assert it.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {ord("b")}


@pytest.mark.parametrize("stop_ids", [(), (ord("q"),)])
def test_rows_of_drafts_equal_the_rows_of_sampling_them(session, stop_ids):
    schema = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},"required":["a","b"]}'
    rng = random.Random(7)
    for _ in range(8):
        it, steps, ids, row = session(GrammarKind.JSON_SCHEMA, schema, stop_ids=stop_ids), [], [], rows()
        for _ in range(12):
            if it.write(row)[0] is not Kind.MASKED:
                break
            steps.append(row.copy())
            token = rng.choice(sorted(allowed(row[0])))
            ids.append(token)
            it.advance([token])
        start = rng.randrange(len(ids))
        drafts = ids[start : start + 5]
        again = session(GrammarKind.JSON_SCHEMA, schema, stop_ids=stop_ids)
        again.advance(ids[:start])
        got = rows(len(drafts) + 1)
        assert again.write(got, drafts) == (Kind.MASKED, len(drafts) + 1)
        for offset in range(min(len(drafts) + 1, len(steps) - start)):
            assert allowed(got[offset]) == allowed(steps[start + offset][0])
        assert again.position == start  # drafts left no trace
        assert again.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == allowed(steps[start][0])


@pytest.mark.parametrize("stop_ids", [(), (ord("q"),)])
def test_an_illegal_draft_is_masked_not_cut(session, stop_ids):
    it, got = session(GrammarKind.REGEX, "abcd", stop_ids=stop_ids), rows(4)
    assert it.write(got, [ord("a"), ord("x"), ord("c")]) == (Kind.MASKED, 4)
    assert allowed(got[0]) == {ord("a")} and allowed(got[1]) == {ord("b")}
    assert len(allowed(got[2])) == len(allowed(got[3])) == 320
    it.advance([ord("a"), ord("b")])
    it.write(got)
    assert allowed(got[0]) == {ord("c")}


def test_drafts_across_the_end_of_thinking(session):
    it, got = session(GrammarKind.REGEX, "ab", thinking=True), rows(4)
    assert it.write(got, [ord("h"), THINK_END, ord("a")]) == (Kind.MASKED, 4)
    free = set(range(320)) - {EOS}
    assert [allowed(row) for row in got] == [free, free, {ord("a")}, {ord("b")}]
    assert it.write(got, [ord("h"), ord("m")]) == (Kind.FREE, 0)


def test_a_grammar_without_any_way_on_fails(session):
    it = session(GrammarKind.EBNF, "root ::= [一]")  # three bytes, all in the vocabulary: spelled byte by byte
    it.advance("一".encode())
    row = rows()
    assert it.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {EOS}
    dead = session(GrammarKind.EBNF, 'root ::= "a" root')
    dead.advance([ord("a")])
    assert dead.write(row) == (Kind.MASKED, 1) and allowed(row[0]) == {ord("a")}
