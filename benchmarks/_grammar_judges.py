"""The constrained requests of the mesh benchmark, each with a judge that shares no code with the grammar service.

Schemas are judged by `jsonschema`, expressions by `re`, grammars by an expression for the same language.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import _grammar_cases as cases
from meshkit.types import GrammarKind

DATA: Final = Path(__file__).parents[1] / "tests" / "data"
OWN_SCHEMAS: Final = 20


@dataclass(frozen=True, slots=True)
class Case:
    """`body` is what the request asks for, `kind` and `text` are the same as a grammar source."""

    name: str
    kind: GrammarKind
    text: str
    body: dict[str, Any]
    judge: Callable[[str], bool]


def function_schemas() -> list[dict[str, Any]]:
    """Parameters of 20 functions of bfcl-eval."""
    return [entry["schema"] for entry in _functions()]


def _functions() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((DATA / "bfcl_schemas.json").read_text())["schemas"]
    return entries


def mesh_cases() -> list[Case]:
    """40 schemas (20 of them parameters of functions in bfcl-eval), 20 expressions, 10 grammars."""
    schemas = [(f"schema {index}", schema) for index, schema in enumerate(cases.SCHEMAS[:OWN_SCHEMAS])]
    schemas += [(entry["name"], entry["schema"]) for entry in _functions()]
    return [
        *(_schema(name, schema) for name, schema in schemas),
        *(_expression(pattern) for pattern in cases.REGEXES),
        *(_grammar(name, grammar, pattern) for name, grammar, pattern in cases.GRAMMARS),
    ]


def schema_judge(schema: Any) -> Callable[[str], bool]:
    """Whether a text is JSON that `jsonschema` finds valid, formats included."""
    import jsonschema

    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)

    def judge(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    return judge


def pattern_judge(pattern: str, flags: re.RegexFlag = re.RegexFlag.NOFLAG) -> Callable[[str], bool]:
    """Whether `re` matches the whole text."""
    compiled = re.compile(pattern, flags)
    return lambda text: compiled.fullmatch(text) is not None


def _schema(name: str, schema: Any) -> Case:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    return Case(name, GrammarKind.JSON_SCHEMA, json.dumps(schema), body, schema_judge(schema))


def _expression(pattern: str) -> Case:
    return Case(pattern, GrammarKind.REGEX, pattern, {"regex": pattern}, pattern_judge(pattern, re.DOTALL))


def _grammar(name: str, grammar: str, pattern: str) -> Case:
    return Case(name, GrammarKind.EBNF, grammar, {"ebnf": grammar}, pattern_judge(pattern))
