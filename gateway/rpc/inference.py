"""The Open Inference Protocol, version 2, for text: probes, metadata and ModelInfer.

Tensors are those that LLM front ends of other servers use: one BYTES element `text_input` in, `text_output` out.
Sampling travels in the request's parameters, under the names of /v1/completions. Unary: nothing is streamed.
"""

import struct
from typing import Any, Final

from meshpb.oip import inference_pb2 as pb
from meshpb.oip import inference_pb2_grpc

from gateway.completions import encode_raw, raw_parsers
from gateway.errors import ApiError, invalid
from gateway.exchange import Caller
from gateway.rpc.entry import Context, Entry
from gateway.schema import SamplingFields
from gateway.validate import check_sampling
from meshkit.build import build_id

NAME: Final = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
INPUT, OUTPUT = "text_input", "text_output"
VERSION: Final = "1"
DEFAULT_MAX_TOKENS: Final = 128
_PARAMETERS: Final = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "ignore_eos": bool,
    "stop": str,
}


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Registered by the listener."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._gateway = entry.gateway

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=not self._gateway.admission.draining)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._gateway.trouble() is None)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        ready = self._gateway.model.answers_to(request.name) and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=ready and self._gateway.trouble() is None)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="v4mesh", version=build_id())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        async def work(caller: Caller) -> pb.ModelMetadataResponse:
            self._check_model(request.name, request.version)
            tensor = pb.ModelMetadataResponse.TensorMetadata
            return pb.ModelMetadataResponse(
                name=self._gateway.model.name,
                versions=[VERSION],
                platform="v4mesh",
                inputs=[tensor(name=INPUT, datatype="BYTES", shape=[1])],
                outputs=[tensor(name=OUTPUT, datatype="BYTES", shape=[1])],
            )

        return await self._entry.answer(context, "ModelMetadata", work)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        async def work(caller: Caller) -> pb.ModelInferResponse:
            return await self._infer(caller, request)

        return await self._entry.answer(context, "ModelInfer", work, operation="text_completion")

    async def _infer(self, caller: Caller, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        gateway = self._gateway
        self._check_model(request.model_name, request.model_version)
        wanted = [output.name for output in request.outputs]
        if any(name != OUTPUT for name in wanted):
            raise invalid("outputs", f"outputs: this model has {OUTPUT} alone, not {wanted[:4]}")
        sampling = check_sampling(
            _sampling(request), gateway.model, gateway.limits, default_max_tokens=DEFAULT_MAX_TOKENS
        )
        text = _text(request)
        gateway.check_ready()
        ids = await encode_raw(gateway, text, param=INPUT)
        job = gateway.job(caller, sampling, ids, raw_parsers(gateway, sampling), param=INPUT, constraint=None)
        parts: list[str] = []
        with gateway.generation(caller, [job]) as generation:
            generation.start()
            async for updates in generation.updates():
                parts += [delta.text for update in updates for delta in update.deltas]
        return _answer(request, gateway.model.name, "".join(parts).encode(), job.choices[0].finish or "")

    def _check_model(self, name: str, version: str) -> None:
        model = self._gateway.model
        if not model.answers_to(name) or version not in ("", VERSION):
            text = f"model {name!r} version {version!r} does not exist here; this server has {model.name!r}, {VERSION}"
            raise ApiError(404, text, param="model_name", code="model_not_found")


def _text(request: pb.ModelInferRequest) -> str:
    """The one element of the one input, from wherever the client put it."""
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        names = [tensor.name for tensor in request.inputs][:4]
        raise invalid("inputs", f"inputs: exactly one tensor {INPUT} is expected, not {names}")
    tensor = request.inputs[0]
    if tensor.datatype != "BYTES":
        raise invalid(INPUT, f"{INPUT} has datatype {tensor.datatype[:16]!r}; send BYTES")
    if list(tensor.shape) not in ([1], [1, 1]):
        raise invalid(INPUT, f"{INPUT} has shape {list(tensor.shape)[:8]}; send [1]: one prompt")
    data = _raw(request.raw_input_contents) if request.raw_input_contents else list(tensor.contents.bytes_contents)
    if len(data) != 1 or not data[0]:
        raise invalid(INPUT, f"{INPUT} holds {len(data)} elements; send one that is not empty")
    try:
        return data[0].decode()
    except UnicodeDecodeError as error:
        raise invalid(INPUT, f"{INPUT} is not UTF-8: {error}") from None


def _raw(contents: Any) -> list[bytes]:
    """Elements of the first raw tensor: 4 bytes of little-endian length, then the element."""
    if len(contents) != 1:
        raise invalid("raw_input_contents", f"raw_input_contents has {len(contents)} tensors for one input")
    data: bytes = contents[0]
    if len(data) < 4 or len(data) != 4 + struct.unpack_from("<I", data)[0]:
        raise invalid("raw_input_contents", "raw_input_contents must be one element: its length in 4 bytes, then it")
    return [data[4:]]


def _sampling(request: pb.ModelInferRequest) -> SamplingFields:
    given: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        if (kind := _PARAMETERS.get(name)) is None:
            raise invalid("parameters", f"parameters: {name[:40]!r} is not known; known are {', '.join(_PARAMETERS)}")
        field = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, field) if field else None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise invalid(name, f"{name} is {value!r:.40}; it must be of type {kind.__name__}")
        given[name] = value
    return SamplingFields(**given)


def _answer(request: pb.ModelInferRequest, model: str, text: bytes, finish: str) -> pb.ModelInferResponse:
    """Raw contents for clients that sent raw ones."""
    output = pb.ModelInferResponse.InferOutputTensor(name=OUTPUT, datatype="BYTES", shape=[1])
    answer = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)
    answer.parameters["finish_reason"].string_param = finish
    if request.raw_input_contents:
        answer.raw_output_contents.append(struct.pack("<I", len(text)) + text)
    else:
        output.contents.bytes_contents.append(text)
    answer.outputs.append(output)
    return answer
