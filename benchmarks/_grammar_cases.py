"""What the grammar benchmark compiles: schemas, expressions, grammars, bombs, and the keyword table."""

from typing import Any

S: dict[str, Any] = {"type": "string", "maxLength": 20}
N: dict[str, Any] = {"type": "integer", "minimum": -1000, "maximum": 1000}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object schema with these properties, all required unless told otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def listed(items: Any, low: int = 0, high: int = 4) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


ADDRESS = closed(street=S, city=S, zip={"type": "string", "pattern": "^[0-9]{5}$"})
SCHEMAS: list[dict[str, Any]] = [
    closed(name=S, age={"type": "integer", "minimum": 0, "maximum": 150}),
    closed(name=S, tags=listed(S)),
    closed(user=closed(id=N, address=ADDRESS), active={"type": "boolean"}),
    closed(unit={"enum": ["celsius", "fahrenheit"]}, location=S),
    closed(items=listed(closed(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, count=N), 1, 3)),
    closed(date={"type": "string", "format": "date"}, time={"type": "string", "format": "time"}),
    closed(["a"], a=N, b=S, c={"type": "boolean"}, d={"type": "null"}),
    closed(value={"anyOf": [N, S, {"type": "null"}]}),
    closed(shape={"oneOf": [closed(kind={"const": "circle"}, r=N), closed(kind={"const": "square"}, side=N)]}),
    {**closed(root={"$ref": "#/$defs/node"}), "$defs": {"node": closed(["v"], v=N, next={"$ref": "#/$defs/node"})}},
    closed(ip={"type": "string", "format": "ipv4"}, id={"type": "string", "format": "uuid"}),
    closed(score={"type": "number", "minimum": 0, "maximum": 1}),
    closed(n={"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 17}),
    {"type": "array", "prefixItems": [N, S], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": N, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    closed(email={"type": "string", "format": "email"}),
    closed(matrix=listed(listed(N, 2, 2), 2, 2)),
    closed(note={"type": ["string", "null"], "maxLength": 12}, on={"type": "string", "format": "date-time"}),
    closed(step={"type": "integer", "multipleOf": 5}),
    closed(config={"const": {"mode": "fast", "level": 3}}),
    closed(["q"], q=S, limit={"type": "integer", "minimum": 1, "maximum": 100}, order={"enum": ["asc", "desc"]}),
    closed(None, **{f"field_{n}": N for n in range(12)}),
    closed(deep=closed(deeper=closed(deepest=closed(leaf=S)))),
    listed({"enum": ["red", "green", "blue"]}, 1, 5),
    closed(text={"type": "string", "minLength": 3, "maxLength": 8}),
    {"enum": ["yes", "no", None, 3]},
    {"type": "boolean"},
    closed(any={"anyOf": [closed(a=N), listed(N, 1, 2)]}),
    closed(
        path={"type": "string", "pattern": "^(/[a-z]{1,8}){1,4}$"}, code={"type": "string", "pattern": "[A-F0-9]{6}"}
    ),
]

REGEXES = [
    r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)", r"[A-Z][a-z]{2,8}", r"\d{4}-\d{2}-\d{2}", r"#[0-9a-f]{6}", r"a*b+c?",
    r"(foo|bar){1,3}", r"[^a-z]{2,5}", r"\w{3,9}@\w{3,9}\.(com|org)", r"([01]\d|2[0-3]):[0-5]\d",
    r"-?\d{1,4}(\.\d{1,3})?", r"\$\d{1,3}(,\d{3}){0,2}", r"(a|b)*c", r"[\d\-x]{5}", r"x{0,4}y",
    r"\(\d{2}\)", r"(?:ab|cd){2}", r"[äöü]{1,4}",
    r"\s?end", r".{3,6}",
]  # fmt: skip

# Name, grammar, and an expression that describes the same language.
GRAMMARS = [
    ("digits", "root ::= [0-9]+", r"[0-9]+"),
    ("alternatives", 'root ::= "a" | "bc" | "def"', r"a|bc|def"),
    ("sum", 'root ::= num (" + " num)*\nnum ::= [1-9] [0-9]{0,3}', r"[1-9]\d{0,3}( \+ [1-9]\d{0,3})*"),
    ("pairs", 'root ::= p (";" p){0,3}\np ::= [a-z]{2} "=" [0-9]{1,3}', r"[a-z]{2}=\d{1,3}(;[a-z]{2}=\d{1,3}){0,3}"),
    ("quoted", 'root ::= "\\"" [a-z ]{0,12} "\\""', r'"[a-z ]{0,12}"'),
    ("recursive", 'root ::= "x" root | "y"', r"x*y"),
    ("lines", 'root ::= line{1,3}\nline ::= "- " [a-z]{1,8} "\\n"', r"(- [a-z]{1,8}\n){1,3}"),
    ("optional", 'root ::= "a"? "b"? "c"', r"a?b?c"),
    ("negated", "root ::= [^0-9]{2,4}", r"[^0-9]{2,4}"),
    ("unicode", 'root ::= ("日" | "本"){1,4}', r"(日|本){1,4}"),
]  # fmt: skip
CHOICES = ["positive", "negative", "neutral", 'with "quotes"', "line\nbreak"]


def thirty_patterns() -> dict[str, Any]:
    """A schema whose cost is its thirty expressions."""
    return {
        "type": "object",
        "properties": {
            f"p{n}": {
                "type": "string",
                "pattern": f"^[a-z]{{1,{n + 5}}}(-[0-9]{{1,{n + 2}}}){{0,3}}@[A-Z]{{2,{n + 3}}}$",
            }
            for n in range(30)
        },
    }


def runaway() -> dict[str, Any]:
    """A schema that would compile for minutes."""
    return {
        "type": "object",
        "properties": {
            f"p{n}": {"type": "string", "pattern": f"^([a-z]{{1,90}}-?){{1,90}}([A-Z]{{1,90}}_?){{1,90}}[0-9]{n}$"}
            for n in range(60)
        },
    }


# Keyword, schema, values that it takes, values that it must not take.
KEYWORDS: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type string", {"type": "string"}, ["a"], [1, None]),
    ("type integer", {"type": "integer"}, [1, -2], [1.5, "1"]),
    ("type number", {"type": "number"}, [1, 1.5, -2e10], ["1"]),
    ("type boolean", {"type": "boolean"}, [True], [1]),
    ("type null", {"type": "null"}, [None], [0]),
    ("type list", {"type": ["string", "null"]}, ["a", None], [1]),
    ("enum", {"enum": ["a", 1]}, ["a", 1], ["b", 2]),
    ("const", {"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    ("minLength", {"minLength": 2}, ["ab"], ["a", 1]),
    ("maxLength", {"maxLength": 2}, ["ab"], ["abc"]),
    ("pattern", {"pattern": "^a+$"}, ["aa"], ["b"]),
    ("format date", {"type": "string", "format": "date"}, ["2026-01-31"], ["x"]),
    ("format date-time", {"type": "string", "format": "date-time"}, ["2026-01-31T10:00:00Z"], ["x"]),
    ("format email", {"type": "string", "format": "email"}, ["a@b.org"], ["x"]),
    ("format ipv4", {"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["1.2.3.400"]),
    ("format uuid", {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
    ("format other", {"type": "string", "format": "phone"}, [], []),
    ("pattern + maxLength", {"type": "string", "pattern": "a+", "maxLength": 2}, ["aa"], ["aaa"]),
    ("minimum", {"type": "integer", "minimum": 3}, [3, 400], [2, -5]),
    ("maximum", {"type": "number", "maximum": 2.5}, [2.5, -3], [2.6, 10]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, [2], [3]),
    ("multipleOf integer", {"type": "integer", "multipleOf": 5}, [10, 0], [7]),
    ("multipleOf number", {"type": "number", "multipleOf": 0.5}, [1.5], [1.3]),
    ("multipleOf + minimum", {"type": "integer", "multipleOf": 5, "minimum": 3}, [5], [7]),
    ("properties", {"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {}], [{"a": "x"}]),
    ("required", closed(a=N, b=N), [{"a": 1, "b": 2}], [{"a": 1}]),
    ("required undeclared", {"type": "object", "required": ["z"]}, [{"z": 1}], [{}]),
    ("additionalProperties", {"additionalProperties": {"type": "integer"}}, [{"q": 1}], [{"q": "x"}]),
    ("additionalProperties no", closed(a=N), [{"a": 1}], [{"a": 1, "b": 2}]),
    ("patternProperties", {"patternProperties": {"^x+$": {"type": "integer"}}}, [{"xx": 1}], [{"xx": "a"}, {"y": 1}]),
    ("propertyNames", {"propertyNames": {"pattern": "^x+$"}}, [{"xx": 1}], [{"y": 1}]),
    ("minProperties", {**closed([], a=N, b=N), "minProperties": 1}, [{"a": 1}], [{}]),
    ("maxProperties", {**closed([], a=N, b=N), "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}]),
    ("minProperties open", {"type": "object", "additionalProperties": True, "minProperties": 1}, [{"a": 1}], [{}]),
    ("unevaluatedProperties", {"properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ("items", {"items": {"type": "integer"}}, [[1, 2], []], [["a"]]),
    ("prefixItems", {"prefixItems": [{"type": "string"}], "items": False}, [["a"]], [["a", 1], [1]]),
    ("minItems", {"type": "array", "minItems": 2}, [[1, 2]], [[1]]),
    ("maxItems", {"type": "array", "maxItems": 2}, [[1, 2]], [[1, 2, 3]]),
    ("uniqueItems", {"type": "array", "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    ("contains", {"contains": {"type": "integer"}}, [[1]], [["a"]]),
    ("anyOf", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [True]),
    ("oneOf disjoint", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [True]),
    ("oneOf overlapping", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1.5], [1]),
    ("allOf single", {"allOf": [{"type": "integer", "minimum": 2}]}, [3], [1]),
    ("allOf several", {"allOf": [{"type": "integer"}, {"minimum": 2}]}, [3], [1]),
    ("anyOf + type", {"type": "integer", "anyOf": [{"minimum": 5}]}, [6], [1]),
    ("not", {"not": {"type": "integer"}}, ["a"], [1]),
    ("if then", {"if": {"type": "integer"}, "then": {"minimum": 3}}, [4], [1]),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}, [{}], [{"a": 1}]),
    ("$ref local", {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, [1], ["a"]),
    ("$ref recursive", SCHEMAS[9], [{"root": {"v": 1, "next": {"v": 2}}}], [{"root": {"next": {"v": 2}}}]),
    ("$ref remote", {"$ref": "https://example.org/schema"}, [], []),
    ("$ref + siblings", {"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": {"type": "integer"}}}, [6], [1]),
    ("$dynamicRef", {"$dynamicRef": "#x"}, [], []),
    ("unevaluatedItems", {"unevaluatedItems": False}, [], []),
    ("additionalItems", {"additionalItems": False}, [], []),
    ("nullable", {"type": "string", "nullable": True}, ["a", None], []),
    ("unknown keyword", {"type": "string", "minLenght": 3}, ["abc"], ["a"]),
    ("annotations", {"title": "t", "description": "d", "type": "integer", "default": 1}, [1], ["a"]),
]


_ARGUMENTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 256},
    {"type": "integer", "minimum": 0, "maximum": 100},
    {"type": "string", "enum": ["celsius", "fahrenheit", "kelvin"]},
    {"type": "array", "items": {"type": "string"}, "maxItems": 10},
    {"type": "object", "properties": {"lat": {"type": "number"}, "label": {"type": "string", "maxLength": 80}}},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uri"},
    {"type": "boolean"},
]


def many_tools(count: int) -> dict[str, Any]:
    """A call of one of so many tools is demanded, each with arguments of its own, every second one required."""
    tools = []
    for n in range(count):
        names = [f"argument_{n}_{k}" for k in range(2 + n % 7)]
        properties = {name: _ARGUMENTS[(n * 5 + k) % len(_ARGUMENTS)] for k, name in enumerate(names)}
        parameters = {"type": "object", "properties": properties, "required": names[::2]}
        tools.append({"name": f"tool_{n}", "parameters": parameters})
    return {"tools": tools, "tool_choice": "required", "parallel": True}
