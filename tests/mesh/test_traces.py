"""One request's trace through gateway, scheduler, worker and grammar service, as a collector over a socket gets it."""

import asyncio
import itertools
import time
from concurrent import futures

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from meshkit.models import DEFAULT_MODEL
from meshkit.testing import ServiceProcess, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {
    "messages": [{"role": "user", "content": "Say a word."}],
    "chat_template_kwargs": {"thinking": False},
    "regex": "[a-z]{3,9}",
    "max_tokens": 16,
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP's receiving side; `spans` by service."""

    def __init__(self):
        self.spans = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            service = next(it.value.string_value for it in resource.resource.attributes if it.key == "service.name")
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector(tmp_path, monkeypatch):
    server, collector = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(f"unix:{tmp_path}/otel.sock")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"unix://{tmp_path}/otel.sock")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield collector
    server.stop(None)


@pytest.mark.timeout(240)
async def test_spans_of_four_services_nest_and_add_up(tmp_path, collector):
    tmp_path.chmod(0o700)
    scheduler, grammar = f"unix:{tmp_path}/s.sock", f"unix:{tmp_path}/g.sock"
    model, log = ("--model", str(DEFAULT_MODEL)), tmp_path / "gateway.log"
    with (
        ServiceProcess("grammar_svc", "--listen", grammar, *model, "--spares", "0", log=tmp_path / "grammar.log"),
        ServiceProcess("scheduler_svc", "--listen", scheduler, "--grammar", grammar, log=tmp_path / "scheduler.log"),
        ServiceProcess(
            "worker_svc", "--backend", "sim", "--scheduler", scheduler, "--grammar", grammar, *model,
            "--listen", f"unix:{tmp_path}/w.sock", log=tmp_path / "worker.log",
        ),
        ServiceProcess("gateway", "--listen-http", "127.0.0.1:0", "--scheduler", scheduler, *model, log=log),
    ):  # fmt: skip
        await until(lambda: "listening on http" in log.read_text(), 60)
        url = log.read_text().split("listening on ")[1].split()[0]
        async with aiohttp.ClientSession() as session:
            end = time.monotonic() + 150  # importing the compiler takes its time on a busy machine
            while time.monotonic() < end:
                headers = {"traceparent": PARENT}
                async with session.post(f"{url}/v1/chat/completions", json=BODY, headers=headers) as response:
                    status, answer = response.status, await response.json()
                if status == 200:
                    break
                await asyncio.sleep(0.5)
        assert status == 200, answer
        wanted = {"worker.decode", "scheduler.run", "chat v4-nano", "grammar.compile"}
        # Of "chat", the answered one: attempts before it were answered 503.
        await until(lambda: wanted <= {it.name for _, it in collector.spans if it.name != "chat v4-nano" or ok(it)}, 30)

    spans = [(service, span) for service, span in collector.spans if span.trace_id.hex() == PARENT.split("-")[1]]
    roots = [span for _, span in spans if span.name == "chat v4-nano" and ok(span)]
    root = roots[-1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    ids = {span.span_id for _, span in spans} | {root.parent_span_id}
    assert all(span.parent_span_id in ids for _, span in spans), "an orphan"
    below = {span.name: (service, span) for service, span in spans if span.parent_span_id == root.span_id}
    assert {name: service.removeprefix("v4mesh-") for name, (service, _) in below.items()} == {
        "gateway.read": "gateway",
        "gateway.tokenize": "gateway",
        "gateway.parse": "gateway",
        "grammar.compile": "grammar",
        "scheduler.queue": "scheduler",
        "scheduler.run": "scheduler",
        "worker.prefill": "worker",
        "worker.decode": "worker",
    }
    stages = {name: (span.start_time_unix_nano, span.end_time_unix_nano) for name, (_, span) in below.items()}
    slack = 5_000_000  # clocks are read once per process at its start
    for name, (start, end) in stages.items():
        assert root.start_time_unix_nano - slack <= start <= end <= root.end_time_unix_nano + slack, name
    order = ("gateway.read", "gateway.tokenize", "scheduler.queue", "worker.prefill", "worker.decode")
    for earlier, later in itertools.pairwise(order):
        assert stages[earlier][1] <= stages[later][0] + slack, (earlier, later)
    covered = sum(end - start for name, (start, end) in stages.items() if name in order)
    assert covered >= 0.8 * (stages["worker.decode"][1] - root.start_time_unix_nano), "time that no span accounts for"


def ok(span):
    return any(it.key == "http.response.status_code" and it.value.int_value == 200 for it in span.attributes)
