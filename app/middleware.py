"""Around every request: a request id, the access log, its count, its trace, a bound on headers."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access_log import AccessLog
from app.errors import BadRequest, CallableFailed, HeadersTooLarge, HeadwaterError
from app.event_stream import StreamLimits
from app.metrics.accounting import leave
from app.replies import error_reply
from app.tracing import Trace, current

__all__ = ["MAX_HEADER_BYTES", "RequestContext", "RequestRecord", "RequestRecords", "internal_error"]

logger = logging.getLogger("headwater")

MAX_HEADER_BYTES: Final = 32 * 1024
"""Of a request's headers and its path together."""
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
