"""The entry of every request: the request is recorded and checked, its key is admitted, and any error becomes an
answer."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast
from urllib.parse import quote

import msgspec
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from headwater_server.errors import BadRequest, ClientGone, HeadersTooLarge, HeadwaterError
from headwater_server.gateway.http.body_budget import release_body
from headwater_server.gateway.http.endpoint import EndpointRoute
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.http.replies import MODELS_PATH, Reply, answers_as_anthropic, error_reply, internal_error
from headwater_server.security.key_check import KeyRing
from headwater_server.security.rate_limits import KeyLimits
from headwater_server.telemetry.logs import AccessLog
from headwater_server.telemetry.recorder import leave, note_error
from headwater_server.telemetry.tracing import Trace, current

__all__ = [
    "INFER_PATH",
    "MAX_HEADER_BYTES",
    "Entry",
    "RequestRecord",
    "RequestRecords",
]

MAX_HEADER_BYTES: Final = 32 * 1024
"""Limit of a request's headers, path and query together, in bytes."""

INFER_PATH: Final = "/v2/models/{model}/infer"
_INFER_START, _INFER_END = INFER_PATH.split("{model}")

logger = logging.getLogger("headwater")

_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\w.:~!$&'()*+,;=-]+\])(?::[0-9]*)?[ \t]*\Z")
"""RFC 9112, 3.2: the grammar of RFC 3986, 3.2.2, without a check of addresses and escapes."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")

_ID_CHARACTERS: Final = 32

_IDS_AT_ONCE: Final = 128

_SLASHES: Final = re.compile("/+")


_SINGLE: Final = (b"content-type", b"content-encoding", b"inference-header-content-length", b"origin")
"""Headers that decide how a request is understood. If a header is sent twice, a proxy in front of the server may read
the first value and the server the second."""


def _check_single(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check that a request has each of `_SINGLE` at most once.

    Raises:
        BadRequest: the request has such a header more than once.
    """
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise BadRequest(f"header {name.decode().title()}: expected one, got {names.count(name)}")


class RequestRecord(msgspec.Struct):
    """A request, from its head to the end of its answer."""

    started_ns: int
    head_bytes: int
    """Bytes of the headers, the path and the query."""
    host_fault: str
    """The wrong value of the header ``Host``, in words; empty: the header is valid."""
    request_id: bytes
    trace: Trace | None
    """None: tracing is off, or the path is not traced."""
    state: dict[str, Any]
    """State of the request; has ``version`` if a version of a deployment answers, and ``answer_headers``, by name, if
    its model or its API sets headers."""
    status: int = 0
    """HTTP status of the answer; 0 until the answer has begun."""
    is_answered: bool = False
    """Whether the whole answer has been sent."""

    def check(self) -> None:
        """Check the head.

        Raises:
            HeadersTooLarge: headers, path and query exceed `MAX_HEADER_BYTES`.
            BadRequest: the header ``Host`` is doubled, invalid, or (in HTTP/1.1) missing.
        """
        if self.head_bytes > MAX_HEADER_BYTES:
            raise HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got {self.head_bytes}")
        if self.host_fault:
            raise BadRequest(f"header Host: expected a host name or address, and maybe a port, got {self.host_fault}")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers to add to the answer: the request's id, and, if known, the trace, the version that answers and what
        the model has set."""
        headers = [(b"x-request-id", self.request_id)]
        if self.trace is not None:
            headers.append((b"traceresponse", self.trace.header))
        if "version" in self.state:
            headers.append((b"headwater-version", self.state["version"].encode()))
        for name, value in self.state.get("answer_headers", {}).items():
            headers.append((name.encode(), value.encode()))
        return headers


def _noting(record: RequestRecord, send: Send) -> Send:
    """Wrap ``send`` for an answer that `Reply.send` doesn't send: adds the record's headers, and notes in the record
    the answer's status and end."""

    async def send_noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *record.headers()]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            record.is_answered = True
        await send(message)

    return send_noted


