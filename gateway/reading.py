"""POST /separate_reasoning and /parse_function_call: a text that a model wrote, read as an answer of chat would be.

For programs that generate over raw routes and want their parts told apart. The parser is chat's own; markers in the
text count as the tokens they spell. Needs no worker.
"""

from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web

from gateway.errors import invalid
from gateway.exchange import Exchange, json_response
from gateway.schema import ReadingRequest
from gateway.service import Gateway
from gateway.text import prompt as markers
from gateway.text.chat_messages import ChatError, ToolSpec, parse_tools
from gateway.text.deltas import Delta
from gateway.text.output_parser import OutputParser


async def separate_reasoning(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """Reasoning and the text after it. Without `</think>`, a text that begins with `<think>` is all thought."""
    body = await gateway.body(exchange, ReadingRequest)
    text = _text(body)
    begins: Literal["reasoning", "content"] = "content"
    if markers.END_THINK in text or text.lstrip().startswith(markers.THINK):
        begins = "reasoning"
    deltas = await _read(gateway, text, begins)
    parts = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    return json_response(exchange, {"reasoning_text": parts["reasoning"], "text": parts["content"]})


async def parse_function_call(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """The calls in a text, each with its arguments as JSON text and its place in `tools`, and the prose before them."""
    body = await gateway.body(exchange, ReadingRequest)
    text = _text(body)
    try:
        tools = parse_tools(body.tools)
    except ChatError as error:
        raise invalid(error.param, error.message) from None
    if not tools:
        raise invalid("tools", "tools is required: a list of at least one function")
    deltas = await _read(gateway, text, "content", tools)
    places = {tool.name: index for index, tool in enumerate(tools)}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.call is None:
            continue
        if delta.call.opens:
            place = places.get(delta.call.name, -1)
            calls.append({"tool_index": place, "name": delta.call.name, "parameters": ""})
        calls[delta.call.index]["parameters"] += delta.text
    prose = "".join(delta.text for delta in deltas if delta.call is None)
    return json_response(exchange, {"normal_text": prose, "calls": calls})


def _text(body: ReadingRequest) -> str:
    if body.text is None:
        raise invalid("text", "text is required: what the model wrote")
    return body.text


async def _read(
    gateway: Gateway, text: str, begins: Literal["reasoning", "content"], tools: Sequence[ToolSpec] = ()
) -> list[Delta]:
    tokenizer = gateway.tokenizer

    def read() -> list[Delta]:
        parser = OutputParser(tokenizer, starts_in=begins, tools=tools)
        return [*parser.push(tokenizer.encode(text)), *parser.finish()]

    return await gateway.encoder.run(len(text), "text", read)
