"""Sources: limits first, canonical forms, what JSON Schema keywords pass, and refusals that name their place."""

import json

import pytest

from grammar_svc.limits import SourceLimits
from grammar_svc.schemas import ENFORCED, REFUSED
from grammar_svc.sources import Source, grammar_rev, read_source
from grammar_svc.verdict import Outcome, SourceError
from meshkit.types import GrammarKind as Kind

LIMITS = SourceLimits()


def read(kind, text):
    return read_source(kind, text if isinstance(text, str) else json.dumps(text), LIMITS)


def refusal(kind, text):
    with pytest.raises(SourceError) as caught:
        read(kind, text)
    return caught.value


def test_spacing_does_not_change_the_id_and_key_order_does():
    one = read(Kind.JSON_SCHEMA, '{"type": "object",\n "properties": {"a": {"type":"string"}, "b": {"type":"string"}}}')
    two = read(Kind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"string"}}}')
    other = read(Kind.JSON_SCHEMA, '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"string"}}}')
    assert one.grammar_id("r") == two.grammar_id("r") != other.grammar_id("r")
    assert one.grammar_id("r") != one.grammar_id("s") and len(one.grammar_id("r")) == 16
    assert Source(Kind.REGEX, "a").grammar_id("r") != Source(Kind.EBNF, "a").grammar_id("r")
    assert grammar_rev("xgrammar 1", "v") != grammar_rev("xgrammar 2", "v")


@pytest.mark.parametrize(
    "kind, text, outcome, words",
    [
        (99, "", Outcome.INVALID, "kind 99"),
        (Kind.JSON_SCHEMA, "{", Outcome.INVALID, "not JSON"),
        (Kind.JSON_SCHEMA, '{"type":"string","type":"null"}', Outcome.INVALID, "twice"),
        (Kind.JSON_SCHEMA, '{"const": NaN}', Outcome.INVALID, "NaN"),
        (Kind.JSON_SCHEMA, '{"const": "\\ud800"}', Outcome.INVALID, "surrogate"),
        (Kind.JSON_SCHEMA, '{"const": ' + "9" * 5000 + "}", Outcome.INVALID, "digits"),
        (Kind.JSON_SCHEMA, '{"title": "' + "x" * (64 << 10) + '"}', Outcome.TOO_LARGE, "65536"),
        (Kind.JSON_SCHEMA, '{"items":' * 65 + "{}" + "}" * 65, Outcome.TOO_LARGE, "deep"),
        (Kind.JSON_SCHEMA, {"enum": [0] * 5000}, Outcome.TOO_LARGE, "nodes"),
        (Kind.JSON_OBJECT, "{}", Outcome.INVALID, "no text"),
        (Kind.REGEX, "", Outcome.INVALID, "empty"),
        (Kind.REGEX, "a" * 5000, Outcome.TOO_LARGE, "4096"),
        (Kind.REGEX, "a{1,1001}", Outcome.TOO_LARGE, "1001"),
        (Kind.JSON_SCHEMA, {"pattern": "^[a-z]{1,129}$"}, Outcome.TOO_LARGE, "129, at most 128"),
        (Kind.JSON_SCHEMA, {"pattern": "^.{9,1}$"}, Outcome.INVALID, "greater"),
        (Kind.REGEX, "a\0", Outcome.INVALID, "NUL"),
        (Kind.EBNF, "x" * (65 << 10), Outcome.TOO_LARGE, "65536"),
        (Kind.EBNF, 'root ::= "{9999}" "a"{2,9999}', Outcome.TOO_LARGE, "9999"),
        (Kind.CHOICE, "[]", Outcome.INVALID, "at least one"),
        (Kind.CHOICE, '["a", 1]', Outcome.INVALID, "string"),
        (Kind.STRUCTURAL_TAG, "[]", Outcome.INVALID, "object"),
        (Kind.DSML_TOOLS, '{"tools":[]}', Outcome.INVALID, "at least one tool"),
        (Kind.DSML_TOOLS, {"tools": [{"name": f"t{i}"} for i in range(129)]}, Outcome.TOO_LARGE, "128"),
        (Kind.DSML_TOOLS, {"tools": [{"name": "a b"}]}, Outcome.INVALID, "letters"),
        (Kind.DSML_TOOLS, {"tools": [{"name": "a"}, {"name": "a"}]}, Outcome.INVALID, "one name"),
        (Kind.DSML_TOOLS, {"tools": [{"name": "a"}], "tool_choice": {"name": "b"}}, Outcome.INVALID, "none of"),
        (
            Kind.DSML_TOOLS,
            {"tools": [{"name": "a", "parameters": {"type": "array"}}]},
            Outcome.INVALID,
            "object",
        ),
    ],
)
def test_limits_and_shapes_come_first(kind, text, outcome, words):
    error = refusal(kind, text)
    assert error.outcome is outcome and words in error.message


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ({"type": "array", "items": {"uniqueItems": True, "items": {}}}, "/items/uniqueItems"),
        ({"minLenght": 3}, "/minLenght"),
        ({"$ref": "http://example.org/s"}, "/$ref"),
        ({"$ref": "#/$defs/none", "$defs": {}}, "/$ref"),
        ({"$ref": "#/title", "title": "x"}, "/$ref"),
        ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {"type": "integer"}}}, "/minimum"),
        ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, "/allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
        ({"type": "integer", "anyOf": [{}]}, "/type"),
        ({"type": "string", "enum": [1]}, "/enum"),
        ({"type": "string", "minimum": 1}, "/minimum"),
        ({"type": "string", "minLength": 2, "pattern": "a"}, ""),
        ({"type": "string", "format": "phone"}, "/format"),
        ({"type": "string", "pattern": "a^b"}, "/pattern"),
        ({"type": "number", "multipleOf": 0.1}, "/multipleOf"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "/multipleOf"),
        ({"type": "integer", "minimum": 1.5}, "/minimum"),
        ({"type": "object", "required": ["a"]}, "/required"),
        ({"type": "object", "additionalProperties": True, "minProperties": 1}, "/minProperties"),
        ({"patternProperties": {"a": {}}, "properties": {"b": {}}}, "/patternProperties"),
        ({"patternProperties": {"a": {}, "b": {}}}, "/patternProperties"),
        ({"type": "frob"}, "/type"),
        ({"minItems": 3, "maxItems": 2}, "/minItems"),
        ({"properties": {}, "items": {}}, ""),
        ({"properties": {"a": False}}, "/properties/a"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_place(schema, place):
    error = refusal(Kind.JSON_SCHEMA, schema)
    assert error.outcome is Outcome.INVALID and error.place == place


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_every_refused_keyword_is_refused(keyword):
    error = refusal(Kind.JSON_SCHEMA, {"type": "object", keyword: {}})
    assert error.place == f"/{keyword}" and keyword not in ENFORCED


@pytest.mark.parametrize(
    "schema, canonical",
    [
        (True, True),
        ({"title": "T", "description": "d"}, {}),
        ({"minLength": 2}, {"type": "string", "minLength": 2}),
        ({"minLength": 0}, {"type": "string"}),
        ({"pattern": "^.{0,900}$"}, {"type": "string", "maxLength": 900}),
        ({"type": "object"}, {"type": "object", "additionalProperties": True}),
        (
            {"properties": {"a": {}}},
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ),
        ({"type": "array", "minItems": 1}, {"type": "array", "minItems": 1, "items": True}),
        ({"type": "integer", "minimum": 2.0}, {"type": "integer", "minimum": 2}),
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{"type": "string"}, {"type": "null"}]}),
    ],
)
def test_schemas_are_written_out(schema, canonical):
    assert json.loads(read(Kind.JSON_SCHEMA, schema).text) == canonical


