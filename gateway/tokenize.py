"""POST /tokenize and /detokenize: what the model would read, without running it.

The same checks and encoders as chat and completions, so that counts agree with their usage; texts beyond the context
are counted too. Needs no worker.
"""

from aiohttp import web

from gateway.chat import conversation_of
from gateway.completions import encode_raw
from gateway.errors import invalid
from gateway.exchange import Exchange, json_response
from gateway.schema import DetokenizeRequest, TokenizeRequest
from gateway.service import Gateway
from gateway.validate import check_ids, check_model


async def tokenize(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, TokenizeRequest)
    check_model(body.model, gateway.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages must be given")
    if body.messages is not None:
        tokens: list[int] | list[list[int]] = (await conversation_of(gateway, body).encode(gateway, bounded=False)).ids
        count = len(tokens)
    elif isinstance(body.prompt, list):
        if len(body.prompt) > gateway.limits.prompts:
            raise invalid("prompt", f"prompt has {len(body.prompt)} entries; allowed are {gateway.limits.prompts}")
        tokens = [await encode_raw(gateway, prompt, bounded=False) for prompt in body.prompt]
        count = sum(len(row) for row in tokens)
    else:
        assert body.prompt is not None
        tokens = await encode_raw(gateway, body.prompt, bounded=False)
        count = len(tokens)
    return json_response(exchange, {"tokens": tokens, "count": count, "max_model_len": gateway.model.max_context})


async def detokenize(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    body = await gateway.body(exchange, DetokenizeRequest)
    check_model(body.model, gateway.model)
    if body.tokens is None:
        raise invalid("tokens", "tokens is required: a list of token ids")
    ids = check_ids(body.tokens, gateway.model.vocab_size, "tokens")
    text = gateway.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens is not False)
    return json_response(exchange, {"text": text})
