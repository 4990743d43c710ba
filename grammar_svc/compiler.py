"""XGrammar behind four functions: tokenizer, compile, serialise, load. The one module of the service that imports it.

Importing it takes 1.7 s (it loads torch and transformers itself); only children, the engine's process and tests do.
"""

import json
from importlib.metadata import version
from typing import Any, Final

import xgrammar
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from grammar_svc.sources import Source, grammar_rev
from grammar_svc.vocabulary import Vocabulary
from meshkit.types import GrammarKind

# Characters between two JSON tokens: none to go on for ever. Each further one would cost 0.2 MB and 1 ms per schema.
MAX_WHITESPACE: Final = 1
ANY_OBJECT: Final = '{"type":"object","additionalProperties":true}'

CompileFailed = (RuntimeError, ValueError, TypeError)  # what XGrammar raises for a source that it does not take


def revision(vocabulary: Vocabulary) -> str:
    """`grammar_rev` of this installation."""
    return grammar_rev(f"xgrammar {version('xgrammar')}", vocabulary.digest)


def tokenizer_info(vocabulary: Vocabulary) -> TokenizerInfo:
    """0.12 s for 129,280 tokens."""
    return TokenizerInfo(
        list(vocabulary.tokens),
        vocab_type=VocabType.BYTE_LEVEL,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.eos_ids),
        add_prefix_space=False,
    )


def compiler(info: TokenizerInfo) -> GrammarCompiler:
    """One thread and no cache: processor time is limited per child, memory is counted by the caller."""
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compile_source(made: GrammarCompiler, source: Source) -> CompiledGrammar:
    """Raises one of CompileFailed with the compiler's own words."""
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return made.compile_json_schema(source.text, max_whitespace_cnt=MAX_WHITESPACE)
        case GrammarKind.JSON_OBJECT:
            return made.compile_json_schema(ANY_OBJECT, max_whitespace_cnt=MAX_WHITESPACE)
        case GrammarKind.REGEX:
            return made.compile_regex(source.text)
        case GrammarKind.EBNF:
            return made.compile_grammar(source.text)
        case GrammarKind.CHOICE:
            items = [{"type": "const_string", "value": text} for text in json.loads(source.text)]
            return made.compile_structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": items}})
        case GrammarKind.STRUCTURAL_TAG:
            return made.compile_structural_tag(source.text)
        case GrammarKind.DSML_TOOLS:
            return made.compile_structural_tag(dsml_tag(json.loads(source.text)))


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


def load(data: str, info: TokenizerInfo) -> CompiledGrammar:
    """A compiled grammar that a child serialised: 2 to 6 ms, a sixth of compiling it again."""
    return CompiledGrammar.deserialize_json(data, info)


def new_matcher(grammar: CompiledGrammar, stop_ids: list[int]) -> GrammarMatcher:
    """5 us. `stop_ids` with EOS among them; they are masked until the grammar may end."""
    return GrammarMatcher(grammar, override_stop_tokens=stop_ids)
