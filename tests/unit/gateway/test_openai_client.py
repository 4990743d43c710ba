"""The official openai client, unchanged, against the gateway."""

import openai
import pytest
from openai import AsyncOpenAI

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(served):
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["v4-nano"]
    assert (await client.models.retrieve("v4-nano")).id == "v4-nano"


async def test_chat_whole(client, served):
    served.mesh.say = lambda start, choice: served.mesh.text("Fine.", think="why")
    answer = await client.chat.completions.create(
        model="v4-nano", messages=USER, n=2, logprobs=True, top_logprobs=3, seed=1, reasoning_effort="low"
    )
    assert [choice.message.content for choice in answer.choices] == ["Fine.", "Fine."]
    assert answer.choices[0].message.reasoning_content == "why"
    assert answer.choices[0].finish_reason == "stop"
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content) == "Fine."
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    usage = answer.usage
    assert usage.completion_tokens_details.reasoning_tokens > 0 and usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(client, served):
    whole = await client.chat.completions.create(model="v4-nano", messages=USER, n=2)
    stream = await client.chat.completions.create(
        model="v4-nano", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, finishes, usage = ["", ""], {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_chat_stop_string(client, served):
    answer = await client.chat.completions.create(model="v4-nano", messages=USER, stop=["wor"])
    assert answer.choices[0].message.content == "Hello 0 " and answer.choices[0].finish_reason == "stop"


async def test_the_stream_helper_gathers_the_message(client):
    async with client.chat.completions.stream(model="v4-nano", messages=USER) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello 0 world."


async def test_completions_whole_and_streamed(client):
    whole = await client.completions.create(model="v4-nano", prompt=["Hi", "Yo"], n=2, logprobs=2, max_tokens=20)
    assert [choice.text for choice in whole.choices] == ["Hello 0 world.", "Hello 1 world."] * 2
    assert "".join(whole.choices[0].logprobs.tokens) == "Hello 0 world."
    texts = [""] * 4
    async for chunk in await client.completions.create(
        model="v4-nano", prompt=["Hi", "Yo"], n=2, stream=True, stop="world"
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["Hello 0 ", "Hello 1 "] * 2


async def test_errors_are_the_clients_own_classes(client, served):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="v4-nano", messages=USER, temperature=5)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=USER)
    assert unknown.value.code == "model_not_found"
    served.mesh.status = None
    with pytest.raises(openai.InternalServerError) as busy:
        await client.chat.completions.create(model="v4-nano", messages=USER)
    assert busy.value.status_code == 503
