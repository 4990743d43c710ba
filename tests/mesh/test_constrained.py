"""Constrained output on the real mesh: the shipped model under schemas, expressions, choices and calls it must make.

Outputs are judged by validators of their own (pydantic, re, jsonschema). The model is small: what it says is checked
for its form alone, except where the grammar leaves one thing to say.
"""

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jsonschema
import openai
import psutil
import pydantic
import pytest

from benchmarks._mesh import post, running_mesh

MODEL = "v4-nano"
ASK = [{"role": "user", "content": "Give me a person as JSON."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris in celsius?"}]
OFF = {"reasoning_effort": "none"}
ON = {"reasoning_effort": "low"}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    moods: list[Literal["calm", "keen"]] = pydantic.Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "minItems": 8, "maxItems": 9}
NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def tool(name, strict=False, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [
    tool("get_weather", city={"type": "string", "maxLength": 10}, unit={"enum": ["celsius", "fahrenheit"]}),
    tool("roll", strict=True, sides={"type": "integer", "minimum": 2, "maximum": 99}),
]


@pytest.fixture(scope="module")
def url():
    with running_mesh("--deterministic", "--grammar", "on") as base:
        yield base


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def schema_format(schema, name="answer"):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def create(client, **options):
    options = {"model": MODEL, "messages": ASK, "max_tokens": 200, **options}
    return client.chat.completions.create(**options)


def ask(url, path, body):
    """Status, JSON and headers of a request by hand."""
    try:
        with urllib.request.urlopen(post(url + path, body), timeout=120) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def serving_grammar():
    """The process of this mesh that listens at the grammar socket; its standby does not."""
    for child in psutil.Process().children(recursive=True):
        listens = [it.laddr for it in child.net_connections(kind="unix") if str(it.laddr).endswith("grammar.sock")]
        if child.cmdline()[1:4] == ["-m", "meshkit.cli", "grammar"] and listens:
            return child
    raise AssertionError("no grammar service listens")


def test_the_clients_parse_gives_the_model_its_class(client):
    for options in ({"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 1.5}):
        parsed = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Person, max_tokens=200, **options, **OFF
        )
        choice = parsed.choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person), choice


def test_a_schema_holds_greedy_and_sampled_and_streamed_as_whole(client):
    def run(seed):
        options = {"response_format": schema_format(SCHEMA), "seed": seed, "temperature": 0 if seed == 0 else 1.3}
        whole = create(client, **options, **OFF).choices[0]
        chunks = list(create(client, **options, stream=True, **OFF))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.finish_reason == "stop" and text == whole.message.content
        jsonschema.validate(json.loads(text), SCHEMA)
        return text

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(run, range(4)))
    assert len(set(texts)) > 1, "every seed said the same"


def test_a_tree_through_ref(client):
    for seed in range(2):
        choice = create(client, response_format=schema_format(NODE), seed=seed, max_tokens=120, **OFF).choices[0]
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), NODE)
        else:
            assert choice.finish_reason == "length"
    assert create(client, max_tokens=4, **OFF).choices[0].message.content


@pytest.mark.parametrize("seed", [0, 1])
def test_expressions_choices_and_grammars(client, seed):
    def said(**extra):
        choice = create(client, seed=seed, temperature=1.2, max_tokens=60, extra_body=extra, **OFF).choices[0]
        assert choice.finish_reason == "stop", choice
        return choice.message.content

    assert re.fullmatch(r"[a-f]{3}-\d{2,4}", said(regex=r"[a-f]{3}-\d{2,4}"))
    assert said(structured_outputs={"choice": ["crimson", "teal", "日本"]}) in ("crimson", "teal", "日本")
    assert said(guided_choice=["\n\nonly this"]) == "\n\nonly this"
    assert re.fullmatch(r"(\d\+)*\d", said(ebnf='root ::= ([0-9] "+"){0,3} [0-9]'))
    assert isinstance(json.loads(said(response_format={"type": "json_object"}, guided_json=None)), dict)
    shape = {"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[xyz]{2}"}]}}  # fmt: skip
    assert re.fullmatch("<a>[xyz]{2}", said(structural_tag=shape))


def test_the_constraint_begins_behind_the_thought(client):
    for options in ({"temperature": 0}, {"seed": 3, "temperature": 1.0}):
        choice = create(client, extra_body={"regex": "[a-c]{4}"}, max_tokens=300, **options, **ON).choices[0]
        if choice.finish_reason == "length":  # still thinking
            assert choice.message.content == "" and choice.message.reasoning_content
            continue
        assert re.fullmatch("[a-c]{4}", choice.message.content) and choice.message.reasoning_content


def calls_of(choice):
    assert choice.finish_reason == "tool_calls", choice
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def check_call(name, arguments):
    (found,) = [item["function"]["parameters"] for item in TOOLS if item["function"]["name"] == name]
    jsonschema.validate(arguments, found)


@pytest.mark.parametrize("mode", [OFF, ON], ids=["plain", "thinking"])
def test_a_call_that_must_be_made_is_made(client, mode):
    for seed in range(2):
        options = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 250, **mode}
        options["messages"] = ASK if seed else WEATHER
        whole = create(client, **options).choices[0]
        if mode is ON and whole.finish_reason == "length":
            continue
        for name, arguments in calls_of(whole):
            check_call(name, arguments)
        pieces = [p for c in create(client, **options, stream=True) for p in c.choices[0].delta.tool_calls or []]
        streamed = {}
        for piece in pieces:
            streamed[piece.index] = streamed.get(piece.index, "") + (piece.function.arguments or "")
        assert list(streamed.values()) == [call.function.arguments for call in whole.message.tool_calls]


