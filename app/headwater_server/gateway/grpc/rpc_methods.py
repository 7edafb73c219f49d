"""The methods of inference.GRPCInferenceService other than inference: what the routes of HTTP answer.

Source: Triton's grpc_service.proto.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import orjson
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from headwater_server.gateway.grpc.asgi_call import RpcAnswer, ask, body_or_abort
from headwater_server.gateway.http.entry import Entry

__all__ = ["SERVICE", "handlers", "model_path"]

SERVICE: Final = "inference.GRPCInferenceService"
_METHODS: Final = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
_NO_MEMORY: Final = "shared memory of clients is not supported; send tensors in the message"
REFUSED: Final = {
    "SystemSharedMemoryRegister": _NO_MEMORY,
    "CudaSharedMemoryRegister": _NO_MEMORY,
    "TraceSetting": "not supported; see server.tracing",
    "LogSettings": "not supported; see server.log_format",
}
EMPTY: Final = (
    "SystemSharedMemoryStatus", "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryUnregister",
)  # fmt: skip
"""Methods that examples of clients call before and after their work: there is no shared memory."""
NOT_READY: Final = (400, 404, 503)
"""Statuses of HTTP for which ``ModelReady`` says false, as Triton does: Triton's for a version that isn't loaded, of an
unknown model, and of a model that isn't loaded."""

Method = Callable[[Any, Any], Awaitable[Any]]
"""Given a request and the call's context it returns the response."""


def model_path(name: str, version: str, action: str) -> str:
    """The path of a model's route."""
    return f"/v2/models/{name}{f'/versions/{version}' if version else ''}{action}"


def handlers(entry: Entry) -> dict[str, Any]:
    """The handler of each method.

    Args:
        entry: answers requests over HTTP.
    """

    async def get(path: str, context: Any) -> RpcAnswer:
        return await ask(entry, "GET", path, context)

    async def post(path: str, body: dict[str, Any], context: Any) -> RpcAnswer:
        return await ask(entry, "POST", path, context, body=orjson.dumps(body))

    async def live(request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=(await get("/v2/health/live", context)).status == 200)

    async def ready(request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=(await get("/v2/health/ready", context)).status == 200)

    async def model_ready(request: Any, context: Any) -> Any:
        answer = await get(model_path(request.name, request.version, "/ready"), context)
        if answer.status not in (200, *NOT_READY):
            await body_or_abort(answer, context)
        return pb.ModelReadyResponse(ready=answer.status == 200)

    async def server(request: Any, context: Any) -> Any:
        return await _message(await get("/v2", context), pb.ServerMetadataResponse(), context)

    async def model(request: Any, context: Any) -> Any:
        answer = await get(model_path(request.name, request.version, ""), context)
        return await _message(answer, pb.ModelMetadataResponse(), context)

    async def config(request: Any, context: Any) -> Any:
        answer = await get(model_path(request.name, request.version, "/config"), context)
        return await _message(answer, pb.ModelConfigResponse(), context, "config")

    async def statistics(request: Any, context: Any) -> Any:
        path = model_path(request.name, request.version, "/stats") if request.name else "/v2/models/stats"
        return await _message(await get(path, context), pb.ModelStatisticsResponse(), context)

    async def index(request: Any, context: Any) -> Any:
        answer = await post("/v2/repository/index", {"ready": request.ready}, context)
        return await _message(answer, pb.RepositoryIndexResponse(), context, "models")

    async def load(request: Any, context: Any) -> Any:
        return await change(request, context, "load", pb.RepositoryModelLoadResponse())

    async def unload(request: Any, context: Any) -> Any:
        return await change(request, context, "unload", pb.RepositoryModelUnloadResponse())

    async def change(request: Any, context: Any, action: str, response: Any) -> Any:
        parameters = {}
        for name, value in request.parameters.items():
            choice = value.WhichOneof("parameter_choice")
            is_file = choice == "bytes_param"  # refused by its name
            parameters[name] = None if is_file or choice is None else getattr(value, choice)
        path = f"/v2/repository/models/{request.model_name}/{action}"
        await body_or_abort(await post(path, {"parameters": parameters}, context), context)
        return response

    methods: dict[str, Method] = {
        "ServerLive": live,
        "ServerReady": ready,
        "ModelReady": model_ready,
        "ServerMetadata": server,
        "ModelMetadata": model,
        "ModelConfig": config,
        "ModelStatistics": statistics,
        "RepositoryIndex": index,
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": unload,
        **{name: _refusing(name) for name in REFUSED},
        **dict.fromkeys(EMPTY, _nothing),
    }
    return {name: _handler(name, method) for name, method in methods.items()}


def _handler(name: str, method: Method) -> Any:
    request: Any = getattr(pb, _METHODS[name].input_type.name)
    return grpc.unary_unary_rpc_method_handler(
        method, request_deserializer=request.FromString, response_serializer=_serialized
    )


def _serialized(response: Any) -> bytes:
    serialized: bytes = response if isinstance(response, bytes) else response.SerializeToString()
    return serialized


def _refusing(name: str) -> Method:
    async def refuse(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name}: {REFUSED[name]}")

    return refuse


async def _nothing(request: Any, context: Any) -> bytes:
    return b""


async def _message(answer: RpcAnswer, message: Any, context: Any, within: str = "") -> Any:
    """A message with the JSON of an answer. Fields that the message lacks are left out.

    Args:
        answer: the answer.
        message: the message to fill.
        context: the call.
        within: the field of the message that is the JSON; empty: the message is.
    """
    content = orjson.loads(await body_or_abort(answer, context))
    json_format.ParseDict({within: content} if within else content, message, ignore_unknown_fields=True)
    return message
