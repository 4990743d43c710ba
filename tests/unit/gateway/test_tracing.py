"""One server span per inference request, under the caller's trace; sizes only, never text."""

import aiohttp
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.app import build_app
from gateway.config import GatewayConfig
from meshkit.models import DEFAULT_MODEL
from meshkit.obs import start_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_spans(mesh, tokenizer):
    exporter = InMemorySpanExporter()
    tracing = start_tracing("gateway", exporter=exporter)
    runner = web.AppRunner(build_app(mesh, tokenizer, GatewayConfig(model=DEFAULT_MODEL), tracing), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            for body, headers in (
                ({"messages": [{"role": "user", "content": "secret words"}]}, {"traceparent": PARENT}),
                ({"messages": [], "temperature": 9}, {}),
            ):
                async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
                    await response.read()
            async with session.get(url + "/health") as response:
                await response.read()
    finally:
        await runner.cleanup()
        tracing.shutdown()
    good, bad = exporter.get_finished_spans()
    assert good.name == bad.name == "chat v4-nano"
    assert f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    assert good.attributes["gen_ai.usage.output_tokens"] == 6
    assert good.attributes["gen_ai.usage.input_tokens"] == len(mesh.starts[0].prompt)
    assert bad.attributes["http.response.status_code"] == 400
    assert bad.attributes["error.type"] == "invalid_request_error"
    assert good.end_time > good.start_time
    assert "secret" not in str(dict(good.attributes))
    assert mesh.starts[0].traceparent == PARENT