def test_a_named_tool_is_the_one_and_one_call_is_one(client):
    named = {"type": "function", "function": {"name": "roll"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, some):
        options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, **OFF}
        ((name, arguments),) = calls_of(create(client, messages=WEATHER, **options).choices[0])
        assert name == "roll" and 2 <= arguments["sides"] <= 99 and list(arguments) == ["sides"]


def test_strict_tools_bind_only_the_calls(client):
    for seed in range(2):
        choice = create(client, messages=WEATHER, tools=TOOLS, seed=seed, max_tokens=120, **OFF).choices[0]
        if choice.finish_reason == "tool_calls":
            for name, arguments in calls_of(choice):
                check_call(name, arguments)
        else:
            assert choice.message.tool_calls is None


def test_a_format_beside_tools_is_either(client):
    options = {"tools": TOOLS, "response_format": schema_format(SCHEMA), "max_tokens": 200, **OFF}
    for seed in range(2):
        choice = create(client, messages=WEATHER if seed % 2 else ASK, seed=seed, **options).choices[0]
        if choice.finish_reason == "tool_calls":
            assert {name for name, _ in calls_of(choice)} <= {"get_weather", "roll"}
        else:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_native_forms(url):
    def generate(**fields):
        status, answer, _ = ask(url, "/generate", {"text": "Once upon a time", **fields})
        assert status == 200, answer
        return answer["text"]

    tokens = {"max_new_tokens": 200}
    jsonschema.validate(json.loads(generate(json_schema=SCHEMA, sampling_params=tokens)), SCHEMA)
    assert re.fullmatch("[ab]{5}", generate(regex="[ab]{5}"))
    assert generate(sampling_params={"choice": ["left", "right"]}) in ("left", "right")
    assert re.fullmatch("a+b", generate(sampling_params={"ebnf": 'root ::= "a"{1,9} "b"'}))
    jsonschema.validate(
        json.loads(generate(sampling_params={**tokens, "json_schema": json.dumps(SCHEMA), "n": 1})), SCHEMA
    )


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_a_400_before_any_byte_and_the_next_request_is_served(url, stream):
    wrong = "[.*"
    for path, body, param in (
        ("/v1/chat/completions", {"response_format": {"type": "regex", "regex": wrong}}, "response_format.regex"),
        ("/v1/chat/completions", {"structured_outputs": {"regex": wrong}}, "structured_outputs.regex"),
        ("/generate", {"text": "a", "sampling_params": {"regex": wrong}}, "sampling_params.regex"),
        ("/v1/completions", {"prompt": "a", "guided_json": {"type": "nonsense"}}, "guided_json"),
        ("/v1/chat/completions", {"tools": [tool("f", strict=True, x={"type": "nonsense"})]}, "tools[0].function"),
        ("/v1/chat/completions", {"ebnf": "root ::= missing"}, "ebnf"),
    ):
        if "chat" in path:
            body = {"messages": ASK, **body}
        status, answer, headers = ask(url, path, {**body, "stream": stream})
        error = answer["error"]
        assert status == 400 and error["type"] == "invalid_request_error", answer
        assert error["param"] == param, error
        assert "tools" not in body or error["place"] == "/parameters/properties/x/type", error
        assert headers["Content-Type"].startswith("application/json")
    body = {"messages": ASK, "regex": "[xy]{3}", "max_tokens": 20, **OFF}
    status, answer, _ = ask(url, "/v1/chat/completions", body)
    assert status == 200 and re.fullmatch("[xy]{3}", answer["choices"][0]["message"]["content"])


def test_stop_ids_wait_until_the_grammar_may_end(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "bio": {"type": "string", "maxLength": 9}},
        "required": ["name", "bio"],
        "additionalProperties": False,
    }
    for options in ({"temperature": 0}, {"seed": 1}):
        choice = create(
            client,
            response_format=schema_format(schema),
            logit_bias={"5": 100},
            extra_body={"stop_token_ids": [5]},
            **options,
            **OFF,
        ).choices[0]
        assert choice.finish_reason == "stop", choice
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_penalties_bias_and_least_tokens_compose_with_the_mask(client):
    ids = {str(token): 60 for token in range(40, 60)}
    options = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": ids, "seed": 4, "max_tokens": 120}
    choice = create(client, response_format=schema_format(SCHEMA), **options, **OFF).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    extra = {"regex": "(ab|c){1,30}", "min_tokens": 8}
    answer = create(client, extra_body=extra, seed=2, max_tokens=80, **OFF)
    assert re.fullmatch("(ab|c){1,30}", answer.choices[0].message.content)
    assert answer.usage.completion_tokens >= 8 or answer.choices[0].message.content.count("ab") >= 15


def test_killed_in_mid_answer_the_grammar_service_is_replaced_and_the_answer_stays_valid(client):
    options = {"response_format": schema_format(LIST), "seed": 3, "max_tokens": 400, **OFF}
    whole = create(client, **options).choices[0].message.content
    stream, text, killed = create(client, stream=True, **options), "", False
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if len(text) > 30 and not killed:
            serving_grammar().kill()
            killed = True
    assert killed and text == whole
    jsonschema.validate(json.loads(text), LIST)


def test_n_choices_under_one_grammar_differ_and_repeat(client):
    options = {"response_format": schema_format(SCHEMA), "n": 3, "seed": 11, "temperature": 1.4, **OFF}
    first, second = ([c.message.content for c in create(client, **options).choices] for _ in range(2))
    assert first == second and len(set(first)) > 1
    for text in first:
        jsonschema.validate(json.loads(text), SCHEMA)
