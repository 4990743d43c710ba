"""Rules of a printed grammar: split, merged, and the same masks afterwards at every step of random walks."""

import json
import random

import numpy as np
import pytest
from xgrammar import Grammar

from benchmarks._grammar_cases import many_tools
from grammar_svc import compiler
from grammar_svc.rules import merged, split

TEXT = r"""a ::= (("[" b "]" | "x" a_1))
b ::= (([a\]b] a) | ("b \" a" a_1{0, 3}))
a_1 ::= ((c))
c ::= (("c"))
d ::= (("c"))
e ::= (("[" f "]" | "x" d_1))
f ::= (([a\]b] e) | ("b \" a" d_1{0, 3}))
d_1 ::= ((d))
g ::= TagDispatch(
  ("<t>", e),
  excludes=("a")
)
unused ::= (("u" root))
root ::= ((a e g))
"""


def test_rules_that_mean_the_same_become_one_and_what_nothing_leads_to_goes():
    found = split(merged(TEXT))
    assert set(found) == {"a", "b", "a_1", "c", "g", "root"}
    assert found["root"] == "((a a g))" and found["g"] == 'TagDispatch(\n  ("<t>", a),\n  excludes=("a")\n)'
    assert found["b"] == split(TEXT)["b"], "literals and classes are no names"
    assert merged(merged(TEXT)) == merged(TEXT)


def test_rules_that_differ_somewhere_below_stay_apart():
    text = TEXT.replace('d ::= (("c"))', 'd ::= (("d"))')
    assert set(split(merged(text))) == set(split(text)) - {"unused"}


SOURCES = {
    "tools": many_tools(6),
    "auto": many_tools(3) | {"tool_choice": "auto"},
    "one": many_tools(5) | {"tool_choice": {"name": "tool_4"}, "parallel": False},
}


@pytest.mark.parametrize("name", SOURCES)
def test_masks_are_the_same_at_every_step(small, name):
    text = str(Grammar.from_structural_tag(compiler.dsml_tag(json.loads(json.dumps(SOURCES[name])))))
    short = merged(text)
    assert short.count("::=") < 0.7 * text.count("::=")
    pair = [small.made.made.compile_grammar(Grammar.from_ebnf(it)) for it in (text, short)]
    draw, rows = random.Random(name), np.zeros((2, small.words), np.int32)
    for _ in range(12):
        matchers = [compiler.new_matcher(it, [256]) for it in pair]
        for _ in range(150):
            for index, matcher in enumerate(matchers):
                matcher.fill_next_token_bitmask(rows, index)
            assert (rows[0] == rows[1]).all()
            allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little")).tolist()
            token = draw.choice(allowed)
            if token == 256:
                break
            assert all(matcher.accept_token(token) for matcher in matchers)
