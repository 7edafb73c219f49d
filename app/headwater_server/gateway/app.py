"""The gateway: a FastAPI application over the models that a routing table names."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import headwater_server
from headwater_server.config.schema import Server
from headwater_server.errors import CallableFailed, HeadwaterError, MethodNotAllowed, NotFound
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.body_budget import ALL_BODIES_BYTES, BodyBudget
from headwater_server.gateway.http.endpoint import BodyEndpoint, EndpointRoute, HeadAsGet
from headwater_server.gateway.http.entry import INFER_PATH, Entry, RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.http.replies import Reply, error_reply, internal_error
from headwater_server.gateway.models import Models
from headwater_server.gateway.openapi.openapi_schema import openapi_schema
from headwater_server.gateway.routes import classify, cohere, embeddings, pooling, rerank, tei
from headwater_server.gateway.routes.conversations import CountTokensEndpoint, MessagesEndpoint
from headwater_server.gateway.routes.editors import editor_routes
from headwater_server.gateway.routes.generate import GenerateEndpoint
from headwater_server.gateway.routes.infer import InferEndpoint
from headwater_server.gateway.routes.invocations import InvocationsEndpoint
from headwater_server.gateway.routes.mapped import MappedEndpoint
from headwater_server.gateway.routes.metadata import health_routes, metadata_routes
from headwater_server.gateway.routes.model_cards import model_card_routes
from headwater_server.gateway.routes.pages import docs_routes, page_routes
from headwater_server.gateway.routes.texts import CancelEndpoint, OpenAITextEndpoint
from headwater_server.gateway.routes.tokenization import TokenizationEndpoint
from headwater_server.gateway.routes.transcriptions import TranscriptionsEndpoint
from headwater_server.gateway.routes.triton_requests import RelayedMetadata
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text_pool import TextPool
from headwater_server.lm.tokenize_body import DetokenizeRequest, TokenizeRequest
from headwater_server.security.key_check import KeyRing
from headwater_server.telemetry.logs import AccessLog

__all__ = ["body_reader", "create_app"]

CORS_REQUEST_HEADERS: Final = (
    "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access", "Anthropic-Version", "Authorization", "Content-Type",
    "Inference-Header-Content-Length", "Traceparent", "X-API-Key", "X-Request-Id",
)  # fmt: skip
CORS_ANSWER_HEADERS: Final = (
    "Headwater-Cache", "Headwater-Ignored", "Headwater-Version", "Inference-Header-Content-Length", "Request-Id",
    "Retry-After", "X-Request-Id",
)  # fmt: skip
"""Headers of answers that scripts may read, besides the few that CORS always allows."""
_MAPPED: Final = {
    "/v1/embeddings": embeddings.respond,
    **dict.fromkeys(("/v1/embed", "/v2/embed"), cohere.respond),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank"), rerank.respond),
    "/rerank": tei.rerank_any,
    **dict.fromkeys(("/v1/classify", "/classify"), classify.respond),
    **dict.fromkeys(("/v1/score", "/score"), pooling.score),
    "/pooling": pooling.pool,
    "/embed": tei.embed_texts,
    "/similarity": tei.similarity,
    "/predict": tei.predict,
}
"""The routes over models' mappings."""


