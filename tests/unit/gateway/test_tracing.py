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
    mesh.waited_ms = 7
    tracing = start_tracing("gateway", exporter=exporter)
    runner = web.AppRunner(build_app(mesh, tokenizer, GatewayConfig(model=DEFAULT_MODEL), tracing), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    answers = []
    try:
        async with aiohttp.ClientSession() as session:
            for body, headers in (
                (
                    {"messages": [{"role": "user", "content": "secret words"}], "stop": ["END"], "seed": -7},
                    {"traceparent": PARENT, "tracestate": "vendor=x-1", "baggage": "a=b, session.id=s%2F1;p=q"},
                ),
                ({"messages": [], "temperature": 9}, {}),
            ):
                async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
                    answers.append(await response.json())
            async with session.get(url + "/health") as response:
                await response.read()
    finally:
        await runner.cleanup()
        tracing.shutdown()
    spans = exporter.get_finished_spans()
    good, bad = [span for span in spans if span.name == "chat v4-nano"]
    assert f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{good.parent.span_id:016x}" == PARENT.split("-")[2]
    assert good.attributes["gen_ai.usage.output_tokens"] == 6
    assert good.attributes["gen_ai.usage.input_tokens"] == len(mesh.starts[0].prompt)
    assert good.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert good.attributes["gen_ai.request.temperature"] == 1.0
    stages = {name: good.attributes[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill",
        "model_decode", "model_inference")}  # fmt: skip
    assert stages["queue"] == 0.007 and stages["model_prefill"] >= 0
    assert stages["model_inference"] == stages["model_prefill"] + stages["model_decode"]
    assert good.attributes["gen_ai.request.stop_sequences"] == ("END",) and good.attributes["gen_ai.request.seed"] == -7
    assert good.attributes["gen_ai.response.id"] == answers[0]["id"]
    assert good.attributes["gen_ai.conversation.id"] == "s/1"
    assert url == f"http://{good.attributes['server.address']}:{good.attributes['server.port']}"
    assert "gen_ai.request.seed" not in bad.attributes and "gen_ai.conversation.id" not in bad.attributes
    assert mesh.starts[0].traceparent.endswith(" vendor=x-1")
    assert {
        span.context.trace_state.to_header() for span in spans if span.context.trace_id == good.context.trace_id
    } == {"vendor=x-1"}
    assert bad.attributes["http.response.status_code"] == 400 and bad.parent is None
    assert bad.attributes["error.type"] == "invalid_request_error"
    assert "secret" not in str([dict(span.attributes) for span in spans])
    own = f"{good.context.span_id:016x}"
    assert mesh.starts[0].traceparent.split("-")[1:3] == [PARENT.split("-")[1], own]  # the mesh hangs its spans there
    stages = {span.name: span for span in spans if span.parent and f"{span.parent.span_id:016x}" == own}
    assert list(stages) == ["gateway.read", "gateway.tokenize", "gateway.parse"]
    for span in stages.values():
        assert good.start_time <= span.start_time <= span.end_time <= good.end_time
    assert stages["gateway.read"].end_time == stages["gateway.tokenize"].start_time
    (event,) = good.events
    assert event.timestamp == stages["gateway.parse"].start_time
