"""Without tool calls the parser splits streams as DeepSeek's own recipe does.

Left out because it differs on purpose: `<think>` inside reasoning, special and turn tokens inside text (we hide them),
stop strings that match the newlines trimmed after `</think>`, a broken byte right before the end, a stray `</think>`
before leading newlines.
"""

import json

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.output_parser import OutputParser

END_THINK = 128822
STAGES = {
    (True, "reasoning", True): deepseek_recipe.ThinkingInitialStage.ReasoningStart,
    (True, "reasoning", False): deepseek_recipe.ThinkingInitialStage.ReasoningContinuation,
    (True, "content", False): deepseek_recipe.ThinkingInitialStage.ContentContinuation,
    (False, "content", True): None,
}


@pytest.fixture(scope="module")
def recipe_tokenizer(v4_folder):
    return deepseek_recipe.Tokenizer.from_file(str(v4_folder / "tokenizer.json"))


def recipe(tokenizer, ids, stage, stops):
    """Reasoning, content, tokens of each with logprobs, as the recipe's chat stream gives them."""
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "x"}], "stream": True}
    request = deepseek_recipe.ChatCompletionRequest(body | {"logprobs": True, "top_logprobs": 0}).convert(
        deepseek_recipe.ConversionOptions()
    )
    options = deepseek_recipe.ParsingOptions(parse_tool_calls=False, thinking_initial_stage=stage, stop_sequences=stops)
    generator = deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    stream = deepseek_recipe.StreamProcessor(generator, options, tokenizer)
    chunks = list(stream.push(deepseek_recipe.InferenceChunk.ready()))
    for token_id in ids:
        if not stream.finished:
            chunks += stream.push(deepseek_recipe.InferenceChunk.tokens([token_id], [(-1.0, [])]))
    if not stream.finished:
        chunks += stream.push(deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop))
    texts = {"reasoning_content": "", "content": ""}
    tokens = {"reasoning_content": 0, "content": 0}
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
                tokens[name] += len((choice.get("logprobs") or {}).get(name) or [])
    return (texts["reasoning_content"], texts["content"]), (tokens["reasoning_content"], tokens["content"])


SAFE = [271, 201, 223, 619, END_THINK, END_THINK, 30, 32, 128825]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(SAFE) | st.integers(300, 2000), max_size=25),
    st.sampled_from(sorted(STAGES)),
    st.lists(st.sampled_from(["e", "at", " t", "ing "]), max_size=2),
)
def test_equals_the_recipe(v4, recipe_tokenizer, ids, stage, stops):
    _, starts_in, fresh = stage
    ids = [i for i in ids if not v4.token_text(i).startswith("\\x")]
    markers = [at for at, token_id in enumerate(ids) if token_id == END_THINK]
    strays = set(markers if starts_in == "content" else markers[1:])
    ids = [token_id for at, token_id in enumerate(ids) if at not in strays]
    parser = OutputParser(v4, starts_in=starts_in, fresh_turn=fresh, stop=stops)
    deltas = parser.push(ids, ids) + parser.finish()
    texts = tuple("".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content"))
    tokens = tuple(sum(len(d.tokens) for d in deltas if d.kind == kind) for kind in ("reasoning", "content"))
    assert (texts, tokens) == recipe(recipe_tokenizer, ids, STAGES[stage], stops)


def test_character_split_over_tokens_equals_the_recipe(v4, recipe_tokenizer):
    ids = [28927, 225, 619, 128822, 7351, 225, 229, 619]
    parser = OutputParser(v4, starts_in="reasoning")
    deltas = parser.push(ids) + parser.finish()
    stage = deepseek_recipe.ThinkingInitialStage.ReasoningStart
    assert recipe(recipe_tokenizer, ids, stage, []) == (("😀é", " 🀄é"), (3, 4))
    assert [(d.text, len(d.tokens)) for d in deltas] == [("😀é", 3), (" 🀄é", 4)]