class RequestRecords:
    """Gives each request an id (the client's, if it sent a valid ``X-Request-Id``), and logs and counts each answer.

    ``scope["state"]["request_id"]`` is the id. Generated ids can't be guessed, since without API keys anybody who knows
    an id may cancel the request. ``scope["state"]["note"]`` is added to the log's line; with ``is_routine`` in the
    state only failures are logged.

    Args:
        access_log: logs the answers; None: answers are not logged.
        stream_limits: limits of answers in pieces.
    """

    def __init__(self, access_log: AccessLog | None, stream_limits: StreamLimits) -> None:
        self.log = access_log
        self.stream_limits = stream_limits
        self._ids = ""
        """Ids, generated many at once; unused from `_ids_at` on."""
        self._ids_at = 0
        self._sound_host: bytes | None = None
        """The last valid ``Host``: most requests name the same host."""

    def begin(self, scope: Scope) -> RequestRecord:
        """Record a request whose head has arrived, and set ``request_id`` and more in the scope's ``state``."""
        started_ns = time.perf_counter_ns()
        request_id = b""
        host: bytes | None = None
        host_fault = ""
        size_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        for name, value in scope["headers"]:
            size_bytes += len(name) + len(value)
            if name == b"x-request-id" and _REQUEST_ID.match(value):
                request_id = value
            elif name == b"host":
                if host is not None:
                    host_fault = "two of them"
                host = value
        if host is None:
            if scope.get("http_version") == "1.1":
                host_fault = "none"
        elif host != self._sound_host:
            if _HOST.match(host):
                self._sound_host = host
            else:
                host_fault = repr(host[:80].decode("latin-1"))
        state: dict[str, Any] = scope.setdefault("state", {})
        if request_id:
            state["request_id"] = request_id.decode()
        else:
            state["request_id"] = new_id = self._new_id()
            request_id = new_id.encode()
        if answers_as_anthropic(scope):
            state["answer_headers"] = {"request-id": state["request_id"]}
        state["stream_limits"] = self.stream_limits
        tracing = current()
        trace = None if tracing is None else tracing.begin(scope, state["request_id"])
        if trace is not None:
            state["log_fields"] = {**state.get("log_fields", {}), **trace.log_fields}
        return RequestRecord(started_ns, size_bytes, host_fault, request_id, trace, state)

    def end(self, record: RequestRecord, scope: Scope, status: int) -> None:
        """Count and log a request that has ended.

        Args:
            record: from `begin`.
            scope: the request's scope.
            status: the answer's status, or 499 if the client went away; a status in the request's state overrides it.
        """
        state: dict[str, Any] = scope["state"]
        final_status = state.get("status", status)
        took_ns = time.perf_counter_ns() - record.started_ns
        leave(scope, final_status, took_ns)
        if record.trace is not None:
            record.trace.end(scope, final_status, state.get("error"))
        if self.log is not None and not (final_status < 400 and state.get("is_routine")):
            self.log.write(scope, final_status, took_ns / 1e9, state)
        # The error's traceback references the state: without this, both and the body would stay until a garbage
        # collection.
        state.pop("error", None)

    def _new_id(self) -> str:
        at = self._ids_at
        if at == len(self._ids):
            self._ids = os.urandom(_ID_CHARACTERS // 2 * _IDS_AT_ONCE).hex()
            at = 0
        self._ids_at = end = at + _ID_CHARACTERS
        return self._ids[at:end]


class Entry:
    """The application: begins, checks, admits and ends every request. A pure ASGI class.

    Endpoints are called directly: FastAPI's layers cost time, and would stay in memory as long as a stream is open.
    Forwarding headers are trusted only from proxies at 127.0.0.1, or, if ``FORWARDED_ALLOW_IPS`` is set, at the
    addresses in it.

    Args:
        framework: answers all routes without an endpoint.
        routes: the endpoints' routes, including `INFER_PATH`.
        records: begins and ends each request.
        keys: admits requests; None: every request is admitted.
        cors: wraps the application for requests with an ``Origin``; None: such requests are treated like any other.
    """

    def __init__(
        self,
        framework: ASGIApp,
        routes: Sequence[EndpointRoute],
        records: RequestRecords,
        keys: KeyRing | None = None,
        cors: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self.framework = framework
        self.records = records
        self.routes = routes
        self._infer = next(route for route in routes if route.path == INFER_PATH)
        self._keys = keys
        self._lenient_paths = {MODELS_PATH, *(path for route in routes if "{" not in (path := route.path))}
        self._cors = None if cors is None else cors(self._answer)
        trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
        # Uvicorn's types for ASGI are not Starlette's.
        self._read_forwarded = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, _nothing), trusted_hosts=trusted))

    def with_routes(self, routes: Sequence[EndpointRoute]) -> Entry:
        """An entry with other endpoints for the same routes, for requests without an ``Origin``."""
        return Entry(self.framework, routes, self.records, self._keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI scope: answer a request, or hand a scope of another type to the framework."""
        if scope["type"] != "http":
            await self.framework(scope, receive, send)
            return
        self._mend_path(scope)
        names = dict(scope["headers"])
        if b"x-forwarded-for" in names or b"x-forwarded-proto" in names:
            await self._read_forwarded(scope, receive, send)
        record = self.records.begin(scope)
        state: dict[str, Any] = scope["state"]
        try:
            reply: ASGIApp | None
            try:
                record.check()
                if len(names) < len(scope["headers"]):
                    _check_single(scope["headers"])
            except HeadwaterError as error:
                state["error"] = error
                reply = error_reply(error, scope)
            else:
                cors = self._cors if b"origin" in names else None
                reply = cors or await self._reply(scope, receive)
            if isinstance(reply, Reply) and scope["method"] != "HEAD":
                record.status = reply.status
                await reply.send(scope, send, record.headers())
                record.is_answered = True
            elif reply is not None:
                await reply(scope, receive, _noting(record, send))
        except Exception as error:
            state["status"] = 500
            if not record.status:
                failure = error_reply(internal_error(state, error), scope)
                await failure(scope, receive, _noting(record, send))
            raise
        finally:
            limits: KeyLimits | None = state.get("key_limits")
            if limits is not None:
                limits.leave()
            release_body(scope)
            self.records.end(record, scope, record.status if record.is_answered else 499)

    def _mend_path(self, scope: Scope) -> None:
        """Take doubled slashes, and a slash at the end, out of the path of a route of OpenAI's API: clients join a base
        URL that ends in a slash, or that has the whole path, to a path of their own. The scope that a key needs, the
        route, the log and the metrics then see the route's path. Any other path stays as it is."""
        path = scope["path"]
        if len(path) < 2 or not (path[-1] == "/" or "//" in path):
            return
        mended = _SLASHES.sub("/", path[:MAX_HEADER_BYTES]).rstrip("/")
        base, _, name = mended.rpartition("/")
        is_openai = mended.startswith("/v1/") and mended in self._lenient_paths
        if is_openai or (base == MODELS_PATH and name):
            scope["path"], scope["raw_path"] = mended, quote(mended).encode()

    def _match(self, scope: Scope) -> EndpointRoute | None:
        """Find the endpoint's route for a request and note it in the scope. None: FastAPI answers the request."""
        if scope["method"] != "POST":
            return None
        path = scope["path"]
        if path.startswith(_INFER_START) and path.endswith(_INFER_END):
            name = path[len(_INFER_START) : -len(_INFER_END)]
            if name and "/" not in name:
                scope["path_params"] = {"model": name}
                scope["route"] = self._infer
                return self._infer
        for route in self.routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope["path_params"] = child_scope["path_params"]
                scope["route"] = route
                return route
        return None

    async def _reply(self, scope: Scope, receive: Receive) -> ASGIApp | None:
        """Admit a request and compute or open its answer; errors become answers. None: the client has left."""
        state: dict[str, Any] = scope["state"]
        try:
            if self._keys is not None:
                self._keys.admit(scope)
            route = self._match(scope)
            return self.framework if route is None else await route.answer(scope, receive)
        except ClientGone as error:
            state["status"] = error.status
            return None
        except HeadwaterError as error:
            note_error(state, error)
            # A failed call's future references the error, and the error's traceback the future: break this cycle.
            state["error"] = error.with_traceback(None)
            return error_reply(error, scope)
        except Exception as error:
            return error_reply(internal_error(state, error), scope)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application that the CORS middleware wraps."""
        reply = await self._reply(scope, receive)
        if reply is not None:
            await reply(scope, receive, send)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application for uvicorn's middleware that does nothing: the middleware is called only for its changes to the
    scope."""
