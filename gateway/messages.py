"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect on chat's pipeline.

Versions and betas in headers are ignored. Names of Anthropic's models mean the model that is served, under the name
they were asked by.
"""

from aiohttp import web

from gateway.chat import answer_chat, conversation_of
from gateway.errors import invalid
from gateway.exchange import Exchange, json_response
from gateway.generation import Generation
from gateway.messages_answer import MessagesAnswer
from gateway.messages_request import MessagesRequest, chat_of
from gateway.schema import ChatRequest
from gateway.service import Gateway
from gateway.text.chat_encoding import EncodedPrompt
from gateway.validate import check_model


async def messages(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, MessagesRequest)
    if body.max_tokens is None:
        raise invalid("max_tokens", "max_tokens is required: how many tokens the answer may have")
    translated = chat_of(body, gateway.config.api_profile)

    def answer(gateway: Gateway, _: ChatRequest, generation: Generation, __: EncodedPrompt) -> MessagesAnswer:
        name, model = generation.named("msg_"), body.model or gateway.model.name
        return MessagesAnswer(generation, name=name, model=model, label=exchange.label)

    with translated.told():
        return await answer_chat(gateway, exchange, translated.body, answer)


async def count_tokens(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """How many tokens the prompt of a Messages request has; needs no worker."""
    body = await gateway.body(exchange, MessagesRequest)
    translated = chat_of(body, gateway.config.api_profile)
    with translated.told():
        check_model(translated.body.model, gateway.model)
        prompt = await conversation_of(gateway, translated.body).encode(gateway, bounded=False)
    return json_response(exchange, {"input_tokens": len(prompt.ids)})
