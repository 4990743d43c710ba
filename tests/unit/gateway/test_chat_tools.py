"""Chat with tools: what is asked, what the mesh is given, and calls in whole and streamed answers."""

import json

import pytest
from openai import AsyncOpenAI

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
BODY = {"messages": USER, "tools": [WEATHER]}


def call(city="Paris", days=None):
    more = f'<｜DSML｜parameter name="days" string="false">{days}</｜DSML｜parameter>\n' if days else ""
    return (
        '<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n{more}</｜DSML｜invoke>\n'
    )


def block(*calls):
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(calls) + "</｜DSML｜tool_calls>"


def says(served, text, **options):
    served.mesh.say = lambda start, choice: served.mesh.text(text, **options)


@pytest.fixture
async def client(served):
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def chunks(served, body):
    events = await served.events(PATH, {**body, "stream": True})
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_a_call_in_a_whole_answer(served):
    says(served, "Let me look." + block(call(), call("Rome", 3)), think="hm")
    status, answer, _ = await served.post(PATH, {**BODY, "thinking": {"type": "enabled"}})
    choice = answer["choices"][0]
    message = choice["message"]
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "hm")
    assert [c["type"] for c in message["tool_calls"]] == ["function"] * 2
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "get_weather", "arguments": '{"city": "Rome", "days": 3}'},
    ]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert answer["usage"]["completion_tokens"] == len(served.mesh.tokenizer.encode(
        "hm</think>Let me look." + block(call(), call("Rome", 3)))) + 1  # fmt: skip


@pytest.mark.parametrize("burst", [1, 2, 7, 500])
@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "return_token_ids": True}])
async def test_chunks_add_up_to_the_whole_answer(served, burst, extra):
    says(served, "Let me look." + block(call(), call("Rome", 3)), think="hm", burst=burst)
    body = {**BODY, "thinking": {"type": "enabled"}, **extra}
    whole = (await served.post(PATH, body))[1]["choices"][0]
    texts, calls, finishes, ids = {"content": "", "reasoning_content": ""}, [], [], []
    for part in await chunks(served, body):
        choice = part["choices"][0]
        delta = choice["delta"]
        ids += choice.get("token_ids", [])
        filled = [name for name in (*texts, "tool_calls") if delta.get(name) is not None]
        assert len(filled) == 1 and set(texts) <= set(delta)
        for name in texts:
            texts[name] += delta[name] or ""
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"} and piece["function"]["arguments"] == ""
                calls.append({"id": piece["id"], "type": piece["type"], "function": piece["function"]})
                continue
            assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
            assert piece["function"]["arguments"]
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert finishes == ["tool_calls"] == [whole["finish_reason"]]
    assert texts == {name: whole["message"][name] for name in texts}
    assert [c["function"] for c in calls] == [c["function"] for c in whole["message"]["tool_calls"]]
    if extra:
        assert ids == whole["token_ids"]
        assert "".join(t["token"] for t in whole["logprobs"]["content"]).rstrip("\n") == "Let me look."


async def test_markup_is_never_streamed_as_content(served):
    says(served, "Let me check." + block(call()))
    text = "".join(p["choices"][0]["delta"]["content"] or "" for p in await chunks(served, BODY))
    assert text == "Let me check."


async def test_choice_none_is_a_request_without_tools(served):
    says(served, "It is " + block(call()).strip())
    _, plain, _ = await served.post(PATH, {"messages": USER})
    _, none, _ = await served.post(PATH, {**BODY, "tool_choice": "none"})
    _, auto, _ = await served.post(PATH, {**BODY, "tool_choice": "auto"})
    assert plain["usage"]["prompt_tokens"] == none["usage"]["prompt_tokens"] < auto["usage"]["prompt_tokens"]
    for answer in (plain, none):
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "It is " + block(call()).strip()


