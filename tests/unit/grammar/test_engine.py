"""The engine: one entry per bind and row of tokens, fences, gaps, waiting for grammars; and the ring file."""

import os
import random

import numpy as np
import pytest

from grammar_svc import compiler
from grammar_svc import engine as engine_module
from grammar_svc.engine import Engine, Facts
from grammar_svc.ring import Ring, map_ring, remove_stale, ring_row
from grammar_svc.session import Kind, Session
from grammar_svc.sources import Source
from grammar_svc.vocabulary import Vocabulary
from meshkit.types import GrammarKind

EOS, THINK_END, SLOTS, VERIFY = 256, 257, 4, 3
ID = b"i" * 16


def allowed(row):
    return {i for i in range(320) if int(row[i >> 5]) >> (i & 31) & 1}


class Setup:
    def __init__(self, small, think_end=THINK_END, **options):
        self.grammars, self.wanted = {}, []
        self.rows = np.zeros((2 * SLOTS * VERIFY, small.words), np.int32)
        facts = Facts(vocab_size=320, words=small.words, eos_ids=(EOS,), think_end=think_end)
        self.engine = Engine(
            facts,
            self.rows,
            SLOTS,
            VERIFY,
            get=self.grammars.get,
            want=self.wanted.append,
            matchers=compiler.MATCHERS,
            **options,
        )
        self.grammar = small.compile(GrammarKind.REGEX, "abc|abd")


@pytest.fixture
def setup(small):
    made = Setup(small)
    made.grammars[ID] = made.grammar
    return made


def test_each_position_gets_its_entry_in_alternating_rows(setup):
    engine = setup.engine
    engine.bind(2, 5, ID)
    (entry,) = engine.take()
    assert (entry.slot, entry.slot_gen, entry.position, entry.kind, entry.n_rows) == (2, 5, 0, Kind.MASKED, 1)
    assert entry.row == ring_row(0, 2, SLOTS, VERIFY) and allowed(setup.rows[entry.row]) == {ord("a")}
    engine.advance(2, 5, 0, [ord("a")], [ord("b"), ord("c")])
    (entry,) = engine.take()
    assert entry.position == 1 and entry.n_rows == 3 and entry.row == ring_row(1, 2, SLOTS, VERIFY)
    assert [allowed(setup.rows[entry.row + i]) for i in range(3)] == [{ord("b")}, {*b"cd"}, {EOS}]
    assert engine.take() == []


def test_other_generations_and_unbound_slots_are_counted_and_change_nothing(setup):
    engine = setup.engine
    engine.bind(1, 5, ID)
    engine.take()
    engine.advance(1, 4, 0, [ord("a")])
    engine.advance(0, 5, 0, [ord("a")])
    engine.unbind(1, 4)
    engine.bind(1, 3, ID)
    assert engine.take() == [] and len(engine) == 1
    assert dict(engine.counts) == {"tokens_stale": 2, "unbind_stale": 1, "bind_stale": 1}
    engine.unbind(1, 5)
    assert len(engine) == 0


def test_known_ids_are_skipped_and_a_gap_fails_its_slot_alone(setup):
    engine = setup.engine
    engine.bind(0, 1, ID, emitted=[ord("a")])
    engine.bind(1, 1, ID)
    engine.take()
    engine.advance(0, 1, 0, [ord("a"), ord("b")])
    engine.advance(1, 1, 2, [ord("c")])
    first, second = engine.take()
    assert first.position == 2 and allowed(setup.rows[first.row]) == {*b"cd"}
    assert second.kind is Kind.FAILED and "position 2" in second.error and engine.counts["gaps"] == 1


def test_a_bind_of_an_unknown_grammar_waits_for_it(small):
    setup = Setup(small)
    engine = setup.engine
    engine.bind(0, 1, ID, thinking=True)
    engine.bind(1, 1, ID, emitted=[ord("a")])
    assert setup.wanted == [ID, ID]
    (free,) = engine.take()
    assert free.slot == 0 and free.kind is Kind.FREE
    engine.advance(0, 1, 0, [THINK_END])
    assert engine.take() == []
    setup.grammars[ID] = setup.grammar
    engine.grammar_ready(ID)
    entries = {entry.slot: entry for entry in engine.take()}
    assert allowed(setup.rows[entries[0].row]) == {ord("a")} and allowed(setup.rows[entries[1].row]) == {ord("b")}


def test_a_refused_grammar_fails_who_waits_for_it(small):
    setup = Setup(small)
    setup.engine.bind(0, 1, ID)
    assert setup.engine.take() == []
    setup.engine.grammar_refused(ID, "TIMEOUT: too slow")
    (entry,) = setup.engine.take()
    assert entry.kind is Kind.FAILED and entry.error == "TIMEOUT: too slow"


def test_thinking_needs_a_model_that_thinks(small):
    setup = Setup(small, think_end=-1)
    setup.engine.bind(0, 1, ID, thinking=True)
    (entry,) = setup.engine.take()
    assert entry.kind is Kind.FAILED and "</think>" in entry.error and not setup.wanted


