"""Texts that were generated elsewhere, told apart as chat tells its own answers apart."""

import pytest

from tests.unit.gateway.dialects import WEATHER, call, calls

TOOLS = [
    {"type": "function", "function": {"name": "noop"}},
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
]


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>They greet me.</think>Hello!", "They greet me.", "Hello!"),
        ("They greet me.\n</think>\n\nHello!", "They greet me.", "Hello!"),
        ("<think>Still at it", "Still at it", ""),
        ("Hello!", "", "Hello!"),
        ("", "", ""),
    ],
)
@pytest.mark.parametrize("path", ["/separate_reasoning", "/v1/separate_reasoning"])
async def test_reasoning(served, path, text, reasoning, rest):
    status, answer, _ = await served.post(path, {"text": text, "reasoning_parser": "deepseek-v4"})
    assert (status, answer) == (200, {"reasoning_text": reasoning, "text": rest})


async def test_calls(served):
    text = "Let me look." + calls(call(), call("Rome", 3), '<｜DSML｜invoke name="other"/>')
    status, answer, _ = await served.post("/parse_function_call", {"text": text, "tools": TOOLS})
    assert status == 200 and answer["normal_text"] == "Let me look."
    assert answer["calls"] == [
        {"tool_index": 1, "name": "get_weather", "parameters": '{"city": "Paris"}'},
        {"tool_index": 1, "name": "get_weather", "parameters": '{"city": "Rome", "days": 3}'},
        {"tool_index": -1, "name": "other", "parameters": "{}"},
    ]
    _, answer, _ = await served.post("/parse_function_call", {"text": "No call.", "tools": TOOLS})
    assert answer == {"normal_text": "No call.", "calls": []}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/separate_reasoning", {}, "text"),
        ("/separate_reasoning", {"text": 5}, "text"),
        ("/parse_function_call", {"tools": TOOLS}, "text"),
        ("/parse_function_call", {"text": "x"}, "tools"),
        ("/parse_function_call", {"text": "x", "tools": []}, "tools"),
        ("/parse_function_call", {"text": "x", "tools": [5]}, "tools[0]"),
    ],
)
async def test_what_cannot_be_read(served, path, body, param):
    status, answer, _ = await served.post(path, body)
    assert status == 400 and answer["error"]["param"] == param