def body_reader(server: Server) -> BodyReader:
    """Make the reader of the bodies of all routes of a worker. The routes share the worker's part of the budget.

    Args:
        server: limits of bodies.
    """
    share_bytes = max(server.max_body_bytes * 2, ALL_BODIES_BYTES // server.workers)
    return BodyReader(server.max_body_bytes, server.client_timeout_s, BodyBudget(share_bytes))


def create_app(
    models: Models,
    server: Server,
    *routers: APIRouter,
    keys: KeyRing | None = None,
    cors_origins: Sequence[str] = (),
    records: RequestRecords | None = None,
    reader: BodyReader | None = None,
) -> Entry:
    """Make the application of a worker, an ASGI application.

    Args:
        models: the models to serve; they may change while the application runs.
        server: limits and switches.
        routers: further routes: commands, status and metrics.
        keys: the API keys, required for every request except for health and pages; None: no request needs a key, but
            see `headwater_server.security.operator`.
        cors_origins: origins of web pages whose scripts may send requests.
        records: begins and ends each request; default: made from ``server``.
        reader: reads the bodies of all routes, including ``routers``; default: `body_reader`.
    """
    reader = reader or body_reader(server)
    if records is None:
        is_full = server.access_log == "full"
        log = AccessLog(log_format=server.log_format, payloads=is_full) if server.access_log else None
        records = RequestRecords(log, StreamLimits(write_timeout_s=server.client_timeout_s))
    routes = _inference_routes(models, reader, refuses_unknown=server.unknown_fields == "refuse")
    gateway = FastAPI(
        title="Headwater",
        version=headwater_server.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    gateway.router.routes[:0] = routes  # FastAPI refuses methods other than POST
    gateway.add_middleware(RelayedMetadata, models=models)
    gateway.add_middleware(HeadAsGet)
    gateway.add_exception_handler(HeadwaterError, _on_error)
    gateway.add_exception_handler(HTTPException, _on_http_error)
    gateway.add_exception_handler(Exception, _on_exception)

    gateway.include_router(health_routes(models, has_keys=keys is not None))
    gateway.include_router(metadata_routes(models, reader))
    gateway.include_router(model_card_routes(models))
    gateway.include_router(editor_routes(models, reader))
    gateway.include_router(tei.info_routes(models))
    for router in routers:
        gateway.include_router(router)
    if "ui" in server.pages:
        gateway.include_router(page_routes())
    docs_routes(gateway)

    generated = gateway.openapi

    def openapi() -> dict[str, Any]:
        gateway.openapi_schema = None  # not cached, since models come and go
        return openapi_schema(generated(), models, has_keys=keys is not None)

    gateway.openapi = openapi  # type: ignore[method-assign]
    cors = functools.partial(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=CORS_REQUEST_HEADERS,
        expose_headers=CORS_ANSWER_HEADERS,
    )
    return Entry(gateway, routes, records, keys, cors if cors_origins else None)


def _inference_routes(models: Models, reader: BodyReader, *, refuses_unknown: bool) -> list[EndpointRoute]:
    pool = TextPool()

    def text_endpoint(kind: type[ChatRequest | CompletionRequest | ResponsesRequest]) -> OpenAITextEndpoint:
        return OpenAITextEndpoint(models, reader, kind, pool, refuses_unknown=refuses_unknown)

    infer = InferEndpoint(models, reader)
    generate = GenerateEndpoint(models, reader, pool, streams=False)
    generate_stream = GenerateEndpoint(models, reader, pool, streams=True)
    bodies: dict[str, BodyEndpoint] = {
        "/v1/chat/completions": text_endpoint(ChatRequest),
        "/v1/completions": text_endpoint(CompletionRequest),
        "/v1/responses": text_endpoint(ResponsesRequest),
        **{path: MappedEndpoint(models, reader, respond) for path, respond in _MAPPED.items()},
    }
    invocations = InvocationsEndpoint(models, reader, bodies)
    messages = MessagesEndpoint(models, reader, pool, refuses_unknown=refuses_unknown)
    count_tokens = CountTokensEndpoint(models, reader, pool, refuses_unknown=refuses_unknown)
    return [
        EndpointRoute(INFER_PATH, infer),
        EndpointRoute("/v2/models/{model}/versions/{version}/infer", infer),
        EndpointRoute("/v2/models/{model}/generate", generate),
        EndpointRoute("/v2/models/{model}/versions/{version}/generate", generate),
        EndpointRoute("/v2/models/{model}/generate_stream", generate_stream),
        EndpointRoute("/v2/models/{model}/versions/{version}/generate_stream", generate_stream),
        # An id may contain slashes.
        EndpointRoute("/v2/requests/{request_id:path}/cancel", CancelEndpoint(models)),
        *(EndpointRoute(path, endpoint) for path, endpoint in bodies.items()),
        EndpointRoute("/v1/messages", messages),
        EndpointRoute("/v1/messages/count_tokens", count_tokens),
        *(EndpointRoute(path, invocations) for path in ("/invocations", "/")),
        *(EndpointRoute(path, tei.RefusingEndpoint()) for path in tei.REFUSED),
        EndpointRoute("/v1/audio/transcriptions", TranscriptionsEndpoint(models, reader)),
        EndpointRoute("/tokenize", TokenizationEndpoint(models, reader, TokenizeRequest, pool)),
        EndpointRoute("/detokenize", TokenizationEndpoint(models, reader, DetokenizeRequest, pool)),
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadwaterError)
    return _response(error_reply(error, request.scope))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    headers = {}
    fault: HeadwaterError = CallableFailed(str(error.detail))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        if "GET" in allowed and "HEAD" not in allowed:
            allowed = allowed.replace("GET", "GET, HEAD")
        headers["allow"] = allowed
        fault = MethodNotAllowed(f"method {request.method}: not allowed on {path[:200]}; allowed: {allowed}")
    elif error.status_code == 404:
        fault = NotFound(f"route {path[:200]}: unknown; see /docs")
    reply = error_reply(fault, request.scope)
    reply.status = error.status_code
    return _response(reply, headers)


async def _on_exception(request: Request, error: Exception) -> Response:
    failure = internal_error(request.scope["state"], error)
    return _response(error_reply(failure, request.scope))


def _response(reply: Reply, headers: Mapping[str, str] | None = None) -> Response:
    body, pairs = reply.content()
    response = Response(body, reply.status, headers)
    response.raw_headers += pairs
    return response
