"""The gRPC server of a gateway worker: inference.GRPCInferenceService, health and reflection.

Each message becomes a request that passes the same entry as one over HTTP: keys, limits, access log, metrics and traces
are those of its path. Source: grpc.health.v1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
import orjson
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tritonclient.grpc import service_pb2 as pb

from headwater_server.config.schema import Server
from headwater_server.gateway.grpc.asgi_call import RpcAnswer, ask, body_or_abort
from headwater_server.gateway.grpc.rpc_endpoint import RpcEndpoint, RpcMessage
from headwater_server.gateway.grpc.rpc_methods import SERVICE, handlers, model_path
from headwater_server.gateway.grpc.rpc_stream import RpcStream
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.endpoint import EndpointRoute
from headwater_server.gateway.http.entry import INFER_PATH, MAX_HEADER_BYTES, Entry
from headwater_server.gateway.models import Models
from headwater_server.security.tls import Certificate

__all__ = ["GrpcServer"]

MAX_STREAMS: Final = 1024
"""Calls that a connection may have at once."""
IDLE_MS: Final = 300_000
"""Time after which a connection without calls is closed; clients open another with their next call."""
KEEPALIVE_MS: Final = 60_000
HEALTH_EVERY_S: Final = 1.0
"""Time between two looks at what a client of the health service watches."""
_GENERATE: Final = "/v2/models/{model}/generate"


class GrpcServer:
    """Serves gRPC beside a worker's HTTP.

    Args:
        entry: the entry of requests over HTTP.
        models: all models of this worker.
        reader: has the budget of bodies.
        options: limits and switches.
        certificate: the certificate for TLS; None: without TLS.
        max_connections: the most connections, and the most calls at once; more connections are closed at once.

    Raises:
        RuntimeError: the port can't be bound.
    """

    def __init__(
        self,
        entry: Entry,
        models: Models,
        reader: BodyReader,
        options: Server,
        certificate: Certificate | None,
        max_connections: int,
    ) -> None:
        answers = {route.path: route.answer for route in entry.routes}
        endpoint = RpcEndpoint(models, reader, {False: answers[_GENERATE], True: answers[f"{_GENERATE}_stream"]})
        paths = (INFER_PATH, "/v2/models/{model}/versions/{version}/infer")
        self._inference = entry.with_routes([EndpointRoute(path, endpoint) for path in paths])
        self._write_timeout_s = options.client_timeout_s
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", options.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.server_handshake_timeout_ms", int(options.client_timeout_s * 1000)),
            ],
            maximum_concurrent_rpcs=max_connections,
        )
        methods = {
            **handlers(entry),
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(entry), self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        address = f"{f'[{options.host}]' if ':' in options.host else options.host}:{options.grpc_port}"
        if certificate is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, certificate.grpc_credentials())

    async def start(self) -> None:
        """Begin to accept connections."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and end the calls that are not answered in time."""
        await self._server.stop(grace_s)

    async def _infer(self, raw: bytes, context: Any) -> bytes:
        message = await _parsed(raw, context)
        return await body_or_abort(await self._ask(message, raw, context, None), context)

    async def _stream(self, requests: Any, context: Any) -> None:
        async def answer(message: Any, raw: bytes, write: Callable[[bytes], Awaitable[None]]) -> RpcAnswer:
            return await self._ask(message, raw, context, write)

        await RpcStream(context, _parsed, answer, self._write_timeout_s).run()

    async def _ask(
        self, message: Any, raw: bytes, context: Any, on_piece: Callable[[bytes], Awaitable[None]] | None
    ) -> RpcAnswer:
        name = message.model_name
        if "/" in name or not name:  # it would be another path
            return RpcAnswer(404, {}, orjson.dumps({"error": f"model {name[:100]!r}: unknown"}))
        call = RpcMessage(message, raw, streams=on_piece is not None)
        path = model_path(name, message.model_version, "/infer")
        return await ask(self._inference, "POST", path, context, call=call, on_piece=on_piece)


async def _parsed(raw: bytes, context: Any) -> Any:
    """The message; other bytes end the call."""
    try:
        return pb.ModelInferRequest.FromString(raw)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "message: expected a ModelInferRequest, got other bytes")


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """grpc.health.v1: of the server (an empty name, or that of the inference service), or of a model by its name.

    Args:
        entry: answers requests over HTTP.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def Check(self, request: Any, context: Any) -> Any:
        """See the service."""
        status = await self._status(request.service, context)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:100]!r}: unknown")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """See the service."""
        last = None
        while True:
            status = await self._status(request.service, context)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _status(self, service: str, context: Any) -> Any:
        path = "/v2/health/ready" if service in ("", SERVICE) else model_path(service, "", "/ready")
        status = (await ask(self._entry, "GET", path, context)).status
        if status == 200:
            return health_pb2.HealthCheckResponse.SERVING
        if status == 503:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
