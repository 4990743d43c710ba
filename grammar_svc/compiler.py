"""XGrammar behind a few functions: tokenizer, compile, match. The one module that imports it.

Importing it takes 1.7 s (it loads torch and transformers itself); only children, the engine's process and tests do.
"""

import json
import re
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import xgrammar
from xgrammar import (
    BatchGrammarMatcher,
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
)

from grammar_svc.regexes import without_line_ends
from grammar_svc.rules import merged
from grammar_svc.session import Matchers
from grammar_svc.sources import Source, grammar_rev
from grammar_svc.vocabulary import TEXT_MARKERS, Vocabulary
from meshkit.types import GrammarKind

# Characters between two JSON tokens: none to go on for ever. Each further one would cost 0.2 MB and 1 ms per schema.
MAX_WHITESPACE: Final = 1
ANY_OBJECT: Final = '{"type":"object","additionalProperties":true}'

# One character of a string with minLength or maxLength, as XGrammar writes it out: in JSON it leaves control characters
# in, and in a tool call's raw text it would run over the closing tag, </｜DSML｜parameter>. The first character of that
# tag is left out altogether: a text that may end at any of its characters costs 30 to 160 ms per mask and, with the
# 129,280 tokens of V4, 5 s to compile for 64 characters, and for 300 more than the 10 s a compile may take; now 0.2 s.
_CHARACTERS: Final = re.compile(r"""^(\w+ ::= \(\()(\[\^\\"\\\\\\r\\n\]|\[\\0-\\U0010ffff\])(\)\))$""", re.MULTILINE)
_BETTER: Final = {r"""[^\"\\\r\n]""": r"""[^\"\\\x00-\x1f]""", r"[\0-\U0010ffff]": r"[^\x00<\uff5c]"}

# Such a string as a rule of its own, in front of its closing tag: the bound is not written out character by character
# if the tag follows in the same rule.
_BARE: Final = re.compile(r"^(\w+) ::= \(\((\w+_characters\w*\{\d+, -?\d+\})\)\)\n", re.MULTILINE)

MARKER: Final = TEXT_MARKERS[0]
_MARKED: Final = r"\uff5cDSML\uff5c"  # as XGrammar writes it out, in literals only
_DISPATCH: Final = re.compile(r"(TagDispatch\(\n.*?^\))", re.MULTILINE | re.DOTALL)

CompileFailed = (RuntimeError, ValueError, TypeError)  # what XGrammar raises for a source that it does not take


@dataclass(frozen=True, slots=True)
class Compiler:
    """XGrammar's compiler and what it has to know of model and configuration."""

    made: GrammarCompiler
    marker: int  # token that tool calls are written with, -1 for none
    whitespace: int  # characters between two JSON tokens at most


def revision(vocabulary: Vocabulary, whitespace: int = MAX_WHITESPACE) -> str:
    """`grammar_rev` of this installation."""
    return grammar_rev(f"xgrammar {version('xgrammar')} {whitespace}", vocabulary.digest)


def tokenizer_info(vocabulary: Vocabulary) -> TokenizerInfo:
    """0.12 s for 129,280 tokens."""
    return TokenizerInfo(
        list(vocabulary.tokens),
        vocab_type=VocabType.BYTE_LEVEL,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.eos_ids),
        add_prefix_space=False,
    )


def compiler(info: TokenizerInfo, vocabulary: Vocabulary, whitespace: int = MAX_WHITESPACE) -> Compiler:
    """One thread and no cache: processor time is limited per child, memory is counted by the caller."""
    made = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    marker = vocabulary.tokens.index(MARKER) if MARKER in vocabulary.tokens else -1
    return Compiler(made, marker, whitespace)


def compile_source(how: Compiler, source: Source) -> CompiledGrammar:
    """Raises one of CompileFailed with the compiler's own words."""
    return how.made.compile_grammar(_rewritten(how, _grammar(how, source)))


