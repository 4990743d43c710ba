"""Limits on grammar sources that are checked before any work: bytes, depth, nodes, counts.

Parsing is bounded as well: nesting is counted in the text first, so that no recursion limit is ever met.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grammar_svc.verdict import Outcome, SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimits:
    """Sizes are bytes of UTF-8. A JSON document's nodes are its objects, arrays and scalars."""

    schema_bytes: int = 64 << 10
    schema_depth: int = 64
    schema_nodes: int = 4096
    regex_bytes: int = 4 << 10
    repeat: int = 1000
    pattern_repeat: int = 128  # inside a JSON string; beyond it a mask takes 3 to 30 ms, and every slot waits for it
    ebnf_bytes: int = 64 << 10
    tools: int = 128
    tools_bytes: int = 256 << 10
    choices: int = 4096


def check_bytes(text: str, most: int, what: str) -> None:
    """Refuse text that is too long, holds NUL, or cannot be UTF-8."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise SourceError(f"{what} holds a lone surrogate", f"character {error.start}") from None
    if size > most:
        raise SourceError(f"{what} has {size} bytes, at most {most} are taken", outcome=Outcome.TOO_LARGE)
    if (at := text.find("\0")) >= 0:
        raise SourceError(f"{what} holds a NUL character", f"character {at}")


def parse_json(text: str, limits: SourceLimits, most_bytes: int, what: str) -> Any:
    """The document, its key order kept. Duplicate keys, NaN and infinities are refused: nobody means them."""
    check_bytes(text, most_bytes, what)
    depth = _depth(text)
    if depth > limits.schema_depth:
        raise SourceError(f"{what} nests {depth} deep, at most {limits.schema_depth}", outcome=Outcome.TOO_LARGE)
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        canonical(document).encode()
    except json.JSONDecodeError as error:
        raise SourceError(f"{what} is not JSON: {error.msg}", f"character {error.pos}") from None
    except SourceError:
        raise
    except ValueError as error:  # a number of thousands of digits, a lone surrogate behind an escape
        raise SourceError(f"{what} is not JSON that can be used: {str(error)[:200]}") from None
    nodes = sum(1 for _ in walk(document))
    if nodes > limits.schema_nodes:
        raise SourceError(f"{what} has {nodes} nodes, at most {limits.schema_nodes}", outcome=Outcome.TOO_LARGE)
    return document


def canonical(document: Any) -> str:
    """Compact JSON with the keys in their given order: the order is part of the output."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def walk(document: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every node with its JSON pointer."""
    yield place, document
    if isinstance(document, dict):
        for key, value in document.items():
            yield from walk(value, f"{place}/{key}")
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from walk(value, f"{place}/{index}")


def is_number(value: Any) -> bool:
    """A finite JSON number; booleans are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _depth(text: str) -> int:
    depth = deepest = 0
    inside = escaped = False
    for char in text:
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise SourceError(f"the key {twice!r} stands twice in one object")
    return found


def _no_constant(name: str) -> float:
    raise SourceError(f"{name} is not JSON")
