"""What a proxy in front says of its client.

Around every request: a request id, the access log, its count, its trace, a bound on headers.

The boundary of a request: every error becomes an answer here.
"""

from __future__ import annotations

import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app.errors import BadRequest, CallableFailed, ClientGone, HeadersTooLarge, HeadwaterError
from app.gateway.http.event_stream import StreamLimits
from app.gateway.http.replies import error_reply
from app.telemetry.logs import AccessLog
from app.telemetry.recorder import leave, note_error
from app.telemetry.tracing import Trace, current

__all__ = [
    "MAX_HEADER_BYTES",
    "Endpoint",
    "EndpointRoute",
    "EndpointShortcut",
    "ForwardedHeaders",
    "HeadAsGet",
    "RequestContext",
    "RequestRecord",
    "RequestRecords",
    "internal_error",
]

MAX_HEADER_BYTES: Final = 32 * 1024
"""Of a request's headers and its path together."""


_NAMES: Final = (b"x-forwarded-for", b"x-forwarded-proto")


class ForwardedHeaders:
    """Uvicorn's middleware for them, past which everything goes that has none.

    It believes proxies on this machine, or those that the environment's ``FORWARDED_ALLOW_IPS`` names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
        # Uvicorn has types of its own for ASGI, which are not Starlette's.
        self._reading = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), trusted_hosts=trusted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        for name, _ in scope.get("headers", ()):
            if name in _NAMES:
                await self._reading(scope, receive, send)
                return
        await self._app(scope, receive, send)


logger = logging.getLogger("headwater")

_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[\w.:~!$&'()*+,;=-]+\])(?::[0-9]*)?[ \t]*\Z")
"""RFC 9112, 3.2: of the URI's grammar (RFC 3986, 3.2.2), without a look at what an address or escape means."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")

_ID_CHARACTERS: Final = 32

_IDS_AT_ONCE: Final = 128


class RequestRecord:
    """One request, from its head to its end."""

    __slots__ = ("head_bytes", "host_fault", "request_id", "started_ns", "trace")

    def __init__(
        self, started_ns: int, head_bytes: int, host_fault: str, request_id: bytes, trace: Trace | None
    ) -> None:
        self.started_ns = started_ns
        self.head_bytes = head_bytes
        self.host_fault = host_fault
        self.request_id = request_id
        self.trace = trace

    def check(self) -> None:
        """Raises `HeadersTooLarge`, or `BadRequest` for the header Host."""
        if self.head_bytes > MAX_HEADER_BYTES:
            raise HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got {self.head_bytes}")
        if self.host_fault:
            raise BadRequest(f"header Host: expected a host name or address, and maybe a port, got {self.host_fault}")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """That every answer has."""
        if self.trace is None:
            return [(b"x-request-id", self.request_id)]
        return [(b"x-request-id", self.request_id), (b"traceresponse", self.trace.header)]


