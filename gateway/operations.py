"""Routes for operators and probes: models, health, metrics, server information, abort.

All of them are cheap and need no worker, but /health_generate, which runs one token. Nothing here shows prompts,
outputs or keys.
"""

import asyncio
from typing import Any

from aiohttp import web

from gateway.completions import raw_parsers
from gateway.errors import ApiError, unavailable
from gateway.exchange import Exchange, error_response, json_response
from gateway.schema import AbortRequest, SamplingFields
from gateway.service import Gateway
from gateway.validate import check_sampling
from meshkit.address import parse_address
from meshkit.build import build_id
from meshkit.frames import SchedulerStatus

HEALTH_SECONDS = 20.0


async def list_models(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """The one model, as OpenAI lists it and as Anthropic does."""
    name = gateway.model.name
    listed = {"object": "list", "data": [gateway.model.card()], "has_more": False, "first_id": name, "last_id": name}
    return json_response(exchange, listed)


async def one_model(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    name = exchange.notes["name"]
    if not gateway.model.answers_to(name):
        text = f"the model {name!r} does not exist here; this server has {gateway.model.name!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
    return json_response(exchange, gateway.model.card())


async def health(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """This process serves HTTP and is not leaving."""
    if gateway.admission.draining:
        return error_response(exchange, ApiError(503, "this gateway is shutting down", retry_after_s=2))
    return json_response(exchange, {"status": "ok"})


async def ready(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """A request sent now would run."""
    trouble = gateway.trouble()
    if trouble is not None:
        return error_response(exchange, trouble)
    return json_response(exchange, {"status": "ready"})


async def health_generate(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """The whole way works: one token is generated, unless others are being generated anyway."""
    gateway.check_ready()
    if gateway.admission.streams == 0:
        sampling = check_sampling(SamplingFields(max_tokens=1, temperature=0.0), gateway.model, gateway.limits)
        job = gateway.job(exchange, sampling, [0], raw_parsers(gateway, sampling), param="input_ids", constraint=None)
        with gateway.generation(exchange, [job]) as generation:
            generation.start()
            try:
                async with asyncio.timeout(HEALTH_SECONDS):
                    async for _ in generation.updates():
                        continue
            except TimeoutError:
                raise unavailable(f"no token came within {HEALTH_SECONDS:g} s", retry_after_s=5) from None
    return json_response(exchange, {"status": "ok"})


async def metrics(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    _check_shown(gateway, exchange, "/metrics")
    headers = {**exchange.headers, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    siblings = gateway.siblings
    body = gateway.metrics.exposition() if siblings is None else await siblings.metrics()
    return web.Response(body=body, headers=headers)


async def server_info(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    _check_shown(gateway, exchange, "/server_info")
    model, limits = gateway.model, gateway.limits
    return json_response(
        exchange,
        {
            "version": build_id(),
            "served_model_name": model.name,
            "model_path": str(gateway.config.model),
            "max_model_len": model.max_context,
            "context_length": model.max_context,
            "max_output_tokens": gateway.config.max_output_tokens,
            "ready": gateway.trouble() is None,
            "limits": {name: getattr(limits, name) for name in limits.__slots__},
            "api_keys": gateway.config.api_key_file is not None,
            "open_requests": gateway.admission.streams,
            "scheduler": _scheduler_state(gateway.mesh.status),
            "instances": [
                {
                    "address": it.address,
                    "attached": it.attached,
                    "open": it.open,
                    "known_pages": it.known_pages,
                    "scheduler": _scheduler_state(it.status),
                }
                for it in gateway.mesh.instances
            ],
        },
    )


async def version(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """This build."""
    return json_response(exchange, {"version": build_id()})


async def model_info(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    model = gateway.model
    return json_response(
        exchange,
        {
            "model_path": str(gateway.config.model),
            "tokenizer_path": str(gateway.config.model),
            "served_model_name": model.name,
            "is_generation": True,
            "max_model_len": model.max_context,
            "vocab_size": model.vocab_size,
            "eos_token_id": list(model.eos_ids),
            "revision": model.revision or None,
            "default_thinking": model.default_thinking,
            "effort_revision": model.effort_revision,
        },
    )


async def abort_request(gateway: Gateway, exchange: Exchange) -> web.StreamResponse:
    """Callers reach their own requests: those of their key's tenant."""
    body = await gateway.body(exchange, AbortRequest)
    if body.abort_all or body.rid:
        await gateway.abort_everywhere(exchange.tenant, "" if body.abort_all else body.rid or "")
    return json_response(exchange, {"success": True})


def _check_shown(gateway: Gateway, exchange: Exchange, path: str) -> None:
    """403 where others than this machine's users could read how much the mesh does, unless the operator wants that."""
    config = gateway.config
    if not (exchange.operators or config.public_metrics or parse_address(config.listen_http).is_local):
        text = (
            f"{path} is not shown beyond loopback: start the gateway with --listen-admin, an address for operators, "
            "or with --public-metrics (listen_admin or public_metrics = true in its [gateway] section)"
        )
        raise ApiError(403, text, code="not_public")


def _scheduler_state(status: SchedulerStatus | None) -> dict[str, Any] | None:
    if status is None:
        return None
    names = ("ready", "draining", "running", "waiting", "workers", "preemptions")
    state: dict[str, Any] = {name: getattr(status, name) for name in names}
    state["pages"] = {"total": status.pages_total, "free": status.pages_free}
    state["slots"] = {"total": status.slots_total, "free": status.slots_free}
    return state
