"""Routes about the prefix cache: empty it, and say why a prompt is served from it as far as it is.

The cache is the scheduler's; this only asks. Nothing here shows prompts or keys of pages others have sent: a question
is answered within the asker's own namespace (tenant and cache_salt).
"""

import asyncio
import time
from typing import Final

from aiohttp import web

from gateway.chat import conversation_of, salt_of
from gateway.completions import encode_raw
from gateway.errors import ApiError, invalid, out_of_range
from gateway.exchange import Exchange, json_response
from gateway.schema import ExplainRequest
from gateway.service import Gateway
from gateway.validate import check_model
from meshkit.pages import namespace_key, page_keys

LONGEST_WAIT_S: Final = 600.0
POLL_S: Final = 0.1


async def flush_cache(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """Drop every page and tail that no request holds; refused while requests are open anywhere in the mesh.

    `?timeout=S` waits so many seconds for them to end.
    """
    gateway.check_ready()
    end = time.monotonic() + _patience(exchange.request.query.get("timeout"))
    while True:
        pages, running = await gateway.mesh.flush_cache()
        if not running or time.monotonic() >= end:
            break
        await asyncio.sleep(POLL_S)
    if running:
        raise ApiError(400, f"{running} requests are open; the cache is emptied when there are none", code="busy")
    text = f"Cache flushed: {pages} pages given back.\n"
    return web.Response(text=text, headers=exchange.headers)


def _patience(given: str | None) -> float:
    try:
        seconds = float(given or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise out_of_range("timeout", given, f"0 to {LONGEST_WAIT_S:g} seconds")
    return seconds


async def explain(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """Per rank: pages asked for, present and servable, what is missing first, and how a prefill would start now."""
    body = await gateway.body(exchange, ExplainRequest)
    check_model(body.model, gateway.model)
    gateway.check_ready()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages must be given")
    if body.messages is not None:
        ids = (await conversation_of(gateway, body).encode(gateway)).ids
    elif isinstance(body.prompt, str):
        ids = await encode_raw(gateway, body.prompt)
    else:
        raise invalid("prompt", "a list of prompts cannot be explained at once; send one text")
    model = gateway.model
    salt = salt_of(gateway, body)
    keys = page_keys(ids, namespace_key(exchange.tenant, salt, model.revision, model.kv_layout_id))
    ranks = await gateway.mesh.explain(tuple(keys), len(ids))
    return json_response(exchange, {"tokens": len(ids), "ranks": ranks})
