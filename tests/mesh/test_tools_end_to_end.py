"""A whole round with a tool on the real mesh: the shipped model calls it, reads the result and answers."""

import json

import openai
import pytest

MODEL = "v4-nano"
QUESTION = {"role": "user", "content": "What is the weather in Paris in celsius?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            "required": ["city", "unit"],
        },
    },
}
OPTIONS = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 120, "reasoning_effort": "none"}


@pytest.fixture(scope="module")
def client(plain_mesh):
    with openai.OpenAI(base_url=f"{plain_mesh}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_the_model_calls_a_tool_and_answers_from_its_result(client):
    choice = client.chat.completions.create(messages=[QUESTION], **OPTIONS).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", "", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "celsius"}
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temp": 17, "sky": "windy"})}
    answer = client.chat.completions.create(messages=[QUESTION, choice.message, result], **OPTIONS).choices[0]
    assert answer.finish_reason == "stop" and answer.message.tool_calls is None
    assert "17" in answer.message.content and "windy" in answer.message.content


def test_the_streamed_call_is_the_same(client):
    chunks = client.chat.completions.create(messages=[QUESTION], stream=True, **OPTIONS)
    choices = [chunk.choices[0] for chunk in chunks]
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or []]
    assert pieces[0].function.name == "get_weather" and not any(piece.id for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == '{"city": "Paris", "unit": "celsius"}'
    assert len(pieces) > 4, "the arguments came in one go"
    assert not any(choice.delta.content for choice in choices) and choices[-1].finish_reason == "tool_calls"


def test_without_tools_the_question_is_plain(client):
    options = {name: value for name, value in OPTIONS.items() if name != "tools"}
    choice = client.chat.completions.create(messages=[QUESTION], **options).choices[0]
    assert choice.finish_reason in {"stop", "length"} and choice.message.tool_calls is None