def _grammar(how: Compiler, source: Source) -> Grammar:
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(how, source.text)
        case GrammarKind.JSON_OBJECT:
            return _json(how, ANY_OBJECT)
        case GrammarKind.REGEX:
            return Grammar.from_regex(without_line_ends(source.text))
        case GrammarKind.EBNF:
            return Grammar.from_ebnf(source.text)
        case GrammarKind.CHOICE:
            items = [{"type": "const_string", "value": text} for text in json.loads(source.text)]
            return Grammar.from_structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": items}})
        case GrammarKind.STRUCTURAL_TAG:
            return Grammar.from_structural_tag(source.text)
        case GrammarKind.DSML_TOOLS:
            return Grammar.from_structural_tag(dsml_tag(json.loads(source.text)))


def _json(how: Compiler, schema: str) -> Grammar:
    if how.whitespace:
        return Grammar.from_json_schema(schema, max_whitespace_cnt=how.whitespace)
    return Grammar.from_json_schema(schema, any_whitespace=False, separators=(",", ":"))


def _rewritten(how: Compiler, grammar: Grammar) -> Grammar:
    """Strings of bounded length take what JSON, or the tag around them, takes; the marker of tool calls is its token.

    As a pattern a bound would be exact too, but masks of `{0,200}` then take 30 ms; as characters 0.01 ms. The marker
    could be spelled with other tokens too, which the parser of the output would not know. Rules that are equal become
    one: 20 different tools had 1,900 of them and have 180.
    """
    text, changed = _CHARACTERS.subn(lambda found: found[1] + _BETTER[found[2]] + found[3], str(grammar))
    for rule, body in _BARE.findall(text):
        text = re.sub(rf'(?<= ){rule}(?= "</)', body, text)
        if len(re.findall(rf"\b{rule}\b", text)) == 1:  # its own line
            text = re.sub(rf"^{rule} ::= .*\n", "", text, flags=re.MULTILINE)
    if how.marker >= 0 and _MARKED in text:
        parts = _DISPATCH.split(text)  # what stands in a dispatch is matched as text: it cannot name tokens
        parts[::2] = [part.replace(_MARKED, f'" Token({how.marker}) "') for part in parts[::2]]
        text, changed = "".join(parts), 1
    return Grammar.from_ebnf(merged(text)) if changed else grammar


def dsml_tag(payload: dict[str, Any]) -> Any:
    """V4's tool calls. Reasoning is none of its business: a session arms after </think>."""
    choice = payload["tool_choice"]
    tools: list[Any] = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"], "strict": True}}
        for tool in payload["tools"]
    ]
    return xgrammar.get_model_structural_tag(
        "deepseek_v4",
        tools=tools,
        tool_choice={"type": "function", "function": choice} if isinstance(choice, dict) else choice,
        reasoning="disabled",
        max_whitespace_cnt=MAX_WHITESPACE,
        parallel_tool_calls=payload["parallel"],
    )


class Builder:
    """Compiles here what a child has compiled before; any thread may call it, each with a compiler of its own."""

    def __init__(self, info: TokenizerInfo, vocabulary: Vocabulary, whitespace: int = MAX_WHITESPACE) -> None:
        self._parts, self._own = (info, vocabulary, whitespace), threading.local()

    def __call__(self, source: Source) -> CompiledGrammar:
        if (made := getattr(self._own, "made", None)) is None:
            made = self._own.made = compiler(*self._parts)
        return compile_source(made, source)


def new_matcher(grammar: CompiledGrammar, stop_ids: list[int]) -> GrammarMatcher:
    """5 us. `stop_ids` with EOS among them; they are masked until the grammar may end."""
    return GrammarMatcher(grammar, override_stop_tokens=stop_ids)


# One thread: with two, one call in a hundred takes ten times as long (the threads wait for each other's core).
MATCHERS: Final = Matchers(
    new=new_matcher,
    fill=BatchGrammarMatcher(max_threads=1).batch_fill_next_token_bitmask,
)