class RequestRecords:
    """Gives each request an id (the client's own, if it sent a sound ``X-Request-Id``), logs and counts each answer.

    ``scope["state"]["request_id"]`` has the id, which nobody can guess who wasn't told: it is enough to cancel the
    request. ``scope["state"]["note"]`` may be set to what the log should add, ``is_routine`` to have it say nothing if
    all went well.
    """

    def __init__(self, access_log: AccessLog | None, stream_limits: StreamLimits) -> None:
        self.log = access_log
        self.stream_limits = stream_limits
        self._ids = ""
        """Not used yet: the system is asked for many at once."""
        self._ids_at = 0
        self._sound_host: bytes | None = None
        """The last one: most requests name the same."""

    def begin(self, scope: Scope) -> RequestRecord:
        """A request's head is here."""
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
            state["request_id"] = made = self._new_id()
            request_id = made.encode()
        state["stream_limits"] = self.stream_limits
        tracing = current()
        trace = None if tracing is None else tracing.begin(scope, state["request_id"])
        if trace is not None:
            state["log_fields"] = {**state.get("log_fields", {}), **trace.log_fields}
        return RequestRecord(started_ns, size_bytes, host_fault, request_id, trace)

    def end(self, record: RequestRecord, scope: Scope, status: int) -> None:
        """A request is over.

        Args:
            record: what `begin` gave.
            scope: the request's.
            status: that it was answered with, unless its state has another; 499: its client went away.
        """
        state: dict[str, Any] = scope["state"]
        seen = state.get("status", status)
        took_ns = time.perf_counter_ns() - record.started_ns
        leave(scope, seen, took_ns)
        if record.trace is not None:
            record.trace.end(scope, seen, state.get("error"))
        if self.log is not None and not (seen < 400 and state.get("is_routine")):
            self.log.write(scope, seen, took_ns / 1e9, state)
        # Its traceback knows the state: both, and the request's body, would wait for the garbage collector.
        state.pop("error", None)

    def _new_id(self) -> str:
        at = self._ids_at
        if at == len(self._ids):
            self._ids = os.urandom(_ID_CHARACTERS // 2 * _IDS_AT_ONCE).hex()
            at = 0
        self._ids_at = end = at + _ID_CHARACTERS
        return self._ids[at:end]


class RequestContext:
    """Has each request recorded, and answers those that fail with no answer begun. A pure ASGI class."""

    def __init__(self, app: ASGIApp, records: RequestRecords) -> None:
        self._app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = self._records.begin(scope)
        status = 0
        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *record.headers()]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            try:
                record.check()
            except HeadwaterError as error:
                scope["state"]["error"] = error
                await error_reply(error, scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            scope["state"]["status"] = 500
            if not status:
                await error_reply(internal_error(scope["state"], error), scope["path"])(scope, receive, send_with_id)
            raise
        finally:
            self._records.end(record, scope, status if complete else 499)


def internal_error(state: Mapping[str, Any], error: Exception) -> CallableFailed:
    """Log a fault of ours. Returns what its client is told."""
    request_id = state.get("request_id", "?")
    logger.error("request %s failed in the gateway", request_id, exc_info=error, extra={"request_id": request_id})
    return CallableFailed(f"internal error; the log has more under request id {request_id}")


class Endpoint(ABC):
    """A raw ASGI endpoint: below FastAPI's own layers, for the routes that are called thousands of times a second."""

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """Compute the answer, or open one in pieces. Any `HeadwaterError` becomes the answer that its class says."""

    async def reply(self, scope: Scope, receive: Receive) -> ASGIApp | None:
        """The answer, whatever comes of it. None: its client has gone."""
        state = scope["state"]
        try:
            return await self.answer(scope, receive)
        except ClientGone as error:
            state["status"] = error.status
            return None
        except HeadwaterError as error:
            note_error(state, error)
            # A failed call's future has the error, whose traceback has the future: nobody reads it any more.
            state["error"] = error.with_traceback(None)
            return error_reply(error, scope["path"])
        except Exception as error:
            return error_reply(internal_error(state, error), scope["path"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        reply = await self.reply(scope, receive)
        if reply is not None:
            await reply(scope, receive, send)


class EndpointRoute(Route):
    """A route of an endpoint. Says in ``scope["route"]`` that it was taken, as FastAPI's own routes do."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Route.handle`."""
        scope["route"] = self
        await super().handle(scope, receive, send)


class EndpointShortcut:
    """Leads what is an endpoint's past the framework, whose layers do nothing for one that handles its own errors, but
    stay in memory as long as a stream is open. What isn't exactly such a route and its method goes on to them.

    Args:
        app: the framework's.
        routes: of endpoints.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[EndpointRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        app = self._app
        if scope["type"] == "http":
            for route in self._routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found)
                    scope["route"] = route
                    app = route.app
                    break
        await app(scope, receive, send)


class HeadAsGet:
    """Has HEAD answered as GET is, by whatever answers that; the server leaves the body out.

    Args:
        app: the framework's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]  # by which it is counted
