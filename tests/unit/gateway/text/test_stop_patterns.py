"""Stop expressions: found as `re` would find the match that ends first, whatever pieces the text came in."""

import re
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.pattern_parser import PatternError, parse_pattern
from gateway.text.stop_patterns import HELD_CHARS, StopPatterns, stop_search
from gateway.text.stop_strings import StopStrings

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\w", "\\d", "ab", "\\x61"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(?:" + "|".join(parts) + ")"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{,2}", "+?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
PIECES = st.lists(st.text("ab1\n", max_size=4), max_size=8)


def usable(text):
    try:
        return parse_pattern(text)
    except PatternError:
        return None


def definition(text, expressions):
    """The first end of any match, the first begin of those ending there; of two such the one given first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for expression in expressions:
                if re.fullmatch(expression, text[start:end]):
                    return text[:start], expression
    return text, None


def scan(pieces, expressions, strings=()):
    scanner = StopPatterns(strings, [parse_pattern(it) for it in expressions]).scanner()
    out = ""
    for piece in pieces:
        safe, match = scanner.feed(piece)
        out += safe
        if match is not None:
            return out, match
    return out + scanner.finish(), None


@settings(max_examples=120)
@given(PIECES, st.lists(EXPRESSIONS, min_size=1, max_size=2))
def test_any_cut_of_the_text_gives_the_definition(pieces, expressions):
    known = [it for it in expressions if usable(it)]
    if known:
        assert scan(pieces, known) == definition("".join(pieces), known)


@settings(max_examples=80)
@given(PIECES, EXPRESSIONS)
def test_nothing_is_held_that_cannot_become_a_match(pieces, expression):
    if usable(expression) is None:
        return
    scanner = StopPatterns((), [parse_pattern(expression)]).scanner()
    seen = released = ""
    for piece in pieces:
        safe, match = scanner.feed(piece)
        seen, released = seen + piece, released + safe
        if match is not None:
            return
        begins = (at for at in range(len(seen)) if regex.fullmatch(expression, seen[at:], partial=True))
        assert len(released) == next(begins, len(seen))


@pytest.mark.parametrize(
    ("expressions", "strings", "text", "found"),
    [
        (["\\n\\nHuman:"], (), "Well.\n\nHuman: x", ("Well.", "\\n\\nHuman:")),
        (["\\d{3}-\\d{4}"], (), "call 555-1234 now", ("call ", "\\d{3}-\\d{4}")),
        (["(?:Q|Question) ?\\d*:"], (), "A\nQuestion 12: y", ("A\n", "(?:Q|Question) ?\\d*:")),
        (["[.!?]+"], (), "Stop!? x", ("Stop", "[.!?]+")),
        (["z+"], ("END",), "x ENzD END", ("x EN", "z+")),
        (["z+"], ("END",), "x END z", ("x ", "END")),
        (["[\\]a-]x"], (), "b-x", ("b", "[\\]a-]x")),
        (["😀é*"], (), "a😀é", ("a", "😀é*")),
        (["a{x"], (), "ba{x", ("b", "a{x")),
    ],
)
def test_examples(expressions, strings, text, found):
    assert scan([text], expressions, strings) == scan(text, expressions, strings) == found


@pytest.mark.parametrize(
    "text",
    ["[.*", "(", "a**", "^a", "a$", "\\bword", "(?=a)b", "(?i)a", "(a)\\1", "(?P<n>a)", "a++", "a*", "", "(a|b*)"]
    + ["(a{50}){50}", "a{600}"],
)
def test_what_cannot_be_searched_for_is_refused(text):
    with pytest.raises(PatternError):
        parse_pattern(text)


def test_unarmed_matches_are_passed_over():
    scanner = StopPatterns((), [parse_pattern("a+b")]).scanner()
    assert scanner.feed("xaab", armed=False) == ("xaab", None)
    assert scanner.feed("caab") == ("c", "a+b") and scanner.matched_text == "aab"


def test_a_match_that_never_ends_holds_a_bounded_text():
    scanner = StopPatterns((), [parse_pattern("a.*b")]).scanner()
    text = "a" + "c" * 5_000
    out = "".join(scanner.feed(char)[0] for char in text)
    assert len(text) - len(out) == HELD_CHARS
    safe, match = scanner.feed("xb")
    assert match == "a.*b" and len(out + safe) == len(text) + 2 - (HELD_CHARS + 1)
    whole = StopPatterns((), [parse_pattern("a.*b")]).scanner()
    assert whole.feed(text + "xb")[0] == out + safe, "the same in one piece"


def test_hostile_expressions_take_linear_time():
    for hostile in ("(a|a)*b", "(a*)*b", "(a+)+b", "(.*)*(.*)*x", "[ab]*a[ab]{200}c"):
        scanner = StopPatterns((), [parse_pattern(hostile)]).scanner()
        began = time.process_time()
        for _ in range(300):
            scanner.feed("a" * 4)
        assert time.process_time() - began < 2.0, hostile


def test_strings_alone_take_the_faster_search():
    assert isinstance(stop_search(["a"], ()), StopStrings)
    assert isinstance(stop_search(["a"], [parse_pattern("b")]), StopPatterns)