async def test_finish_reasons(served):
    for text, limit, reason, calls in [
        ("No need.", None, "stop", 0),
        (block(), None, "stop", 0),
        (block(call()), None, "tool_calls", 1),
        (block(call(), '<｜DSML｜invoke name="get_weather">'), None, "tool_calls", 2),
        ('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n', None, "stop", 1),
        (block(call()), -4, "length", 1),
        (block(call()) + "ignored", -3, "length", 1),
    ]:
        says(served, text)
        body = {**BODY, "max_tokens": len(served.mesh.tokenizer.encode(text)) + limit} if limit else BODY
        choice = (await served.post(PATH, body))[1]["choices"][0]
        assert choice["finish_reason"] == reason, text
        assert len(choice["message"].get("tool_calls", [])) == calls
        assert ("tool_calls" in choice["message"]) is (calls > 0)


async def test_without_parallel_calls_there_is_one_at_most(served):
    says(served, "ok" + block(call(), call("Rome")))
    for body in (BODY, {**BODY, "parallel_tool_calls": True}):
        assert len((await served.post(PATH, body))[1]["choices"][0]["message"]["tool_calls"]) == 2
    choice = (await served.post(PATH, {**BODY, "parallel_tool_calls": False}))[1]["choices"][0]
    assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == ['{"city": "Paris"}']
    assert choice["finish_reason"] == "tool_calls"


async def test_reasoning_left_in_content_is_closed_before_a_call(served):
    says(served, "I call it" + block(call()))
    body = {**BODY, "thinking": {"type": "enabled"}}
    message = (await served.post(PATH, {**body, "separate_reasoning": False}))[1]["choices"][0]["message"]
    assert message["content"] == "<think>I call it</think>" and len(message["tool_calls"]) == 1
    message = (await served.post(PATH, {**body, "include_reasoning": False}))[1]["choices"][0]["message"]
    assert message["content"] == "" and len(message["tool_calls"]) == 1


async def test_stop_strings_do_not_look_into_calls(served):
    says(served, "ok" + block(call()))
    choice = (await served.post(PATH, {**BODY, "stop": ["Paris"]}))[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    says(served, "ok, Paris" + block(call()))
    choice = (await served.post(PATH, {**BODY, "stop": ["Paris"]}))[1]["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "ok, ")


async def test_a_stop_string_of_newlines_that_the_end_lets_go_of(served):
    text = "ok\n\n"
    says(served, text)
    tokens = len(served.mesh.tokenizer.encode(text))
    for limit in (None, tokens):
        choice = (await served.post(PATH, {**BODY, "stop": ["\n\n"], "max_tokens": limit}))[1]["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["matched_stop"]) == ("ok", "stop", "\n\n")


async def test_the_openai_client_runs_a_whole_round(client, served):
    says(served, block(call("Paris", 2)))
    first = await client.chat.completions.create(model="v4-nano", messages=USER, tools=[WEATHER])
    made = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(made[0].function.arguments) == {"city": "Paris", "days": 2}
    says(served, "It rains.")
    result = {"role": "tool", "tool_call_id": made[0].id, "content": "rain"}
    messages = [*USER, first.choices[0].message, result]
    second = await client.chat.completions.create(model="v4-nano", messages=messages, tools=[WEATHER])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It rains.", "stop")
    prompt = served.mesh.tokenizer.decode(served.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)
    assert block(call("Paris", 2)) in prompt and "<tool_result>rain</tool_result>" in prompt
    wrong = {**result, "tool_call_id": "other"}
    status, answer, _ = await served.post(PATH, {**BODY, "messages": [*USER, {
        "role": "assistant", "tool_calls": [made[0].model_dump()]}, wrong]})  # fmt: skip
    assert status == 400 and made[0].id in answer["error"]["message"]


async def test_the_openai_client_streams_calls_of_several_choices(client, served):
    served.mesh.say = lambda start, choice: served.mesh.text("ok" + block(call("Paris" if choice else "Rome", 1)))
    async with client.chat.completions.stream(model="v4-nano", messages=USER, tools=[WEATHER], n=2) as stream:
        deltas = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = await stream.get_final_completion()
    assert len(deltas) > 2
    for choice, city in zip(final.choices, ("Rome", "Paris"), strict=True):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "ok"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": city, "days": 1}
