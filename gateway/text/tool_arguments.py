"""A call's parameters, as they arrive, to the text of one JSON object.

Text comes out as soon as it is certain, and what has come out of a closed call is always valid JSON. String values are
escaped piece by piece; other values wait for their end, since only then it is known whether they are JSON. A schema
decides only where the model did not say which kind a value is; values are never converted to fit it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn


class ArgumentsWriter:
    """The arguments of one call. Every method returns the text that it adds, often empty."""

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        """`schema` is the function's `parameters`; None if the function is unknown."""
        self._schema = schema
        self._started = False
        self._string = False
        self._held: list[str] = []

    def begin(self, key: str, string: bool | None) -> str:
        """A parameter; `string` is None if its tag does not say."""
        self._string = _wants_string(self._schema, key) if string is None else string
        self._held.clear()
        before = ", " if self._started else "{"
        self._started = True
        return f"{before}{_quoted(key)}: " + ('"' if self._string else "")

    def value(self, text: str) -> str:
        """A piece of the parameter's value."""
        if self._string:
            return _quoted(text)[1:-1]
        self._held.append(text)
        return ""

    def end(self) -> str:
        """The end of the value. What was to be JSON and is not becomes a string."""
        if self._string:
            return '"'
        text = "".join(self._held)
        self._held.clear()
        return text if is_json(text) else _quoted(text)

    def body(self, text: str) -> None:
        """Text between the parameters; if the call has none, it may be the arguments themselves."""
        if not self._started and (self._held or text.lstrip().startswith("{")):
            self._held.append(text)

    def close(self) -> str:
        """The end of the call."""
        if self._started:
            return "}"
        text = "".join(self._held).strip()
        return text if text and is_json(text) else "{}"


def is_json(text: str) -> bool:
    """Whether a text is one JSON value; NaN, infinities and nesting too deep to check are not."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wants_string(schema: Mapping[str, Any] | None, key: str) -> bool:
    """Whether the schema allows a string and nothing else under this key."""
    properties = schema.get("properties") if schema else None
    inner = properties.get(key) if isinstance(properties, Mapping) else None
    return isinstance(inner, Mapping) and inner.get("type") in ("string", ["string"])
