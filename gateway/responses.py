"""POST /v1/responses: OpenAI's Responses dialect on chat's pipeline.

Responses are not kept: asking for one by its id finds none, and what would need them is refused with 501.
"""

from aiohttp import web

from gateway.chat import answer_chat, conversation_of
from gateway.errors import ApiError
from gateway.exchange import Exchange, json_response
from gateway.generation import Generation
from gateway.responses_answer import ResponsesAnswer
from gateway.responses_request import ResponsesRequest, chat_of, echo_of
from gateway.schema import ChatRequest
from gateway.service import Gateway
from gateway.text.chat_encoding import EncodedPrompt
from gateway.validate import check_model


async def responses(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, ResponsesRequest)
    translated = chat_of(body, gateway.config.api_profile)

    def answer(gateway: Gateway, chat: ChatRequest, generation: Generation, _: EncodedPrompt) -> ResponsesAnswer:
        return ResponsesAnswer(
            generation,
            gateway.tokenizer,
            name=generation.named("resp_"),
            model=body.model or gateway.model.name,
            echo=echo_of(body),
            logprobs=bool(chat.logprobs),
        )

    with translated.told():
        return await answer_chat(gateway, exchange, translated.body, answer)


async def count_input_tokens(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """How many tokens the prompt of a Responses request has; needs no worker."""
    body = await gateway.body(exchange, ResponsesRequest)
    translated = chat_of(body, gateway.config.api_profile)
    with translated.told():
        check_model(translated.body.model, gateway.model)
        prompt = await conversation_of(gateway, translated.body).encode(gateway, bounded=False)
    return json_response(exchange, {"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def one_response(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """404: no response outlives its request."""
    name = exchange.notes["name"][:80]
    raise ApiError(404, f"there is no response {name!r}: this server keeps none", param="response_id", code="not_found")
