"""Around every request: a request id, the access log, a bound on headers. One pure ASGI class."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access_log import AccessLog
from app.errors import HeadersTooLarge
from app.event_stream import StreamLimits
from app.metrics.accounting import leave
from app.replies import error_reply
from app.tracing import current

__all__ = ["RequestContext"]

MAX_HEADER_BYTES = 32 * 1024
"""Of a request's headers and its path together."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")


class RequestContext:
    """Gives each request an id (the client's own, if it sent a sound ``X-Request-Id``), logs and counts each answer.

    ``scope["state"]["request_id"]`` has the id, which nobody can guess who wasn't told: it is enough to cancel the
    request. ``scope["state"]["note"]`` may be set to what the log should add, ``is_routine`` to have it say nothing if
    all went well.
    """

    def __init__(self, app: ASGIApp, access_log: AccessLog | None, stream_limits: StreamLimits) -> None:
        self._app = app
        self._log = access_log
        self._stream_limits = stream_limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = time.perf_counter_ns()
        request_id = b""
        size_bytes = 0
        size_bytes += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        for name, value in scope["headers"]:
            size_bytes += len(name) + len(value)
            if name == b"x-request-id" and _REQUEST_ID.match(value):
                request_id = value
        request_id = request_id or secrets.token_hex(16).encode()
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["stream_limits"] = self._stream_limits
        tracing = current()
        trace = None if tracing is None else tracing.begin(scope, state["request_id"])
        if trace is not None:
            state["log_fields"] = {**state.get("log_fields", {}), **trace.log_fields}
        status = 0
        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if trace is not None:
                    message["headers"].append((b"traceresponse", trace.header))
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            if size_bytes > MAX_HEADER_BYTES:
                error = HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got {size_bytes}")
                await error_reply(error, scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception:
            state["status"] = 500  # answered outside of this
            raise
        finally:
            seen = state.get("status", status if complete else 499)
            took_ns = time.perf_counter_ns() - started_ns
            leave(scope, seen, took_ns)
            if trace is not None:
                trace.end(scope, seen, state.get("error"))
            if self._log is not None and not (seen < 400 and state.get("is_routine")):
                self._log.write(scope, seen, took_ns / 1e9, state)
