"""Grammar sources: checked against every limit, brought to a canonical form, named.

JSON is parsed and written again compactly with its keys in their order; the grammar's id is a hash of that form and
of `grammar_rev`, which stands for compiler, vocabulary and this module's own rules. Nothing is compiled here.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from grammar_svc.limits import SourceLimits, canonical, check_bytes, parse_json
from grammar_svc.regexes import check_regex
from grammar_svc.schemas import normalise
from grammar_svc.verdict import Outcome, SourceError
from meshkit.types import GrammarKind

RULES: Final = 5  # raised when the canonical form, or what a canonical form means, changes
ID_BYTES: Final = 16
_TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_REPEAT: Final = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")
_STRING: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*')


@dataclass(frozen=True, slots=True)
class Source:
    """A source that may be compiled: `text` is canonical. Equal sources have equal ids."""

    kind: GrammarKind
    text: str

    def grammar_id(self, grammar_rev: str) -> bytes:
        """16 bytes."""
        name = f"{grammar_rev}\0{self.kind.name}\0{self.text}".encode()
        return hashlib.blake2b(name, digest_size=ID_BYTES).digest()


def grammar_rev(compiler: str, vocabulary: str) -> str:
    """Names everything but the source that decides what a grammar allows."""
    return hashlib.blake2b(f"{compiler}\0{vocabulary}\0{RULES}".encode(), digest_size=8).hexdigest()


def read_source(kind: int, text: str, limits: SourceLimits) -> Source:
    """Raises SourceError: INVALID naming the place, or TOO_LARGE naming the limit."""
    try:
        known = GrammarKind(kind)
    except ValueError:
        raise SourceError(f"kind {kind} is not known; this service has {[k.name for k in GrammarKind]}") from None
    try:
        return Source(known, _READERS[known](text, limits))
    except RecursionError:  # a chain of places deeper than any limit allows: the walk itself is bounded by depth
        raise SourceError("the source nests too deep", outcome=Outcome.TOO_LARGE) from None


def _json_schema(text: str, limits: SourceLimits) -> str:
    return canonical(normalise(parse_json(text, limits, limits.schema_bytes, "the schema"), limits))


def _json_object(text: str, limits: SourceLimits) -> str:
    if text:
        raise SourceError("json_object takes no text")
    return ""


def _regex(text: str, limits: SourceLimits) -> str:
    if not text:
        raise SourceError("the regular expression is empty")
    check_regex(text, limits)
    return text


def _ebnf(text: str, limits: SourceLimits) -> str:
    check_bytes(text, limits.ebnf_bytes, "the grammar")
    for found in _REPEAT.finditer(_STRING.sub(lambda m: " " * len(m[0]), text)):
        most = max(int(count[:10]) for count in found.groups() if count)
        if most > limits.repeat:
            line = text.count("\n", 0, found.start()) + 1
            message = f"a repeat of {most}, at most {limits.repeat} are taken"
            raise SourceError(message, f"line {line}", Outcome.TOO_LARGE)
    return text


def _choice(text: str, limits: SourceLimits) -> str:
    choices = parse_json(text, limits, limits.schema_bytes, "the choice")
    if not isinstance(choices, list) or not choices:
        raise SourceError("choice must be a list of at least one string")
    if len(choices) > limits.choices:
        raise SourceError(f"{len(choices)} choices, at most {limits.choices}", outcome=Outcome.TOO_LARGE)
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise SourceError("a choice is a string that is not empty", f"/{index}")
    return canonical(list(dict.fromkeys(choices)))


# ---- structural tags ------------------------------------------------------------------------------------------------


def _structural_tag(text: str, limits: SourceLimits) -> str:
    document = parse_json(text, limits, limits.tools_bytes, "the structural tag")
    if not isinstance(document, dict):
        raise SourceError("a structural tag is an object with format")
    if "structures" in document:
        document = _from_structures(document)
    if not isinstance(document.get("format"), dict):
        raise SourceError("must be an object with a type", "/format")
    return canonical({"type": "structural_tag", "format": _format(document["format"], "/format", limits)})


def _from_structures(document: dict[str, Any]) -> dict[str, Any]:
    """The older form: begin, schema and end of each structure, and the triggers before which text is free."""
    structures, triggers = document["structures"], document.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise SourceError("structures and triggers must be lists of at least one item", "/structures")
    tags = []
    for index, item in enumerate(structures):
        if not isinstance(item, dict) or not {"begin", "end"} <= item.keys() <= {"begin", "schema", "end"}:
            raise SourceError("a structure has begin, schema and end", f"/structures/{index}")
        content = {"type": "json_schema", "json_schema": item.get("schema", True)}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    return {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


def _format(node: Any, place: str, limits: SourceLimits) -> Any:
    """Check what is embedded in a format; its own shape is the compiler's to check."""
    if isinstance(node, list):
        return [_format(item, f"{place}/{index}", limits) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    result = {}
    for key, value in node.items():
        here = f"{place}/{key}"
        if key == "json_schema" and node.get("type") == "json_schema":
            result[key] = normalise(value, limits, here)
            result["max_whitespace_cnt"] = node.get("max_whitespace_cnt", 1)  # without a limit it may go on for ever
        elif key == "pattern" and node.get("type") == "regex" and isinstance(value, str):
            check_regex(value, limits, here)
            result[key] = value
        elif key == "grammar" and node.get("type") == "grammar" and isinstance(value, str):
            result[key] = _ebnf(value, limits)
        else:
            if key in ("min", "max") and isinstance(value, int) and value > limits.repeat:
                raise SourceError(f"a repeat of {value}, at most {limits.repeat}", here, Outcome.TOO_LARGE)
            result[key] = _format(value, here, limits)
    return result


def _dsml_tools(text: str, limits: SourceLimits) -> str:
    """Strict tools must be enforceable whole. Of others, parameters that are not are left free; name and form never."""
    document = parse_json(text, limits, limits.tools_bytes, "the tools")
    if not isinstance(document, dict) or not isinstance(document.get("tools"), list) or not document["tools"]:
        raise SourceError("must be an object with a list of at least one tool", "/tools")
    if unknown := document.keys() - {"tools", "tool_choice", "parallel"}:
        raise SourceError(f"unknown key {sorted(unknown)[0]!r}", f"/{sorted(unknown)[0]}")
    if len(document["tools"]) > limits.tools:
        message = f"{len(document['tools'])} tools, at most {limits.tools}"
        raise SourceError(message, "/tools", Outcome.TOO_LARGE)
    tools = [_tool(tool, f"/tools/{index}", limits) for index, tool in enumerate(document["tools"])]
    names = [tool["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise SourceError("two tools have one name", "/tools")
    choice, parallel = document.get("tool_choice", "auto"), document.get("parallel", True)
    if isinstance(choice, dict):
        if choice.keys() != {"name"} or choice["name"] not in names:
            raise SourceError(f"names none of the tools {', '.join(names[:8])}", "/tool_choice")
    elif choice not in ("auto", "required"):
        raise SourceError('must be "auto", "required" or {"name": NAME}', "/tool_choice")
    if not isinstance(parallel, bool):
        raise SourceError("must be true or false", "/parallel")
    return canonical({"tools": tools, "tool_choice": choice, "parallel": parallel})


def _tool(tool: Any, place: str, limits: SourceLimits) -> dict[str, Any]:
    if not isinstance(tool, dict) or not {"name"} <= tool.keys() <= {"name", "parameters", "strict"}:
        raise SourceError("a tool has name, parameters and strict", place)
    if not isinstance(tool["name"], str) or not _TOOL_NAME.fullmatch(tool["name"]):
        raise SourceError("a name has 1 to 128 letters, digits, _ and -", f"{place}/name")
    parameters, here = tool.get("parameters") or {}, f"{place}/parameters"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise SourceError("must be an object schema", here)
    anything: dict[str, Any] = {"type": "object", "additionalProperties": True}
    if not parameters.keys() - {"type"}:
        return {"name": tool["name"], "parameters": anything}
    try:
        return {"name": tool["name"], "parameters": normalise({"type": "object", **parameters}, limits, here)}
    except SourceError as error:
        if tool.get("strict") or error.outcome is not Outcome.INVALID:
            raise
        return {"name": tool["name"], "parameters": anything}


_READERS: Final = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.JSON_OBJECT: _json_object,
    GrammarKind.REGEX: _regex,
    GrammarKind.EBNF: _ebnf,
    GrammarKind.CHOICE: _choice,
    GrammarKind.STRUCTURAL_TAG: _structural_tag,
    GrammarKind.DSML_TOOLS: _dsml_tools,
}
