"""The Responses and Messages dialects on the real mesh, through the official clients: text, thinking, tools."""

import json

import anthropic
import openai
import pydantic
import pytest

MODEL = "v4-nano"
STORY = "Tell me a story about a fox and a lamp."
SUM = "What is 37 + 45?"
QUESTION = "What is the weather in Paris in celsius?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
    "required": ["city", "unit"],
}
TOOL = {"name": "get_weather", "description": "Get the weather of a city"}
RESULT = json.dumps({"temp": 17, "sky": "windy"})


@pytest.fixture(scope="module")
def url(constrained_mesh):
    return constrained_mesh


@pytest.fixture(scope="module")
def openai_client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3, timeout=120) as made:
        yield made.responses


@pytest.fixture(scope="module")
def anthropic_client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=3, timeout=120) as made:
        yield made.messages


@pytest.mark.parametrize("text, effort", [pytest.param(STORY, "none", marks=pytest.mark.nightly), (SUM, "low")])
def test_a_streamed_response_equals_the_whole_one(openai_client, text, effort):
    options = {"model": MODEL, "input": text, "max_output_tokens": 40, "reasoning": {"effort": effort}}
    options["extra_body"] = {"seed": 5}
    whole = openai_client.create(**options)
    with openai_client.stream(**options) as stream:
        deltas = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
        for event in stream:
            if event.type in deltas:
                deltas[event.type] += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
    thoughts = [item.content[0].text for item in whole.output if item.type == "reasoning"]
    assert deltas["response.output_text.delta"] == whole.output_text == final.output_text
    assert deltas["response.reasoning_text.delta"] == "".join(thoughts)
    assert bool(thoughts) == (effort == "low") and final.status == whole.status
    assert final.usage.output_tokens == whole.usage.output_tokens > 5
    if text == SUM:
        assert "82" in whole.output_text


def test_a_round_with_tools_through_responses(openai_client):
    options = {"model": MODEL, "tools": [{**TOOL, "type": "function", "parameters": WEATHER}], "temperature": 0}
    options |= {"max_output_tokens": 80, "reasoning": {"effort": "none"}}
    (call,) = openai_client.create(input=QUESTION, **options).output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Paris", "unit": "celsius"},
    )
    with openai_client.stream(input=QUESTION, **options) as stream:
        streamed = stream.get_final_response().output[0]
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    answer = openai_client.create(input=[{"role": "user", "content": QUESTION}, call, output], **options)
    assert "17" in answer.output_text and "windy" in answer.output_text


@pytest.mark.parametrize(
    "text, thinking", [pytest.param(STORY, "disabled", marks=pytest.mark.nightly), (SUM, "enabled")]
)
def test_a_streamed_message_equals_the_whole_one(anthropic_client, text, thinking):
    mode = {"type": thinking} if thinking == "disabled" else {"type": thinking, "budget_tokens": 1024}
    options = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": text}], "thinking": mode}
    options |= {"extra_body": {"seed": 5}, "extra_headers": {"anthropic-beta": "any"}}
    if thinking == "enabled":
        options["output_config"] = {"effort": "low"}
    whole = anthropic_client.create(**options)
    with anthropic_client.stream(**options) as stream:
        for _ in stream.text_stream:
            pass
        final = stream.get_final_message()
    shown = [[(block.type, getattr(block, block.type)) for block in message.content] for message in (whole, final)]
    assert shown[0] == shown[1] and (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    assert [kind for kind, _ in shown[0]] == (["thinking", "text"] if thinking == "enabled" else ["text"])
    if text == SUM:
        assert "82" in shown[0][-1][1]


def test_a_stop_sequence_on_the_way(anthropic_client):
    options = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": STORY}]}
    options |= {"thinking": {"type": "disabled"}, "extra_body": {"temperature": 0}}
    text = anthropic_client.create(**options).content[0].text
    word = text.split()[4]
    cut = anthropic_client.create(stop_sequences=[word], **options)
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == (
        "stop_sequence",
        word,
        text[: text.index(word)],
    )


class Visit(pydantic.BaseModel):
    city: str
    metric: bool


VISIT = "Give me JSON with city Paris and metric true."
STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_structured_response(openai_client):
    options = {"model": MODEL, "input": VISIT, "text_format": Visit, "max_output_tokens": 60, "temperature": 0}
    whole = openai_client.parse(**options).output_parsed
    with openai_client.stream(**options) as stream:
        streamed = stream.get_final_response().output_parsed
    assert isinstance(whole, Visit) and whole == streamed


def test_a_structured_message(anthropic_client):
    options = {"model": MODEL, "messages": [{"role": "user", "content": VISIT}], "max_tokens": 60}
    options |= {"thinking": {"type": "disabled"}, "extra_body": {"temperature": 0}}
    assert isinstance(anthropic_client.parse(output_format=Visit, **options).parsed_output, Visit)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "go_to"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go_to"}]},
    ],
)
def test_a_response_that_must_call(openai_client, choice):
    tool = {"type": "function", "name": "go_to", "parameters": STRICT, "strict": True}
    answer = openai_client.create(model=MODEL, input="Hi", tools=[tool], tool_choice=choice, max_output_tokens=80)
    assert {item.type for item in answer.output} == {"function_call"} and answer.status == "completed"
    assert json.loads(answer.output[0].arguments)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    "choice, thinking",
    [
        ({"type": "any"}, {"type": "disabled"}),
        ({"type": "tool", "name": "go_to"}, {"type": "enabled", "budget_tokens": 1024}),
    ],
)
def test_a_message_that_must_call(anthropic_client, choice, thinking):
    options = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
    options |= {"tools": [{"name": "go_to", "input_schema": STRICT, "strict": True}]}
    answer = anthropic_client.create(tool_choice=choice, thinking=thinking, **options)
    assert answer.stop_reason == "tool_use" and answer.content[-1].input["city"] in ("Oslo", "Rome")


def test_a_round_with_tools_through_messages(anthropic_client):
    options = {"model": "claude-any-model", "tools": [{**TOOL, "input_schema": WEATHER}], "max_tokens": 80}
    options |= {"thinking": {"type": "disabled"}, "extra_body": {"temperature": 0}}
    asked = {"role": "user", "content": QUESTION}
    first = anthropic_client.create(messages=[asked], **options)
    with anthropic_client.stream(messages=[asked], **options) as stream:
        streamed = stream.get_final_message()
    assert first.stop_reason == streamed.stop_reason == "tool_use"
    assert first.content[0].input == streamed.content[0].input == {"city": "Paris", "unit": "celsius"}
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": RESULT}
    turns = [asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = anthropic_client.create(messages=turns, **options)
    assert answer.stop_reason == "end_turn" and "17" in answer.content[0].text
    assert (
        answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        == anthropic_client.count_tokens(
            messages=turns, **{name: options[name] for name in ("model", "tools", "thinking")}
        ).input_tokens
    )
