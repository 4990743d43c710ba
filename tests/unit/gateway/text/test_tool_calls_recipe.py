"""Tool calls are parsed as DeepSeek's own recipe does, but for the differences listed at the end, each on purpose.

The recipe's stream parser gets 300 generated outputs, half of them cut off at some token; ours gets the same ids in
pushes of random size.
"""

import json
import random
import re

import deepseek_recipe as recipe
import pytest

from gateway.text.chat_messages import ToolSpec
from gateway.text.output_parser import OutputParser

TOOLS = (ToolSpec("get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}),)
CALL, END_CALL = '<｜DSML｜invoke name="get_weather">\n', "</｜DSML｜invoke>\n"
WORDS = [
    "sun",
    " and",
    " rain",
    "😀",
    "é",
    "\n",
    "\n\n",
    " < b",
    "</",
    "<",
    ">",
    '"',
    "\\",
    " {}",
    "1",
    ",",
    " x\n",
    "\t",
]
VALUES = ["true", "null", "7", "-1.50", "[1, 2]", '{"a": {"b": "é"}}', '"text"', " 3 ", "[]"]


@pytest.fixture(scope="module")
def recipe_tokenizer(v4_folder):
    return recipe.Tokenizer.from_file(str(v4_folder / "tokenizer.json"))


def read_recipe(tokenizer, ids, thinking):
    """Reasoning, content and the calls' names and arguments, as the recipe's chat stream gives them."""
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "x"}], "stream": True}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    options = recipe.ParsingOptions(parse_tool_calls=True, thinking_initial_stage=stage)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    stream = recipe.StreamProcessor(generator, options, tokenizer)
    chunks = list(stream.push(recipe.InferenceChunk.ready()))
    for token_id in ids:
        chunks += stream.push(recipe.InferenceChunk.tokens([token_id], [(-1.0, [])]))
    if not stream.finished:
        chunks += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    texts, calls = {"reasoning_content": "", "content": ""}, []
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == len(calls):
                    calls.append(["", ""])
                calls[call["index"]][0] += call["function"].get("name") or ""
                calls[call["index"]][1] += call["function"].get("arguments") or ""
    return texts["reasoning_content"], texts["content"], calls


def read_ours(v4, ids, thinking, rng):
    parser = OutputParser(v4, tools=TOOLS, starts_in="reasoning" if thinking else "content")
    deltas, at = [], 0
    while at < len(ids):
        step = rng.choice([1, 1, 2, 5, 40])
        deltas += parser.push(ids[at : at + step])
        at += step
    deltas += parser.finish()
    texts = ["".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")]
    calls = []
    for delta in deltas:
        if delta.call is not None:
            if delta.call.opens:
                calls.append([delta.call.name, ""])
            calls[delta.call.index][1] += delta.text
    return texts[0], texts[1], calls


def prose(rng):
    text = "".join(rng.choices(WORDS, k=rng.randrange(12)))
    return re.sub("<(?=\n|$)", "<.", text)  # for newlines behind a `<` see the differences


def output(rng, thinking):
    """What a model may answer: a thought, prose, and in most cases a block of calls."""
    text = prose(rng) + "</think>" if thinking and rng.random() < 0.8 else ""
    text += rng.choice(["", "\n\n"]) + prose(rng) + rng.choice(["", "\n", "\n\n", "\n\n\n"])
    if rng.random() < 0.15:
        return text
    bare = rng.random() < 0.1
    text += "" if bare else "<｜DSML｜tool_calls>\n"
    for _ in range(rng.randrange(1, 4)):
        text += f'<｜DSML｜invoke name="{rng.choice(["get_weather", "f-2", "unknown_one"])}">\n'
        for key in rng.sample(["city", "n", "ünit", "q>", "a_b"], rng.randrange(4)):
            string = rng.random() < 0.5
            value = prose(rng) if string else rng.choice(VALUES)
            text += f'<｜DSML｜parameter name="{key}" string="{str(string).lower()}">{value}</｜DSML｜parameter>\n'
        text += END_CALL
    return text if bare else text + "</｜DSML｜tool_calls>" + rng.choice(["", "", "\n\nthe end"])


@pytest.mark.parametrize("seed", range(10))
def test_generated_outputs(v4, recipe_tokenizer, seed):
    rng = random.Random(seed)
    for number in range(30):
        thinking = rng.random() < 0.5
        text = output(rng, thinking)
        ids = v4.encode(text)
        cut = number % 2 == 1
        if cut:
            ids = ids[: rng.randrange(len(ids) + 1)]
        ours, theirs = read_ours(v4, ids, thinking, rng), read_recipe(recipe_tokenizer, ids, thinking)
        if cut and ours[2]:  # a tag is held back until it is whole, a value that is no string until it has ended
            open_call, written = ours[2][-1][1], theirs[2][-1][1]
            ahead = written.removeprefix(open_call)
            assert open_call + ahead == written
            assert open_call.endswith(": ") or re.fullmatch(r'"?(\{?\})?|([{,] ?"?[^"]*"?(: "?)?)?', ahead)
            theirs[2][-1][1] = open_call
        assert ours == theirs, (text, ids)


PARAM = '<｜DSML｜parameter name="city" string="true">Paris'
END = "</｜DSML｜parameter>\n"
DIFFERENT = {
    "stray closers are no prose": ("a</｜DSML｜invoke>b", ("ab", []), ("a</｜DSML｜invoke>b", [])),
    "newlines before a block are markup behind `<` too": (
        "a<\n\n" + CALL + END_CALL,
        ("a<", [["get_weather", "{}"]]),
        ("a<\n", [["get_weather", "{}"]]),
    ),
    "a stray marker swallows nothing": ("a<｜DSML｜ b", ("a b", []), ("a", [])),
    "an object as body is the arguments": (
        CALL + '{"city": 1}' + END_CALL,
        ("", [["get_weather", '{"city": 1}']]),
        ("", [["get_weather", "{}"]]),
    ),
    "arguments of a closed call are JSON": (
        CALL + '<｜DSML｜parameter name="n" string="false">7x' + END + END_CALL,
        ("", [["get_weather", '{"n": "7x"}']]),
        ("", [["get_weather", '{"n": 7x}']]),
    ),
    "keys are escaped": (
        CALL + '<｜DSML｜parameter name="a"b" string="true">x' + END + END_CALL,
        ("", [["get_weather", '{"a\\"b": "x"}']]),
        ("", [["get_weather", '{"a"b": "x"}']]),
    ),
    "a parameter tag need not say its kind": (
        CALL + '<｜DSML｜parameter name="city">7' + END + END_CALL,
        ("", [["get_weather", '{"city": "7"}']]),
        ("", [["get_weather", '{"city">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n']]),
    ),
    "a parameter ends an open value": (
        CALL + PARAM + PARAM + END + END_CALL,
        ("", [["get_weather", '{"city": "Paris", "city": "Paris"}']]),
        ("", [["get_weather", '{"city": "Paris<｜DSML｜parameter name=\\"city\\" string=\\"true\\">Paris"}']]),
    ),
    "a call ends an open call": (
        CALL + PARAM + END + CALL + END_CALL,
        ("", [["get_weather", '{"city": "Paris"}'], ["get_weather", "{}"]]),
        ("", [["get_weather", '{"city": "Paris"}']]),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences(v4, recipe_tokenizer, name):
    text, ours, theirs = DIFFERENT[name]
    ids = v4.encode(text)
    assert read_ours(v4, ids, False, random.Random(1))[1:] == ours
    assert read_recipe(recipe_tokenizer, ids, False)[1:] == theirs
