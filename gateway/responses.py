"""/v1/responses: OpenAI's Responses dialect on chat's pipeline, and the responses that are kept.

With `store` a response is kept in this gateway's memory (`gateway.stored`), and `previous_response_id` goes on from it.
Without, nothing outlives its request: that is the default here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.chat import answer_chat, conversation_of
from gateway.dialect import Translated, quoted
from gateway.errors import ApiError, invalid, missing_part
from gateway.exchange import Exchange, json_response
from gateway.generation import Generation
from gateway.responses_answer import ResponsesAnswer
from gateway.responses_request import ResponsesRequest, chat_of, echo_of, items_of
from gateway.schema import ChatRequest
from gateway.service import Gateway
from gateway.stored import LARGEST, Item, Kept, read
from gateway.text.chat_encoding import EncodedPrompt
from gateway.truncation import fitting
from gateway.validate import check_model

MOST_LISTED = 100
_LISTED = 20


async def responses(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, ResponsesRequest)
    earlier = await _earlier(gateway, exchange, body)
    translated = chat_of(body, gateway.config.api_profile, earlier)
    keep = _keeper(gateway, exchange, body, earlier) if body.store else None

    def answer(gateway: Gateway, chat: ChatRequest, generation: Generation, _: EncodedPrompt) -> ResponsesAnswer:
        return ResponsesAnswer(
            generation,
            gateway.tokenizer,
            name=generation.named("resp_"),
            model=body.model or gateway.model.name,
            echo=echo_of(body),
            logprobs=bool(chat.logprobs),
            keep=keep,
        )

    with translated.told():
        return await answer_chat(gateway, exchange, await _cut(gateway, body, translated), answer)


async def count_input_tokens(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """How many tokens the prompt of a Responses request has; needs no worker."""
    body = await gateway.body(exchange, ResponsesRequest)
    translated = chat_of(body, gateway.config.api_profile, await _earlier(gateway, exchange, body))
    with translated.told():
        check_model(translated.body.model, gateway.model)
        chat = await _cut(gateway, body, translated)
        prompt = await conversation_of(gateway, chat).encode(gateway, bounded=False)
    return json_response(exchange, {"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def one_response(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """A response that is kept; DELETE forgets it."""
    name = exchange.notes["name"]
    if exchange.request.method != "DELETE":
        return json_response(exchange, (await _kept(gateway, exchange, name)).response)
    if not await gateway.forget_response(exchange.tenant, name):
        raise _unknown(name)
    return json_response(exchange, {"id": name, "object": "response", "deleted": True})


async def input_items(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """What a response answers, with what the responses before it were asked and said."""
    kept = await _kept(gateway, exchange, exchange.notes["name"])
    return json_response(exchange, _page(kept.input, exchange.request.query))


async def cancel_response(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """For responses in the background, which there are none of here: one that is kept has ended."""
    name = exchange.notes["name"]
    await _kept(gateway, exchange, name)
    raise invalid("response_id", f"response {name[:80]!r} has ended: only background responses can be cancelled")


async def _earlier(gateway: Gateway, exchange: Exchange, body: ResponsesRequest) -> Sequence[Item]:
    """The items of the conversation so far. Raises 404 where the response to go on from is not kept."""
    if (body.store or body.previous_response_id) and not gateway.stored.enabled:
        field = "store" if body.store else "previous_response_id"
        raise missing_part(field, "what outlives its request", "a store of responses (--stored-responses is 0)")
    if body.previous_response_id is None:
        return ()
    try:
        return (await _kept(gateway, exchange, body.previous_response_id)).items
    except ApiError as error:
        error.param, error.message = "previous_response_id", f"previous_response_id: {error.message}"
        raise


async def _kept(gateway: Gateway, exchange: Exchange, name: str) -> Kept:
    data = await gateway.stored_response(exchange.tenant, name)
    if data is None:
        raise _unknown(name)
    return read(data)


def _unknown(name: str) -> ApiError:
    text = f"there is no response {name[:80]!r}: it was made without store: true, is too old, or this server restarted"
    return ApiError(404, text, param="response_id", code="not_found")


def _keeper(
    gateway: Gateway, exchange: Exchange, body: ResponsesRequest, earlier: Sequence[Item]
) -> Callable[[Mapping[str, Any]], None]:
    """Keeps the answer. Raises 400 now for what would be too large then."""
    items = [*earlier, *items_of(body)]
    size = (exchange.request.content_length or 0) + sum(len(str(item)) for item in earlier)
    if size > LARGEST // 2:
        raise invalid("store", f"store: the conversation has some {size} bytes; kept are at most {LARGEST // 2}")
    tenant = exchange.tenant

    def keep(response: Mapping[str, Any]) -> None:
        gateway.stored.put(tenant, str(response["id"]), response, items)

    return keep


async def _cut(gateway: Gateway, body: ResponsesRequest, translated: Translated) -> ChatRequest:
    """With `truncation: auto`, the request without its oldest turns where all of them do not fit."""
    if body.truncation != "auto":
        return translated.body
    return await fitting(gateway, translated.body, body.max_output_tokens or 1)


def _page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A list of items as OpenAI pages it: newest first unless `order` says otherwise."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order is {quoted(order)}; accepted: asc, desc")
    limit = query.get("limit", str(_LISTED))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= MOST_LISTED):
        raise invalid("limit", f"limit is {quoted(limit)}; allowed are 1 to {MOST_LISTED}")
    shown = [{"id": f"item_{number}", "type": "message", **item} for number, item in enumerate(items)]
    if order == "desc":
        shown.reverse()
    if after is not None:
        places = [number for number, item in enumerate(shown) if item["id"] == after]
        if not places:
            raise invalid("after", f"after is {quoted(after)}, which is no item here")
        shown = shown[places[0] + 1 :]
    page = shown[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(shown) > len(page),
    }