def test_a_rebound_slot_begins_anew(setup):
    engine = setup.engine
    engine.bind(0, 1, ID, emitted=list(b"ab"))
    engine.bind(0, 2, ID)
    (entry,) = engine.take()
    assert entry.slot_gen == 2 and entry.position == 0 and allowed(setup.rows[entry.row]) == {ord("a")}


@pytest.mark.parametrize("head_words", [1, 32])
def test_a_round_of_many_slots_is_what_each_alone_would_get(small, monkeypatch, head_words):
    monkeypatch.setattr(engine_module, "HEAD_WORDS", head_words)  # a mask may show nothing in its first words
    setup, rng = Setup(small), random.Random(3)
    sources = ["[a-z]{2,9}x?", "(ab|cd)*e", "[0-9]{4}", "~+"]
    ids = [bytes([i]) * 16 for i in range(SLOTS)]
    setup.grammars |= {name: small.compile(GrammarKind.REGEX, text) for name, text in zip(ids, sources, strict=True)}
    alone = [Session(name, (EOS,), (), None) for name in ids]
    for slot, session in enumerate(alone):
        session.give(setup.grammars[ids[slot]], compiler.MATCHERS)
        setup.engine.bind(slot, 1, ids[slot])
    row, going = np.zeros((1, small.words), np.int32), list(range(SLOTS))
    for position in range(12):
        entries, tokens = setup.engine.take(), []
        assert [entry.slot for entry in entries] == going
        for entry in entries:
            session = alone[entry.slot]
            assert (entry.kind, entry.n_rows) == session.write(row) and entry.position == session.position
            if entry.kind is Kind.MASKED:
                assert allowed(setup.rows[entry.row]) == allowed(row[0])
                tokens.append(rng.choice(sorted(allowed(row[0]))))
                session.advance(tokens[-1:])
        going = [entry.slot for entry in entries if entry.kind is Kind.MASKED]
        setup.engine.advance_rows(going, [1] * len(going), [position] * len(going), [1] * len(going), tokens)
    assert len(going) < SLOTS  # some came to their end


def test_an_output_that_no_token_can_continue_fails_its_slot(small):
    tokens = ["" if text == "q" else text for text in small.vocabulary.tokens]
    vocabulary = Vocabulary(tokens=tuple(tokens), eos_ids=(EOS,), think_end=THINK_END, digest="without q")
    made = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary)
    setup = Setup(small)
    setup.grammars[ID] = compiler.compile_source(made, Source(GrammarKind.REGEX, "aq"))
    setup.engine.bind(0, 1, ID)
    (entry,) = setup.engine.take()
    assert allowed(setup.rows[entry.row]) == {ord("a")}
    setup.engine.advance(0, 1, 0, [ord("a")])
    (entry,) = setup.engine.take()
    assert (entry.kind, entry.n_rows, entry.row) == (Kind.FAILED, 0, -1) and "no token" in entry.error


def test_a_slot_whose_masks_cost_too_much_fails_alone(small):
    now = [0.0]
    setup = Setup(small, cpu_s=lambda: now[0])
    setup.grammars[ID] = small.compile(GrammarKind.REGEX, "a{0,900}")

    class Slow:
        """A matcher that takes 30 ms a token."""

        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            return getattr(self._matcher, name)

        def accept_token(self, token):
            now[0] += 0.03
            return self._matcher.accept_token(token)

    engine = setup.engine
    engine.bind(0, 1, ID)
    engine.bind(1, 1, ID)
    engine.take()
    engine._bound[0].session.live = Slow(engine._bound[0].session.live)
    for position in range(30):
        engine.advance(0, 1, position, [ord("a")])
        engine.advance(1, 1, position, [ord("a")])
        first, second = engine.take()
        assert second.kind is Kind.MASKED
        if first.kind is Kind.FAILED:
            break
    assert 15 <= position <= 25 and "too long" in first.error and engine.counts["too_costly"] == 1


def test_the_ring_is_private_shared_and_checked(tmp_path):
    ring = Ring(tmp_path, 7, 4, 10)
    assert ring.path.stat().st_mode & 0o777 == 0o600
    theirs = map_ring(ring.path, ring.nonce, 4, 10)
    ring.rows[3] = 5
    assert theirs is not None and (theirs[3] == 5).all() and not theirs.flags.writeable
    assert map_ring(ring.path, b"x" * 16, 4, 10) is None  # another file of that name
    assert map_ring(ring.path, ring.nonce, 5, 10) is None
    dead = tmp_path / "v4mesh-grammar-999999999-0000000000000001.ring"
    dead.touch()
    for path in (dead, ring.path):
        os.utime(path, (0, 0))
    assert remove_stale(tmp_path) == 1 and ring.path.exists()
    ring.unlink()
    assert map_ring(ring.path, ring.nonce, 4, 10) is None and theirs[3][0] == 5