def test_branches_told_apart_by_a_constant_may_be_one_of():
    def branch(kind):
        return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}

    assert read(Kind.JSON_SCHEMA, {"oneOf": [branch("a"), branch("b")]})
    assert refusal(Kind.JSON_SCHEMA, {"oneOf": [branch("a"), branch("a")]}).place == "/oneOf"


@pytest.mark.parametrize("pattern", [r"\bab", r"(a)\1", r"\Aab\Z", "a$b", "[[:alpha:]]", "[]a]", r"\p{L}", "^a|b"])
def test_expressions_that_would_be_misread_are_refused(pattern):
    assert "position" in refusal(Kind.REGEX, pattern).message


@pytest.mark.parametrize("pattern", ["^a|b$", "^[a-z]+$", r"\d{3}-\d{2,5}", r"a\.b\\", "[^]a]"[:1] + "a]", "(a|b)*?"])
def test_expressions_with_one_meaning_are_taken(pattern):
    assert read(Kind.REGEX, pattern).text == pattern


def test_strict_tools_are_enforced_or_refused_and_others_left_free():
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    text = read(Kind.DSML_TOOLS, {"tools": [{"name": "t", "parameters": loose}]}).text
    assert json.loads(text)["tools"][0]["parameters"] == {"type": "object", "additionalProperties": True}
    error = refusal(Kind.DSML_TOOLS, {"tools": [{"name": "t", "parameters": loose, "strict": True}]})
    assert error.place == "/tools/0/parameters/properties/a/uniqueItems"


def test_structural_tags_are_searched_for_schemas():
    bad = {"type": "json_schema", "json_schema": {"not": {}}}
    tag = {"type": "tag", "begin": "<a>", "content": bad, "end": "</a>"}
    error = refusal(Kind.STRUCTURAL_TAG, {"format": {"type": "sequence", "elements": [tag]}})
    assert error.place == "/format/elements/0/content/json_schema/not"
    old = {"structures": [{"begin": "<a>", "schema": {"type": "string"}, "end": "</a>"}], "triggers": ["<a"]}
    assert json.loads(read(Kind.STRUCTURAL_TAG, old).text)["format"]["triggers"] == ["<a"]
