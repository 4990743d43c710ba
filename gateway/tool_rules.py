"""Which tools may or must be called, and the grammar that keeps the model to it.

A call that must be made, tools that are strict, and a choice among some of the tools need a grammar; other tools are
left to the model, as the prompt asks. Where the answer has a format of its own beside tools that may be called, the
grammar allows either. Prompts show all tools whatever may be called; that is `text.chat_encoding`'s.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.constraints import Constraint, json_text
from gateway.errors import invalid
from gateway.text.chat_encoding import ToolChoice
from gateway.text.chat_messages import ChatError, ToolSpec
from gateway.text.tool_encoding import strict_parameters
from meshkit.types import GrammarKind

_SHAPES: Final = "none, auto, required, {type: function, function: {name}} or {type: allowed_tools, allowed_tools}"
_ANY_OBJECT: Final = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class ToolRule:
    """`choice` is the prompt's word; `allowed` are places in `tools`, of those that may be called."""

    choice: ToolChoice
    tools: tuple[ToolSpec, ...]
    allowed: tuple[int, ...]

    @property
    def forced(self) -> bool:
        """A call must be made."""
        return self.choice in ("required", "named")

    @property
    def needs_grammar(self) -> bool:
        """Asking alone does not promise it."""
        if self.choice == "none" or not self.tools:
            return False
        return self.forced or len(self.allowed) < len(self.tools) or any(tool.strict for tool in self._callable)

    @property
    def _callable(self) -> list[ToolSpec]:
        return [self.tools[index] for index in self.allowed]

    def constraint(self, *, parallel: bool, answer: Constraint | None = None) -> Constraint | None:
        """The grammar of the whole output. `answer` is that of an answer without calls, None where it is free.

        Raises 400 where a call must be made and the answer has a format, and for what no strict tool can hold.
        """
        if self.forced and answer is not None:
            message = f"{answer.param} and a tool_choice that asks for a call cannot both shape the answer"
            raise invalid(answer.param, message)
        if answer is not None and self.tools and self.choice == "auto":
            return self._either(answer, parallel=parallel)
        if not self.needs_grammar:
            return answer
        choice: Any = {"name": self._callable[0].name} if self.choice == "named" else self.choice
        payload = {"tools": self._listed(), "tool_choice": choice, "parallel": parallel}
        param = "tool_choice" if self.forced else "tools"
        return Constraint(GrammarKind.DSML_TOOLS, json_text(payload, "tools"), param, self.allowed)

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {"name": self.tools[index].name, "parameters": self._parameters(index), "strict": self.tools[index].strict}
            for index in self.allowed
        ]

    def _parameters(self, index: int) -> Mapping[str, Any]:
        try:
            parameters: Mapping[str, Any] = strict_parameters(self.tools[index], f"tools[{index}]")
        except ChatError as error:
            raise invalid(error.param, error.message) from None
        return parameters

    def _either(self, answer: Constraint, *, parallel: bool) -> Constraint:
        """The answer in its format, or calls alone. Of tools that are not strict only the names are kept to."""
        invokes = [_invoke(tool, self._parameters(index)) for index, tool in zip(self.allowed, self._callable)]
        block = {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "\n\n<｜DSML｜tool_calls>\n"},
                {
                    "type": "tags_with_separator",
                    "tags": invokes,
                    "separator": "",
                    "at_least_one": True,
                    "stop_after_first": not parallel,
                },
                {"type": "const_string", "value": "</｜DSML｜tool_calls>"},
            ],
        }
        document = {"format": {"type": "or", "elements": [_answer_format(answer), block]}}
        return Constraint(GrammarKind.STRUCTURAL_TAG, json_text(document, answer.param), answer.param)


def _invoke(tool: ToolSpec, parameters: Mapping[str, Any]) -> dict[str, Any]:
    schema = parameters if tool.strict else _ANY_OBJECT
    content = {"type": "json_schema", "json_schema": schema, "style": "deepseek_xml"}
    return {
        "type": "tag",
        "begin": f'<｜DSML｜invoke name="{tool.name}">\n',
        "content": content,
        "end": "</｜DSML｜invoke>\n",
    }


def _answer_format(answer: Constraint) -> Any:
    """A constraint as a part of a structural tag."""
    match answer.kind:
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": _ANY_OBJECT}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": answer.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": answer.text}
    try:
        document = json.loads(answer.text)
    except ValueError as error:
        raise invalid(answer.param, f"{answer.param} is not JSON: {error}") from None
    if answer.kind is GrammarKind.JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": document}
    if answer.kind is GrammarKind.CHOICE:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in document]}
    if not isinstance(document, dict) or not isinstance(document.get("format"), dict):
        raise invalid(answer.param, f"{answer.param}: beside tools a structural tag needs a format")
    return document["format"]


def tool_rule(choice: object, tools: Sequence[ToolSpec]) -> ToolRule:
    """What `tool_choice` says; a tool that it names must be among `tools`."""
    every = tuple(range(len(tools)))
    if choice is None or choice == "auto":
        return ToolRule("auto", tuple(tools), every)
    if choice == "none":
        return ToolRule("none", tuple(tools), every)
    if choice != "required" and not isinstance(choice, dict):
        raise invalid("tool_choice", f"tool_choice must be {_SHAPES}")
    mode: ToolChoice = "required"
    names: list[str] | None = None
    if isinstance(choice, dict):
        mode, names = _chosen(choice)
    if not tools:
        raise invalid("tool_choice", "tool_choice asks for a tool, but tools is empty")
    if names is None:
        return ToolRule(mode, tuple(tools), every)
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"tool_choice names {name[:80]!r}, which is not among tools")
    return ToolRule(mode, tuple(tools), tuple(index for index, name in enumerate(known) if name in names))


def _chosen(choice: Any) -> tuple[ToolChoice, list[str]]:
    """Mode and names of the two objects."""
    if choice.get("type") == "function":
        return "named", [_name(choice)]
    held = choice.get("allowed_tools")
    if choice.get("type") != "allowed_tools" or not isinstance(held, dict):
        raise invalid("tool_choice", f"tool_choice must be {_SHAPES}")
    mode, listed = held.get("mode", "auto"), held.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice", "tool_choice.allowed_tools.mode must be auto or required")
    if not isinstance(listed, list) or not listed:
        raise invalid("tool_choice", "tool_choice.allowed_tools.tools must be a list of at least one tool")
    return mode, [_name(item) for item in listed]


def _name(item: Any) -> str:
    function = item.get("function") if isinstance(item, dict) and item.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid("tool_choice", f"tool_choice must be {_SHAPES}")
    return name
