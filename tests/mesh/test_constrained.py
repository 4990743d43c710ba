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

from benchmarks._mesh import post

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
def url(constrained_mesh):
    return constrained_mesh


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


def together(run, items, at_once=4):
    """Results in order; a batch of four decodes about as fast as one row."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, items))


def serving(service):
    """The process of this mesh that listens at the service's socket; a standby does not."""
    for child in psutil.Process().children(recursive=True):
        listens = [it.laddr for it in child.net_connections(kind="unix") if str(it.laddr).endswith(f"{service}.sock")]
        if child.cmdline()[1:4] == ["-m", "meshkit.cli", service] and listens:
            return child
    raise AssertionError(f"no {service} listens")


def test_the_clients_parse_gives_the_model_its_class(client):
    def parsed(options):
        options = {"model": MODEL, "messages": ASK, "max_tokens": 200, **options, **OFF}
        return client.chat.completions.parse(response_format=Person, **options).choices[0]

    for choice in together(parsed, ({"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 1.5})):
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

    assert len(set(together(run, range(3)))) > 1, "every seed said the same"


def test_e9_eight_trees_through_ref_at_once(client):
    """https://github.com/sgl-project/sglang/issues/7639"""

    def grown(seed):
        return create(client, response_format=schema_format(NODE), seed=seed, max_tokens=80, **OFF).choices[0]

    whole = [choice.message.content for choice in together(grown, range(8), 8) if choice.finish_reason == "stop"]
    assert whole
    for text in whole:
        jsonschema.validate(json.loads(text), NODE)


SHAPE = {"format": {"type": "sequence", "elements": [
    {"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[xyz]{2}"}]}}  # fmt: skip
FORMS = [
    ({"regex": r"[a-f]{3}-\d{2,4}"}, r"[a-f]{3}-\d{2,4}"),
    ({"structured_outputs": {"choice": ["crimson", "teal", "日本"]}}, "crimson|teal|日本"),
    ({"guided_choice": ["\n\nonly this"]}, "\n\nonly this"),
    ({"ebnf": 'root ::= ([0-9] "+"){0,3} [0-9]'}, r"(\d\+){0,3}\d"),
    ({"structural_tag": SHAPE}, "<a>[xyz]{2}"),
]


def test_expressions_choices_and_grammars(client):
    def said(asked):
        form, seed = asked
        return create(client, seed=seed, temperature=1.2, max_tokens=60, extra_body=form, **OFF).choices[0]

    asked = [(form, seed) for form, _ in FORMS for seed in range(2)]
    for (form, _), choice in zip(asked, together(said, asked), strict=True):
        assert choice.finish_reason == "stop", (form, choice)
        (pattern,) = [pattern for it, pattern in FORMS if it == form]
        assert re.fullmatch(pattern, choice.message.content)


def test_any_json_object(client):
    choice = create(client, response_format={"type": "json_object"}, temperature=0, **OFF).choices[0]
    assert choice.finish_reason == "stop" and isinstance(json.loads(choice.message.content), dict)


def test_the_constraint_begins_behind_the_thought(client):
    def thought(seed):
        return create(client, extra_body={"regex": "[a-c]{4}"}, max_tokens=200, seed=seed, **ON).choices[0]

    ended = 0
    for choice in together(thought, range(4)):
        assert choice.message.reasoning_content
        if choice.finish_reason == "length":  # still thinking
            assert choice.message.content == ""
        else:
            ended += 1
            assert re.fullmatch("[a-c]{4}", choice.message.content)
    assert ended


def calls_of(choice):
    assert choice.finish_reason == "tool_calls", choice
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def check_call(name, arguments):
    (found,) = [item["function"]["parameters"] for item in TOOLS if item["function"]["name"] == name]
    jsonschema.validate(arguments, found)


@pytest.mark.parametrize("mode", [OFF, ON], ids=["plain", "thinking"])
def test_a_call_that_must_be_made_is_made(client, mode):
    def called(asked):
        seed, stream = asked
        options = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 200, **mode}
        made = create(client, messages=ASK if seed else WEATHER, stream=stream, **options)
        if not stream:
            return made.choices[0]
        arguments = {}
        for piece in [piece for chunk in made for piece in chunk.choices[0].delta.tool_calls or []]:
            arguments[piece.index] = arguments.get(piece.index, "") + (piece.function.arguments or "")
        return list(arguments.values())

    *whole, first, second = together(called, [(0, False), (1, False), (0, True), (1, True)])
    assert mode is ON or not [choice for choice in whole if choice.finish_reason == "length"]
    for choice, streamed in zip(whole, (first, second), strict=True):
        if choice.finish_reason != "length":
            assert streamed == [call.function.arguments for call in choice.message.tool_calls]
            for name, arguments in calls_of(choice):
                check_call(name, arguments)
    assert any(choice.finish_reason == "tool_calls" for choice in whole)


def test_a_named_tool_is_the_one_and_one_call_is_one(client):
    named = {"type": "function", "function": {"name": "roll"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}

    def called(choice):
        options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, **OFF}
        return create(client, messages=WEATHER, **options).choices[0]

    for choice in together(called, (named, some)):
        ((name, arguments),) = calls_of(choice)
        assert name == "roll" and 2 <= arguments["sides"] <= 99 and list(arguments) == ["sides"]


def test_calls_that_may_be_made_keep_to_their_schemas_and_answers_to_their_format(client):
    """Tools of which one is strict, without and with a format for the answer."""

    def said(asked):
        messages, extra = asked
        return create(client, messages=messages, tools=TOOLS, seed=2, **extra, **OFF).choices[0]

    shaped = {"response_format": schema_format(SCHEMA)}
    free, *choices = together(said, [(WEATHER, {}), (WEATHER, shaped), (ASK, shaped)])
    for name, arguments in calls_of(free):
        check_call(name, arguments)
    for choice in choices:
        if choice.finish_reason == "tool_calls":
            assert {name for name, _ in calls_of(choice)} <= {"get_weather", "roll"}
        else:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_the_other_dialects_shape_their_answers_too(url):
    format_ = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    body = {"model": MODEL, "input": "Give me a pet.", "max_output_tokens": 200, "text": {"format": format_}}
    status, answer, _ = ask(url, "/v1/responses", {**body, "reasoning": {"effort": "none"}})
    (said,) = [part for item in answer["output"] for part in item.get("content", []) if part["type"] == "output_text"]
    jsonschema.validate(json.loads(said["text"]), SCHEMA)
    roll = {"name": "roll", "input_schema": TOOLS[1]["function"]["parameters"]}
    body = {"model": MODEL, "messages": ASK, "max_tokens": 200, "thinking": {"type": "disabled"}, "tools": [roll]}
    status, answer, _ = ask(url, "/v1/messages", {**body, "tool_choice": {"type": "any"}})
    assert (status, answer["stop_reason"]) == (200, "tool_use")
    for block in answer["content"]:
        jsonschema.validate(block["input"], roll["input_schema"])
    status, answer, _ = ask(url, "/v1/responses", {**body, "input": "Hi", "text": {"format": {**format_, "schema": {
        "type": "nonsense"}}}, "tools": []})  # fmt: skip
    assert status == 400 and answer["error"]["param"] == "text.format" and answer["error"]["place"] == "/type"


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
def test_e17_what_cannot_be_is_a_400_before_any_byte_and_the_next_request_is_served(url, stream):
    """https://github.com/vllm-project/vllm/issues/17313, and other fields than its regex."""
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


def test_e18_stop_ids_wait_until_the_grammar_may_end(client):
    """https://github.com/vllm-project/vllm/pull/49227"""
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


@pytest.mark.nightly  # each service is killed in the lane by tests of its own
@pytest.mark.parametrize("service", ["grammar", "scheduler", "worker"])
def test_a_service_killed_in_mid_answer_leaves_the_answer_as_it_was_to_be(client, service):
    options = {"response_format": schema_format(LIST), "seed": 3, "max_tokens": 400, **OFF}
    whole = create(client, **options).choices[0].message.content
    stream, text, killed = create(client, stream=True, **options), "", False
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if len(text) > 30 and not killed:
            serving(service).kill()
            killed = True
    assert killed and text == whole
    jsonschema.validate(json.loads(text), LIST)


def test_n_choices_under_one_grammar_differ_and_repeat(client):
    options = {"response_format": schema_format(SCHEMA), "n": 3, "seed": 11, "temperature": 1.4, **OFF}
    first, second = ([c.message.content for c in create(client, **options).choices] for _ in range(2))
    assert first == second and len(set(first)) > 1
    for text in first:
        jsonschema.validate(json.loads(text), SCHEMA)
