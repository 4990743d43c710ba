"""What an answer must look like: the fields of every dialect that say so, as one grammar source or none.

Only shapes are checked here: that one field constrains, and that it holds what it should. Whether a schema, a regular
expression or a grammar can be had is the grammar service's verdict, which comes back through `Constraint.refused` as a
400 about the field the client wrote. Rules for tool calls are `gateway.tool_rules`'.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.errors import ApiError, invalid
from gateway.text.chat_encoding import ResponseFormat
from meshkit.types import NO_GRAMMAR_SERVICE, GrammarKind, GrammarSource

MAX_BYTES: Final = 512 << 10  # more than the grammar service takes of any kind, less than the wire does

_FORMATS: Final = ("text", "json_object", "json_schema", "regex", "structural_tag")
_HINTS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_TOOL_PLACE: Final = re.compile(r"/tools/(?P<index>\d+)(?P<rest>(?:/.*)?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar source and the request field it came from.

    `tools` are the places in the request's list of the tools that the source numbers; empty for other sources.
    """

    kind: GrammarKind
    text: str
    param: str
    tools: tuple[int, ...] = ()

    @property
    def is_json(self) -> bool:
        return self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)

    def source(self, *, thinking: bool) -> GrammarSource:
        """`thinking`: the output begins with reasoning, which is left alone."""
        return GrammarSource(kind=self.kind, text=self.text, thinking=thinking)

    def refused(self, message: str, place: str) -> ApiError:
        """What the client is told when the mesh says that this can never be had; `place` is within the source."""
        param = self.param
        if place == NO_GRAMMAR_SERVICE:
            return ApiError(501, f"{param}: {message}", param=param)
        if (found := _TOOL_PLACE.fullmatch(place)) and int(found["index"]) < len(self.tools):
            param, place = f"tools[{self.tools[int(found['index'])]}].function", found["rest"]
        where = f"{param} at {place}" if place else param
        return ApiError(400, f"{where}: {message}", param=param, place=place)


class ConstraintFields(Protocol):
    """The fields that constrain the output, as `schema.SamplingFields` has them."""

    regex: Any
    ebnf: Any
    json_schema: Any
    structural_tag: Any
    choice: Any
    structured_outputs: Any
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any
    response_format: Any


def constraint_of(fields: ConstraintFields, names: Mapping[str, str]) -> Constraint | None:
    """What the request's one constraining field asks for; 400 for two of them. `names` are the dialect's own."""
    given = [field for field in (*_READERS, "structured_outputs") if getattr(fields, field) is not None]
    wanted = fields.response_format
    if wanted is not None and format_of(wanted) != "text":
        given.append("response_format")
    shown = [names.get(field, field) for field in given]
    if len(given) > 1:
        raise invalid(shown[1], f"{' and '.join(shown)} constrain the output at once; send one of them")
    if not given:
        return None
    field, param = given[0], shown[0]
    if field == "response_format":
        return _from_format(wanted)
    if field == "structured_outputs":
        return _structured(fields.structured_outputs, param)
    return _READERS[field](getattr(fields, field), param)


def format_of(value: Any) -> ResponseFormat:
    """The type of a `response_format`, which must be known."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _FORMATS:
        raise invalid("response_format", f"response_format.type must be one of {', '.join(_FORMATS)}")
    known: ResponseFormat = kind
    return known


def format_schema(value: dict[str, Any]) -> dict[str, Any]:
    """The schema of a `response_format` of type json_schema."""
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise invalid("response_format", "response_format.json_schema must be an object whose schema is an object")
    return schema


def json_text(value: Any, param: str) -> str:
    """JSON in the given key order, within what may travel."""
    try:
        return _bounded(json.dumps(value, ensure_ascii=False, allow_nan=False), param)
    except (ValueError, RecursionError) as error:
        raise invalid(param, f"{param} cannot be written as JSON: {error}") from None


def _from_format(value: dict[str, Any]) -> Constraint:
    param, kind = "response_format", value["type"]
    if kind == "json_schema":
        return _json(format_schema(value), param)
    if kind == "json_object":
        return Constraint(GrammarKind.JSON_OBJECT, "", param)
    if kind == "regex":
        return _regex(value.get("regex"), f"{param}.regex")
    return _tag({key: held for key, held in value.items() if key != "type"}, param)


def _structured(value: Any, param: str) -> Constraint:
    """vLLM's one object for all kinds."""
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be an object with one of {', '.join(_STRUCTURED)}")
    for hint in _HINTS:
        if value.get(hint):
            raise invalid(f"{param}.{hint}", f"{param}.{hint} is not supported: JSON is written in one way here")
    given = [key for key in _STRUCTURED if value.get(key) not in (None, False)]
    if len(given) != 1:
        held = f"has {' and '.join(given)}" if given else "has none of them"
        raise invalid(param, f"{param} must have exactly one of {', '.join(_STRUCTURED)}; it {held}")
    return _STRUCTURED[given[0]](value[given[0]], f"{param}.{given[0]}")


def _json(value: Any, param: str) -> Constraint:
    if isinstance(value, str):
        text = _text(value, param, "a JSON schema")
    elif isinstance(value, dict):
        text = json_text(value, param)
    else:
        raise invalid(param, f"{param} must be a JSON schema: an object, or its text")
    return Constraint(GrammarKind.JSON_SCHEMA, text, param)


def _json_object(value: Any, param: str) -> Constraint:
    if value is not True:
        raise invalid(param, f"{param} must be true or false")
    return Constraint(GrammarKind.JSON_OBJECT, "", param)


def _regex(value: Any, param: str) -> Constraint:
    return Constraint(GrammarKind.REGEX, _text(value, param, "a regular expression"), param)


def _ebnf(value: Any, param: str) -> Constraint:
    return Constraint(GrammarKind.EBNF, _text(value, param, "a grammar whose first rule is root"), param)


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise invalid(param, f"{param} must be a list of at least one string, none of them empty")
    return Constraint(GrammarKind.CHOICE, json_text(value, param), param)


def _tag(value: Any, param: str) -> Constraint:
    if isinstance(value, dict) and ("format" in value or "structures" in value):
        return Constraint(GrammarKind.STRUCTURAL_TAG, json_text(value, param), param)
    if isinstance(value, str):
        return Constraint(GrammarKind.STRUCTURAL_TAG, _text(value, param, "a structural tag"), param)
    raise invalid(param, f"{param} must be a structural tag: an object with format (or structures), or its text")


def _text(value: Any, param: str, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(param, f"{param} must be {what}: a string that is not empty")
    return _bounded(value, param)


def _bounded(text: str, param: str) -> str:
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise invalid(param, f"{param} has {size} bytes; allowed are {MAX_BYTES}")
    return text


_Reader = Callable[[Any, str], Constraint]

_READERS: Final[Mapping[str, _Reader]] = {
    "regex": _regex,
    "ebnf": _ebnf,
    "json_schema": _json,
    "structural_tag": _tag,
    "choice": _choice,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
}
_STRUCTURED: Final[Mapping[str, _Reader]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json_object,
    "structural_tag": _tag,
}
