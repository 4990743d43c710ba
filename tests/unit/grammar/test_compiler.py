"""What compiled grammars take, on the sample model's vocabulary: tool calls, choices, structural tags, markers."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from grammar_svc import compiler
from grammar_svc.limits import SourceLimits
from grammar_svc.session import Kind as Entry
from grammar_svc.session import Session
from grammar_svc.sources import read_source
from grammar_svc.vocabulary import read_vocabulary
from meshkit.errors import ModelDirError
from meshkit.types import GrammarKind as Kind

MODEL = Path(compiler.__file__).parents[1] / "meshkit" / "models" / "v4-nano"
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "parameters": CITY, "strict": True}, {"name": "stop"}]
BEGIN, END = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
CALL = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
STOP = '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n'


@pytest.fixture(scope="module")
def vocabulary():
    return read_vocabulary(MODEL)


@pytest.fixture(scope="module")
def made(vocabulary):
    return compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary)


@pytest.fixture
def takes(made, vocabulary):
    """Whether a source takes a whole text."""

    def check(kind, source, text):
        source = source if isinstance(source, str) else json.dumps(source)
        grammar = compiler.compile_source(made, read_source(kind, source, SourceLimits()))
        matcher = compiler.new_matcher(grammar, list(vocabulary.eos_ids))
        first, *others = text.split(compiler.MARKER)  # which is one token, in whatever text
        good = matcher.accept_string(first)
        return good and all(map(marked, repeat(matcher), others)) and matcher.is_completed()

    def marked(matcher, text):
        return matcher.accept_token(vocabulary.tokens.index(compiler.MARKER)) and matcher.accept_string(text)

    return check


@pytest.mark.parametrize(
    "choice, parallel, text, taken",
    [
        ("required", True, f"\n\n{BEGIN}{CALL}{END}", True),
        ("required", True, f"\n\n{BEGIN}{CALL}{STOP}{END}", True),
        ("required", False, f"\n\n{BEGIN}{CALL}{STOP}{END}", False),
        ("required", True, "hello", False),
        ("required", True, f"\n\n{BEGIN}{END}", False),
        ({"name": "stop"}, True, f"\n\n{BEGIN}{STOP}{END}", True),
        ({"name": "stop"}, True, f"\n\n{BEGIN}{CALL}{END}", False),
        ("auto", True, "hello", True),
        ("auto", True, f"hello\n\n{BEGIN}{CALL}{END}", True),
        ("auto", True, f"hello\n\n{BEGIN}{CALL.replace('weather', 'other')}{END}", False),
        ("required", True, f"\n\n{BEGIN}{CALL.replace('city', 'town')}{END}", False),
    ],
)
def test_tool_calls_in_the_models_own_form(takes, choice, parallel, text, taken):
    assert takes(Kind.DSML_TOOLS, {"tools": TOOLS, "tool_choice": choice, "parallel": parallel}, text) is taken


@pytest.mark.parametrize("text", ["yes", 'say "no"', "line\nbreak"])
def test_choices_are_taken_literally(takes, text):
    source = ["yes", 'say "no"', "line\nbreak"]
    assert takes(Kind.CHOICE, source, text) and not takes(Kind.CHOICE, source, text + "x")


@pytest.mark.parametrize(
    "pattern", ["a.b", r"a\.b", "a[.]b", r"a[\].]b", "a.{0,2}b", r"[^.]+.b", "(?:a.|.a)b?", r"\[.\]", ".*"], ids=str
)
def test_a_dot_is_every_character_but_a_line_feed(takes, pattern):
    for text in ("a.b", "axb", "a\nb", "ab", "a]b", "a..b", "a\n.b", "[x]", "[\n]", "xa", "\na", "é.b", "\r"):
        assert takes(Kind.REGEX, pattern, text) is bool(re.fullmatch(pattern, text)), text


def test_structures_between_free_text(takes):
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    assert takes(Kind.STRUCTURAL_TAG, tag, "so <f>12</f> it is")
    assert not takes(Kind.STRUCTURAL_TAG, tag, "so <f>twelve</f> it is")


def test_json_object_is_an_object(takes):
    assert takes(Kind.JSON_OBJECT, "", '{"a": [1, null]}') and not takes(Kind.JSON_OBJECT, "", "[1]")


def test_bounded_strings_are_json(takes):
    schema = {"minLength": 1, "maxLength": 3}
    assert takes(Kind.JSON_SCHEMA, schema, '"aé一"') and not takes(Kind.JSON_SCHEMA, schema, '"abcd"')
    assert not any(takes(Kind.JSON_SCHEMA, schema, f'"{char}"') for char in ("", "\x1e", "\t", "\n", "\\", '"'))
    address = {"type": "string", "format": "ipv4"}
    assert takes(Kind.JSON_SCHEMA, address, '"10.0.255.1"') and not takes(Kind.JSON_SCHEMA, address, '"10.0.064.1"')


def test_a_forced_call_can_be_written_with_the_marker_token_only(made, vocabulary):
    source = {"tools": TOOLS, "tool_choice": "required"}
    matcher = compiler.new_matcher(
        compiler.compile_source(made, read_source(Kind.DSML_TOOLS, json.dumps(source), SourceLimits())), [1]
    )
    assert matcher.accept_string("\n\n<")
    rows = np.zeros((1, vocabulary.words), np.int32)
    matcher.fill_next_token_bitmask(rows)
    allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
    assert [vocabulary.tokens[token] for token in allowed] == [compiler.MARKER]


def test_white_space_may_be_forbidden(vocabulary):
    compact = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary, whitespace=0)
    grammar = compiler.compile_source(compact, read_source(Kind.JSON_OBJECT, "", SourceLimits()))
    assert compiler.new_matcher(grammar, [1]).accept_string('{"a":[1,2]}')
    assert not compiler.new_matcher(grammar, [1]).accept_string('{"a": ')
    assert compiler.revision(vocabulary) != compiler.revision(vocabulary, 0)


def test_a_bounded_value_of_a_tool_call_ends_at_its_tag(takes):
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 60}}, "required": ["city"]}
    tools = {"tools": [{"name": "weather", "parameters": city}], "tool_choice": "required"}
    assert takes(Kind.DSML_TOOLS, tools, f"\n\n{BEGIN}{CALL}{END}")
    inside = CALL.replace("Rome", "Rome</｜DSML｜parameter> or so")
    assert not takes(Kind.DSML_TOOLS, tools, f"\n\n{BEGIN}{inside}{END}")
    assert not takes(Kind.DSML_TOOLS, tools, f"\n\n{BEGIN}{CALL.replace('Rome', 'x' * 61)}{END}")


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"maxLength": 4}, ["", "Rome", "é一ab"], ["Paris", "<b>", "a<", "</"]),
        ({"minLength": 3}, ["abc", "abcdefgh"], ["", "ab", "a<c"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "a b"], ["a", "abcd"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("required", [True, False])
def test_bounds_of_a_tool_calls_values_hold(takes, bounds, good, bad, required):
    city = {"type": "object", "properties": {"city": {"type": "string", **bounds}, "day": {"type": "string"}}}
    city["required"] = ["city"] if required else []
    tools = {"tools": [{"name": "weather", "parameters": city}], "tool_choice": "required"}
    for text in (*good, *bad):
        call = f"\n\n{BEGIN}{CALL.replace('Rome', text)}{END}"
        assert takes(Kind.DSML_TOOLS, tools, call) is (text in good), text


def test_a_long_bound_of_a_tool_calls_value_is_not_written_out(made):
    sizes = []
    for bound in (20, 2000):
        city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": bound}}, "required": ["city"]}
        tools = {"tools": [{"name": "weather", "parameters": city}], "tool_choice": "required"}
        source = read_source(Kind.DSML_TOOLS, json.dumps(tools), SourceLimits())
        sizes.append(compiler.compile_source(made, source).memory_size_bytes)
    assert sizes[1] < 1.1 * sizes[0]


def test_a_long_bound_costs_no_more_than_a_short_one(made, vocabulary):
    rows, spent = np.zeros((1, vocabulary.words), np.int32), []
    for bound in (20, 2000):
        source = read_source(Kind.JSON_SCHEMA, json.dumps({"type": "string", "maxLength": bound}), SourceLimits())
        matcher = compiler.new_matcher(compiler.compile_source(made, source), [1])
        assert matcher.accept_string('"ab')
        taken = []
        for _ in range(5):
            began = time.thread_time()
            matcher.fill_next_token_bitmask(rows)
            taken.append(time.thread_time() - began)
        spent.append(min(taken))
    assert spent[1] < 20 * spent[0]


def test_days_and_hours_are_those_that_exist(takes):
    for kind, good, bad in [
        ("date", ["2026-11-30", "2024-02-28"], ["2026-11-31", "2026-02-30", "2026-13-01", "2026-00-10"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "10:00:00", "10:60:00Z"]),
        ("date-time", ["2026-11-30T10:00:00Z"], ["2026-11-31T10:00:00Z", "2026-11-30 10:00:00Z"]),
    ]:
        schema = {"type": "string", "format": kind}
        assert all(takes(Kind.JSON_SCHEMA, schema, f'"{text}"') for text in good)
        assert not any(takes(Kind.JSON_SCHEMA, schema, f'"{text}"') for text in bad)


def test_white_space_between_tokens_is_bounded(takes):
    assert takes(Kind.JSON_OBJECT, "", '{ "a": 1,\n"b": 2 }') and not takes(Kind.JSON_OBJECT, "", '{  "a": 1}')


def test_a_string_can_hold_no_control_token(made, vocabulary):
    grammar = compiler.compile_source(made, read_source(Kind.JSON_SCHEMA, '{"type":"string"}', SourceLimits()))
    session = Session(b"", vocabulary.eos_ids, (), None)
    session.give(grammar, compiler.MATCHERS)
    session.advance([vocabulary.tokens.index('"')])
    rows = np.zeros((1, vocabulary.words), np.int32)
    assert session.write(rows) == (Entry.MASKED, 1)
    bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little")
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    control = [entry["id"] for entry in spec["added_tokens"] if entry["content"] != "｜DSML｜"]
    assert not bits[control].any() and not bits[len(spec["model"]["vocab"]) + len(control) + 1 :].any()
    assert bits[vocabulary.tokens.index("a")] and vocabulary.think_end == 6


def test_a_built_grammar_is_the_compiled_one(made, vocabulary):
    source = read_source(Kind.REGEX, "[a-c]x", SourceLimits())
    build = compiler.Builder(compiler.tokenizer_info(vocabulary), vocabulary)
    with ThreadPoolExecutor(2) as pool:
        grammars = [compiler.compile_source(made, source), *pool.map(build, [source] * 4)]
    rows = np.zeros((len(grammars), vocabulary.words), np.int32)
    for index, one in enumerate(grammars):
        compiler.new_matcher(one, [1]).fill_next_token_bitmask(rows, index)
    assert rows[0].any() and (rows == rows[0]).all()


def test_a_folder_without_a_vocabulary_is_named(tmp_path):
    with pytest.raises(ModelDirError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelDirError, match="vocab"):
        read_vocabulary(tmp_path, vocab_size=9, eos_ids=(1,))
