"""Random walks: a matcher driven with random legal tokens (closing ones preferred after a while, so that walks end).

Every finished text is judged by an independent validator. No model is involved: it measures the grammar path alone.
"""

import json
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks import _grammar_cases as cases
from benchmarks._grammar_judges import pattern_judge, schema_judge
from grammar_svc import compiler
from grammar_svc.limits import SourceLimits
from grammar_svc.session import Kind as Entry
from grammar_svc.session import Session
from grammar_svc.sources import read_source
from grammar_svc.vocabulary import Vocabulary
from meshkit.types import GrammarKind

SEED = 20260424


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
    for index, schema in enumerate(cases.SCHEMAS):
        yield f"schema {index}", GrammarKind.JSON_SCHEMA, json.dumps(schema), schema_judge(schema)
    for pattern in cases.REGEXES:
        yield pattern, GrammarKind.REGEX, pattern, pattern_judge(pattern, re.DOTALL)
    for name, grammar, pattern in cases.GRAMMARS:
        yield name, GrammarKind.EBNF, grammar, pattern_judge(pattern)
    yield "choice", GrammarKind.CHOICE, json.dumps(cases.CHOICES), lambda text: text in cases.CHOICES
    yield "object", GrammarKind.JSON_OBJECT, "", schema_judge({"type": "object"})
