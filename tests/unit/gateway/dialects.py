"""For tests of the Messages and Responses dialects: calls in the model's markup, named events, folded streams."""

import json
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def call(city: str = "Paris", days: int | None = None) -> str:
    """A call of get_weather as the model writes it."""
    more = f'<｜DSML｜parameter name="days" string="false">{days}</｜DSML｜parameter>\n' if days else ""
    return (
        '<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n{more}</｜DSML｜invoke>\n'
    )


def calls(*made: str) -> str:
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(made) + "</｜DSML｜tool_calls>"


async def named_events(served, path: str, body: Any, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream; each name equals the type inside, comments are left out."""
    async with served.session.post(served.url + path, json={**body, "stream": True}, **options) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n") and "[DONE]" not in raw
    events = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        if block.startswith(": "):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def folded_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a Messages stream adds up to; a call's input is its JSON text."""
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message, ending = events[0]["message"], events[-2]
    assert ending["type"] == "message_delta"
    open_block: int | None = None
    for event in events[1:-2]:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert open_block is None and index == len(message["content"])
            open_block = index
            message["content"].append({**event["content_block"], "json": ""})
            continue
        assert open_block == index
        block = message["content"][index]
        if kind == "content_block_stop":
            open_block = None
            continue
        delta = event["delta"]
        field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}.get(delta["type"])
        if field is None:
            assert delta["type"] == "signature_delta" and not block["signature"]
            block["signature"] = delta["signature"]
        else:
            block[field] += delta[{"json": "partial_json"}.get(field, field)]
    assert open_block is None
    return {**message, **ending["delta"], "usage": ending["usage"]}


def folded_response(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a Responses stream's deltas add up to, checked against what its own `done` events say."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events[2:-1]:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
            continue
        assert index == len(items) - 1
        if kind.endswith(".delta"):
            texts[index] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            items[index] = event["item"]
        elif kind.startswith("response.content_part"):
            assert event["part"]["text"] == (texts[index] if kind.endswith("done") else "")
        else:
            assert texts[index] == (event["arguments"] if "arguments" in event else event["text"])
    for item, text in zip(items, texts, strict=True):
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    return items
