"""Responses that are kept: gone on from, read, listed, deleted, bounded; and conversations cut to what fits."""

import io
import json

import openai
import pytest
from openai import AsyncOpenAI

from gateway.stored import ResponseStore, StoreLimits, read
from tests.unit.gateway.dialects import WEATHER, call, calls

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER}
BODY = {"model": "v4-nano", "input": "Hi", "reasoning": {"effort": "none"}}


@pytest.fixture
async def client(served):
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(served, text, **options):
    served.mesh.say = lambda start, choice: served.mesh.text(text, **options)


def prompt_of(served) -> str:
    return served.mesh.tokenizer.decode(served.mesh.starts[-1].prompt.tolist(), skip_special_tokens=False)


class TestStore:
    def store(self, clock=lambda: 0.0, **limits):
        return ResponseStore(StoreLimits(**{"most": 3, "most_bytes": 10_000, "seconds": 60, **limits}), clock)

    def test_what_is_put_is_read_by_its_tenant_alone(self):
        store = self.store()
        assert store.put("a", "r1", {"id": "r1", "output": [{"x": 1}]}, [{"role": "user"}])
        kept = read(store.get("a", "r1"))
        assert kept.response["id"] == "r1" and kept.items == [{"role": "user"}, {"x": 1}]
        assert store.get("b", "r1") is None and not store.drop("b", "r1")
        assert store.drop("a", "r1") and not store.drop("a", "r1") and store.bytes == 0

    def test_the_oldest_go_first_by_number_and_by_bytes(self):
        store = self.store()
        for number in range(5):
            store.put("a", f"r{number}", {"id": number}, [])
        assert [store.get("a", f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
        store = self.store(most=99, most_bytes=1_000)
        for number in range(50):
            assert store.put("a", f"r{number}", {"id": number, "text": "x" * 100}, [])
            assert store.bytes <= 1_000
        assert 5 <= len(store) <= 8 and store.get("a", "r49")

    def test_one_that_is_too_large_is_not_kept_and_harms_no_other(self):
        store = self.store(most_bytes=1_000)
        store.put("a", "r1", {"id": 1}, [])
        assert not store.put("a", "r2", {"text": "x" * 2_000}, [])
        assert store.get("a", "r1") and len(store) == 1

    def test_they_go_with_time(self):
        now = [0.0]
        store = self.store(lambda: now[0])
        store.put("a", "r1", {}, [])
        now[0] = 59.0
        assert store.get("a", "r1")
        store.put("a", "r2", {}, [])
        now[0] = 60.0
        assert store.get("a", "r1") is None and store.get("a", "r2") and len(store) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_goes_on_by_id(client, served, streamed):
    async def ask(**body):
        if not streamed:
            return await client.responses.create(model="v4-nano", **body)
        async with client.responses.stream(model="v4-nano", **body) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    says(served, "Ann, hello.", think="a name")
    first = await ask(input="I am Ann", store=True, instructions="Be terse.", reasoning={"effort": "low"})
    says(served, "Ann.")
    second = await ask(input="Who am I?", previous_response_id=first.id, store=True, reasoning={"effort": "none"})
    prompt = prompt_of(served)
    assert prompt.index("I am Ann") < prompt.index("Ann, hello.") < prompt.index("Who am I?")
    assert "Be terse." not in prompt, "instructions hold for one response"
    assert (second.previous_response_id, second.store) == (first.id, True)
    third = await ask(input="Sure?", previous_response_id=second.id, reasoning={"effort": "none"})
    assert all(text in prompt_of(served) for text in ("I am Ann", "Who am I?", "Sure?")) and third.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(third.id)
    again = await client.responses.retrieve(second.id)
    assert again.output_text == "Ann." and again.usage.output_tokens == second.usage.output_tokens
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    assert items[-1].content[0].text == "Who am I?"
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(second.id)
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await ask(input="x", previous_response_id=second.id)
    assert gone.value.param == "previous_response_id"


async def test_how_much_is_kept_is_counted(served):
    for store in (True, True, False):
        await served.post(PATH, {**BODY, "store": store})
    async with served.session.get(f"{served.url}/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if "stored" in line)
    assert float(lines["v4mesh_stored_responses"]) == 2.0
    assert float(lines["v4mesh_stored_response_bytes"]) == served.gateway.stored.bytes > 1_000


async def test_a_call_and_its_result_across_two_requests(served):
    says(served, calls(call("Rome")))
    _, first, _ = await served.post(PATH, {**BODY, "tools": [TOOL], "store": True})
    (made,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "sun"}
    says(served, "Sun.")
    body = {**BODY, "tools": [TOOL], "previous_response_id": first["id"], "input": [result]}
    status, answer, _ = await served.post(PATH, body)
    assert status == 200, answer
    assert "Rome" in prompt_of(served) and "<tool_result>sun</tool_result>" in prompt_of(served)
    status, answer, _ = await served.post(PATH, {**body, "input": "Go on"})
    assert status == 400 and made["call_id"] in answer["error"]["message"]
    assert "previous_response_id.items[1]" in answer["error"]["message"]
    counted = await served.post(f"{PATH}/input_tokens", body)
    assert counted[1]["input_tokens"] == len(served.mesh.starts[-1].prompt)


async def test_what_one_tenant_keeps_another_does_not_find(serve_with, tmp_path):
    (tmp_path / "keys").write_text("ann key-of-ann-123\nbob key-of-bob-456\n")
    async with serve_with(api_key_file=tmp_path / "keys") as served:
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("key-of-ann-123", "key-of-bob-456"))
        _, made, _ = await served.post(PATH, {**BODY, "store": True}, headers=ann)
        url = f"{PATH}/{made['id']}"
        assert (await served.get(url, headers=ann))[0] == 200
        assert (await served.get(url, headers=bob))[0] == 404 and (await served.get(url))[0] == 401
        asked = {**BODY, "previous_response_id": made["id"]}
        assert (await served.post(PATH, asked, headers=bob))[0] == 404


async def test_without_a_store_it_is_refused(serve_with):
    async with serve_with(stored_responses=0) as served:
        for field in ({"store": True}, {"previous_response_id": "resp_1"}):
            status, answer, _ = await served.post(PATH, {**BODY, **field})
            assert (status, answer["error"]["param"]) == (501, next(iter(field)))


async def test_what_is_too_large_to_keep_is_said_before_it_runs(served):
    body = io.BytesIO(json.dumps({**BODY, "input": "x" * (3 << 20), "store": True}).encode())
    headers = {"Content-Type": "application/json"}
    async with served.session.post(served.url + PATH, data=body, headers=headers) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["param"]) == (400, "store") and not served.mesh.starts


@pytest.mark.parametrize(
    "query, status, ids",
    [
        ("", 200, ["item_2", "item_1", "item_0"]),
        ("?order=asc&limit=2", 200, ["item_0", "item_1"]),
        ("?after=item_1", 200, ["item_0"]),
        ("?order=odd", 400, None),
        ("?limit=0", 400, None),
        ("?limit=1000000000", 400, None),
        ("?after=nothing", 400, None),
    ],
)
async def test_items_come_in_pages(served, query, status, ids):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    _, made, _ = await served.post(PATH, {**BODY, "input": turns, "store": True})
    found, page, _ = await served.get(f"{PATH}/{made['id']}/input_items{query}")
    assert found == status, page
    if ids is not None:
        assert [item["id"] for item in page["data"]] == ids
        assert page["has_more"] is (query.endswith("limit=2")) and page["first_id"] == ids[0]


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns(served):
    says(served, "Yes.")
    turns = [{"role": "system", "content": "Stay."}]
    for number in range(40):
        turns += [
            {"role": "user", "content": f"question {number} " + "word " * 60},
            {"role": "assistant", "content": f"answer {number} " + "word " * 60},
        ]
    turns.append({"role": "user", "content": "the last one"})
    status, answer, _ = await served.post(PATH, {**BODY, "input": turns})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    status, answer, _ = await served.post(PATH, {**BODY, "input": turns, "truncation": "auto", "max_output_tokens": 50})
    assert status == 200 and answer["truncation"] == "auto", answer
    prompt, length = prompt_of(served), len(served.mesh.starts[-1].prompt)
    assert "Stay." in prompt and "the last one" in prompt and "question 39" in prompt and "question 0 " not in prompt
    assert 4_096 - 50 - 300 < length <= 4_096 - 50, "no more is left out than needed"
    first = min(number for number in range(40) if f"question {number} " in prompt)
    assert f"answer {first} " in prompt and f"answer {first - 1} " not in prompt, "a turn goes as a whole"
    short = {**BODY, "input": turns[-3:], "truncation": "auto"}
    await served.post(PATH, short)
    assert "question 39" in prompt_of(served)
    huge = {**BODY, "input": "word " * 9_000, "truncation": "auto"}
    assert (await served.post(PATH, huge))[1]["error"]["code"] == "context_length_exceeded"
