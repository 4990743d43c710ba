"""The public gRPC service over a real socket: same answers, limits and errors as REST."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from meshpb.oip import inference_pb2, inference_pb2_grpc
from meshpb.v1 import generation_pb2 as pb
from meshpb.v1 import generation_pb2_grpc, scheduler_pb2

from gateway.app import GATEWAY, build_app
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.rpc.generation import GenerationServicer
from gateway.rpc.listener import RpcListener
from meshkit.frames import Verdict
from meshkit.models import DEFAULT_MODEL
from meshkit.obs import Tracing
from meshkit.testing import until
from meshkit.types import GrammarKind

TEXT = "Once there was a fox, and a lamp, and 😀é."


@asynccontextmanager
async def listening(mesh, tokenizer, **options):
    app = build_app(mesh, tokenizer, GatewayConfig(model=DEFAULT_MODEL, **options))
    listener = RpcListener(app[GATEWAY], Tracing())
    address = await listener.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            yield channel, app[GATEWAY]
    finally:
        for task, _ in mesh.open.values():
            task.cancel()
        await listener.stop(0.1)
        app[GATEWAY].encoder.close()


@pytest.fixture
async def channel(mesh, tokenizer):
    async with listening(mesh, tokenizer) as (channel, gateway):
        yield channel
        assert not mesh.open, "a generation was left running"
        assert gateway.admission.streams == gateway.admission.waiting == 0


@pytest.fixture
def stub(channel):
    return generation_pb2_grpc.GenerationStub(channel)


def raw(**fields):
    return pb.GenerateRequest(**(fields if "token_ids" in fields else {"text": "Tell me"} | fields))


async def failed(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def details_of(error):
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    found = {}
    for packed in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                packed.Unpack(found[kind])
    return found


async def test_chunks_add_up_to_the_answer(stub, mesh, tokenizer):
    mesh.say, mesh.waited_ms = lambda start, choice: mesh.text(TEXT, burst=2), 9
    seen = [answer async for answer in stub.Generate(raw(request_id="a"))]
    chunks = [it.chunk for it in seen if it.WhichOneof("event") == "chunk"]
    end = seen[-1].complete
    assert "".join(it.text for it in chunks) == TEXT
    assert [token for it in chunks for token in it.token_ids] == [*tokenizer.encode(TEXT), 1]
    assert all(it.request_id == "a" for it in seen)
    assert end.finish_reason == pb.FINISH_STOP and end.WhichOneof("matched_stop") is None
    assert end.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1
    assert end.usage.prompt_tokens == len(tokenizer.encode("Tell me"))
    assert end.usage.HasField("ttft_seconds") and end.usage.e2e_seconds >= end.usage.ttft_seconds
    assert end.usage.queue_seconds == 0.009


async def test_restrictions_reach_the_mesh(stub, mesh, tokenizer):
    sampling = pb.Sampling(allowed_token_ids=[9, 5], bad_words=["mouse"], stop_regex=["[.!]"])
    mesh.say = lambda start, choice: mesh.text("So be it. Or not.")
    *_, chunk, end = [answer async for answer in stub.Generate(raw(sampling=sampling, stream=False))]
    params = mesh.starts[0].params
    assert params.allowed_ids == (5, 9) and (tokenizer.encode("mouse")[0] in {word[0] for word in params.bad_words})
    assert chunk.chunk.text == "So be it" and end.complete.matched_text == "[.!]"


async def test_the_prompts_values_come_first(stub, tokenizer):
    ids = tokenizer.encode("Tell me a story")
    asked = pb.LogprobOptions(sampled=True, top_k=1, prompt_start=2)
    request = pb.GenerateRequest(text="Tell me a story", logprobs=asked, stream=False)
    prompt, chunk, end = [answer async for answer in stub.Generate(request)]
    assert prompt.prompt.start == 2 and [it.token_id for it in prompt.prompt.logprobs] == ids[2:]
    assert all(len(it.top) == 1 for it in prompt.prompt.logprobs)
    assert chunk.chunk.text and end.complete.usage.prompt_tokens == len(ids)
    only = pb.GenerateRequest(text="Tell me a story", logprobs=pb.LogprobOptions(prompt_start=0))
    first, *chunks, _ = [answer async for answer in stub.Generate(only)]
    assert first.prompt.start == 1 and not any(it.chunk.logprobs for it in chunks)
    chat = pb.ChatCompletionRequest(messages=[pb.ChatMessage(role="user", content="a")], logprobs=asked)
    assert (await failed(stub.ChatCompletion(chat))).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_one_chunk_per_choice_without_stream(stub, mesh):
    mesh.say = lambda start, choice: mesh.text(f"{choice}: {TEXT}")
    request = raw(stream=False, sampling=pb.Sampling(n=3), logprobs=pb.LogprobOptions(sampled=True, top_k=2))
    seen = [answer async for answer in stub.Generate(request)]
    assert len(seen) == 6 and len({it.request_id for it in seen}) == 1
    for choice in range(3):
        chunk, end = [it for it in seen if it.index == choice]
        assert chunk.chunk.text == f"{choice}: {TEXT}" and end.WhichOneof("event") == "complete"
        assert len(chunk.chunk.logprobs) == len(chunk.chunk.token_ids)
        assert all(len(it.top) == 2 for it in chunk.chunk.logprobs)
        assert b"".join(it.token for it in chunk.chunk.logprobs[:-1]).decode() == f"{choice}: {TEXT}"


async def test_stop_strings_ids_and_length(stub, mesh, tokenizer):
    mesh.say = lambda start, choice: mesh.text(TEXT)
    seen = [it async for it in stub.Generate(raw(sampling=pb.Sampling(stop=["a lamp"])))]
    assert "".join(it.chunk.text for it in seen) == TEXT[: TEXT.index("a lamp")]
    assert seen[-1].complete.matched_text == "a lamp"
    seen = [it async for it in stub.Generate(raw(sampling=pb.Sampling(max_tokens=2)))]
    assert seen[-1].complete.finish_reason == pb.FINISH_LENGTH
    params = mesh.starts[-1].params
    assert (params.max_tokens, params.temperature) == (2, 1.0)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"sampling": pb.Sampling(temperature=3.0)}, "temperature", "0 to 2"),
        ({"text": ""}, "text", "empty"),
        ({"token_ids": pb.TokenIds(ids=[9_999_999])}, "token_ids", "9999999"),
        ({"sampling": pb.Sampling(stop=["x"] * 99)}, "stop", "99"),
        ({"sampling": pb.Sampling(logit_bias={1 << 30: 1.0})}, "logit_bias", str(1 << 30)),
        ({"logprobs": pb.LogprobOptions(top_k=3)}, "logprobs.top_k", "sampled"),
        ({"priority": 0, "request_id": "x" * 600}, "request_id", "512"),
        ({"sampling": pb.Sampling(regex="a", n=99)}, "n", "99"),
    ],
)
async def test_bad_requests_name_the_field(stub, mesh, fields, field, words):
    error = await failed(stub.Generate(raw(**fields)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    (violation,) = details_of(error)[error_details_pb2.BadRequest].field_violations
    assert violation.field == field
    assert not mesh.starts


@pytest.mark.parametrize(
    ("sampling", "kind", "text"),
    [
        ({"json_schema": '{"type": "integer"}'}, GrammarKind.JSON_SCHEMA, '{"type": "integer"}'),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
        ({"structural_tag": '{"format": {}}'}, GrammarKind.STRUCTURAL_TAG, '{"format": {}}'),
        ({"json_object": True}, GrammarKind.JSON_OBJECT, ""),
        ({"choice": pb.ChoiceList(values=["a", "b"])}, GrammarKind.CHOICE, '["a", "b"]'),
    ],
)
async def test_every_constraint_reaches_the_mesh_and_its_refusal_the_client(stub, mesh, sampling, kind, text):
    asked = pb.Sampling(**sampling)
    chat = pb.ChatCompletionRequest(messages=[pb.ChatMessage(role="user", content="Hi")], sampling=asked)
    for call in (stub.Generate(raw(sampling=asked)), stub.ChatCompletion(chat)):
        assert [answer async for answer in call]
        grammar = mesh.starts[-1].grammar
        assert (grammar.kind, grammar.text) == (kind, text)
    mesh.refusal = (Verdict.BAD_GRAMMAR, "cannot be had", 0, "/a")
    error = await failed(stub.Generate(raw(sampling=asked)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "cannot be had" in error.details()


async def test_other_models_and_no_prompt(stub):
    error = await failed(stub.Generate(raw(model="gpt-9")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    error = await failed(stub.Generate(pb.GenerateRequest()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refusal_says_when_to_come_again(stub, mesh):
    mesh.refusal = (Verdict.QUEUE_FULL, "full", 2_500)
    error = await failed(stub.Generate(raw()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)[error_details_pb2.RetryInfo].retry_delay.seconds == 3


async def test_no_worker_is_unavailable(mesh, tokenizer):
    mesh.status = None
    async with listening(mesh, tokenizer) as (channel, _):
        error = await failed(generation_pb2_grpc.GenerationStub(channel).Generate(raw()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="v4mesh.ready")
        assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_cancelled_call_frees_its_place(stub, mesh):
    mesh.say = lambda start, choice: mesh.text(TEXT, hold_after=2)
    call = stub.Generate(raw())
    await call.read()
    call.cancel()
    await until(lambda: not mesh.open, 5)
    assert mesh.gone == [mesh.starts[0].request_id]


async def test_a_deadline_travels_and_ends_the_request(stub, mesh):
    mesh.say = lambda start, choice: mesh.text(TEXT, hold=True)
    error = await failed(stub.Generate(raw(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1 <= mesh.starts[0].deadline_ms <= 300
    await until(lambda: not mesh.open, 5)


async def test_abort_ends_the_callers_request(stub, mesh):
    mesh.say = lambda start, choice: mesh.text(TEXT, hold_after=1)
    call = stub.Generate(raw(request_id="mine"))
    await call.read()
    error = await failed(stub.Generate(raw(request_id="mine")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "already in use" in error.details()
    await stub.Abort(pb.AbortRequest(request_id="other"))
    assert not mesh.aborted
    await stub.Abort(pb.AbortRequest(request_id="mine"))
    rest = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        rest.append(answer)
    assert rest[-1].complete.finish_reason == pb.FINISH_ABORT


async def test_a_batch_answers_every_request_and_fails_single_ones(stub, mesh):
    def say(start, choice):
        return mesh.text(f"to {len(start.prompt)}")

    mesh.say = say
    requests = [raw(request_id=f"r{n}", token_ids=pb.TokenIds(ids=[5] * n)) for n in range(1, 40)]
    requests.insert(7, raw(request_id="bad", sampling=pb.Sampling(top_p=7)))

    async def feed():
        for request in requests:
            yield request

    texts, ends, failures = {}, set(), {}
    async for answer in stub.GenerateBatch(feed()):
        match answer.WhichOneof("event"):
            case "chunk":
                texts[answer.request_id] = texts.get(answer.request_id, "") + answer.chunk.text
            case "complete":
                ends.add(answer.request_id)
            case "failure":
                failures[answer.request_id] = answer.failure
    assert texts == {f"r{n}": f"to {n}" for n in range(1, 40)} and ends == set(texts)
    assert set(failures) == {"bad"} and (failures["bad"].status, failures["bad"].param) == (400, "top_p")


async def test_a_batch_whose_client_does_not_read_ends_with_that(stub, monkeypatch):
    async def stuck(self, caller, request, send):
        raise ApiError(429, "the client has read nothing for 30 s", code="slow_client")

    monkeypatch.setattr(GenerationServicer, "_generate", stuck)

    async def feed():
        yield raw()

    error = await failed(stub.GenerateBatch(feed()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "has read nothing" in error.details()


async def test_chat_parts_reasoning_text_and_calls(stub, mesh, tokenizer):
    think, call = "First I look.", "\n\n<｜DSML｜tool_calls>\n"
    script = (
        f'Look.{call}<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    mesh.say = lambda start, choice: mesh.text(script, think=think)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    request = pb.ChatCompletionRequest(
        messages=[pb.ChatMessage(role="user", content="How is it in Oslo?")],
        tools=[pb.ChatTool(name="weather", description="w", parameters=json.dumps(schema))],
        thinking=True,
    )
    seen = [answer async for answer in stub.ChatCompletion(request)]
    deltas = [it.delta for it in seen if it.WhichOneof("event") == "delta"]
    assert "".join(it.reasoning_content for it in deltas) == think
    assert "".join(it.content for it in deltas) == "Look."
    calls = [call for it in deltas for call in it.tool_calls]
    assert calls[0].name == "weather" and calls[0].id
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Oslo"}
    assert seen[-1].complete.finish_reason == pb.FINISH_TOOL_CALLS
    assert seen[-1].complete.usage.reasoning_tokens > 0

    counted = await stub.Tokenize(pb.TokenizeRequest(chat=request))
    assert list(counted.ids) == list(mesh.starts[-1].prompt)
    error = await failed(stub.ChatCompletion(pb.ChatCompletionRequest(tools=[pb.ChatTool(name="x", parameters="{")])))
    assert "tools[0].parameters" in error.details()


async def test_small_calls(stub, mesh, tokenizer):
    ids = list((await stub.Tokenize(pb.TokenizeRequest(text=TEXT))).ids)
    assert ids == tokenizer.encode(TEXT)
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[*ids, 1]))).text == TEXT
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.vocab_size) == ("v4-nano", 4096)
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.ready and info.scheduler.ready and info.model == "v4-nano"
    assert (await stub.FlushCache(scheduler_pb2.FlushCacheRequest())).pages == 3
    with pytest.raises(grpc.aio.AioRpcError, match="one of text and chat"):
        await stub.Tokenize(pb.TokenizeRequest())


async def test_keys_separate_tenants(mesh, tokenizer, tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann key-of-ann\nbob key-of-bob\n")
    async with listening(mesh, tokenizer, api_key_file=file) as (channel, _):
        stub = generation_pb2_grpc.GenerationStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong-key"),)):
            error = await failed(stub.Generate(raw(), metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        for metadata in ((("authorization", "Bearer key-of-ann"),), (("x-api-key", "key-of-bob"),)):
            assert [it async for it in stub.Generate(raw(), metadata=metadata)]
        assert [start.tenant for start in mesh.starts] == ["ann", "bob"]


async def test_reflection_describes_the_services(channel):
    ask = reflection_pb2.ServerReflectionRequest

    async def questions():
        yield ask(list_services="")
        yield ask(file_containing_symbol="v4mesh.v1.Generation")

    names, files = [
        answer async for answer in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(questions())
    ]
    found = {it.name for it in names.list_services_response.service}
    assert {"v4mesh.v1.Generation", "inference.GRPCInferenceService", "grpc.health.v1.Health"} <= found
    assert not found & {"v4mesh.v1.Scheduler", "v4mesh.v1.Grammar"}
    described = descriptor_pb2.FileDescriptorProto.FromString(files.file_descriptor_response.file_descriptor_proto[0])
    assert "ChatCompletion" in [method.name for method in described.service[0].method]


# ---- Open Inference Protocol ----------------------------------------------------------------------------------------


def infer(**fields):
    tensor = inference_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"Tell me")
    defaults = {"model_name": "v4-nano", "inputs": [tensor], "id": "7"}
    return inference_pb2.ModelInferRequest(**(defaults | fields))


async def test_inference_protocol(channel, mesh):
    mesh.say = lambda start, choice: mesh.text(TEXT)
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    assert (await stub.ServerLive(inference_pb2.ServerLiveRequest())).live
    assert (await stub.ServerReady(inference_pb2.ServerReadyRequest())).ready
    assert (await stub.ModelReady(inference_pb2.ModelReadyRequest(name="v4-nano"))).ready
    assert not (await stub.ModelReady(inference_pb2.ModelReadyRequest(name="other"))).ready
    known = await stub.ModelMetadata(inference_pb2.ModelMetadataRequest(name="v4-nano"))
    assert [it.name for it in known.inputs] == ["text_input"]
    answer = await stub.ModelInfer(infer())
    assert answer.outputs[0].contents.bytes_contents[0].decode() == TEXT and answer.id == "7"
    request = infer()
    request.parameters["temperature"].double_param = 0.0
    request.parameters["max_tokens"].int64_param = 3
    await stub.ModelInfer(request)
    assert (mesh.starts[-1].params.temperature, mesh.starts[-1].params.max_tokens) == (0.0, 3)
    for bad in (
        infer(inputs=[]),
        infer(raw_input_contents=[b"\x09\0\0\0x"]),
        infer(outputs=[inference_pb2.ModelInferRequest.InferRequestedOutputTensor(name="logits")]),
        infer(parameters={"beams": inference_pb2.InferParameter(int64_param=3)}),
        infer(parameters={"top_k": inference_pb2.InferParameter(string_param="3")}),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, bad


TRITON_CLIENT = """
import sys
import numpy as np
import tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("v4-nano")
assert client.get_server_metadata().name == "v4mesh"
assert client.get_model_metadata("v4-nano").outputs[0].name == "text_output"
text = triton.InferInput("text_input", [1], "BYTES")
text.set_data_from_numpy(np.array([b"Tell me"], dtype=np.object_))
answer = client.infer("v4-nano", [text], parameters={"max_tokens": 64})
print(answer.as_numpy("text_output")[0].decode())
"""


async def test_tritons_own_client(mesh, tokenizer):
    """In a process of its own: its generated code describes the same package as ours."""
    mesh.say = lambda start, choice: mesh.text(TEXT)
    async with listening(mesh, tokenizer) as (_, gateway):
        listener = RpcListener(gateway, Tracing())
        address = await listener.start("127.0.0.1:0")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "ignore",
            "-c",
            TRITON_CLIENT,
            str(address),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, errors = await process.communicate()
        await listener.stop(0.1)
    assert process.returncode == 0, errors.decode()[-2000:]
    assert out.decode().strip() == TEXT
