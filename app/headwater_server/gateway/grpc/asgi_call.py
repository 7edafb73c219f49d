"""A gRPC call as a request to an ASGI application, and the application's answer as that of the call."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import grpc
import orjson
from starlette.types import Message, Scope

from headwater_server.gateway.grpc.rpc_endpoint import EXTENSION, STATUS, RpcMessage, receiving
from headwater_server.gateway.http.entry import Entry

__all__ = ["RpcAnswer", "ask", "body_or_abort", "error_text"]

CODES: Final = {
    400: 3, 401: 16, 403: 7, 404: 5, 408: 4, 409: 9, 413: 8, 422: 9, 429: 8, 431: 8, 499: 1, 501: 12, 503: 14, 504: 4,
}  # fmt: skip
"""The number of gRPC's status by HTTP's; others: 13, an internal error."""
_STATUSES: Final = {code.value[0]: code for code in grpc.StatusCode}
_NOT_PASSED: Final = ("content-", "inference-header-content-length", "transfer-encoding", "origin", "host")
"""Beginnings of the metadata that would be understood as headers of a request over HTTP."""
_NAME: Final = re.compile(r"[0-9a-z_.-]+\Z")
_VALUE: Final = re.compile(r"[\x20-\x7e]*\Z")


class RpcAnswer(NamedTuple):
    """The application's answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask(
    entry: Entry,
    method: str,
    path: str,
    context: Any,
    *,
    body: bytes = b"",
    call: RpcMessage | None = None,
    on_piece: Callable[[bytes], Awaitable[None]] | None = None,
) -> RpcAnswer:
    """Send a request to an application, in the name of a gRPC call.

    Args:
        entry: the application.
        method, path, body: the request.
        context: the call; its metadata become headers.
        call: the message, for `headwater_server.gateway.grpc.rpc_endpoint.RpcEndpoint`.
        on_piece: takes the pieces of an answer in pieces; None: the body is returned whole.
    """
    host, _, port = context.peer().partition(":")[2].rpartition(":")
    headers = [
        (name.encode(), value.encode())
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str) and not name.startswith(_NOT_PASSED)
    ]
    # Commands refuse the host of a web page that a browser was led to. No browser speaks gRPC without TLS, and with TLS
    # the name is the certificate's.
    headers.append((b"host", b"localhost"))
    if body:
        headers.append((b"content-type", b"application/json"))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": (host.strip("[]"), int(port)) if port.isdigit() else None,
        "server": None,
        "state": {"log_fields": {"protocol": "grpc"}},
        "extensions": {} if call is None else {EXTENSION: call},
    }
    status = 0
    answer_headers: dict[str, str] = {}
    pieces: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answer_headers.update((name.decode(), value.decode("latin-1")) for name, value in message["headers"])
        elif piece := message.get("body", b""):
            if on_piece is not None and status == HTTPStatus.OK and message.get("more_body", False):
                await on_piece(piece)
            else:
                pieces.append(bytes(piece))

    try:
        await entry(scope, receiving(body), send)
    except Exception:
        if not status:  # else the entry has logged and answered it
            raise
    return RpcAnswer(status or HTTPStatus.INTERNAL_SERVER_ERROR, answer_headers, b"".join(pieces))


async def body_or_abort(answer: RpcAnswer, context: Any) -> bytes:
    """The body of an answer; an error ends the call with the status and the message that fit it."""
    metadata = tuple(
        (name, value)
        for name, value in answer.headers.items()
        if not name.startswith("content-") and name != STATUS and _NAME.match(name) and _VALUE.match(value)
    )
    if answer.status == HTTPStatus.OK:
        context.set_trailing_metadata(metadata)
        return answer.body
    number = answer.headers.get(STATUS)
    code = CODES.get(answer.status, 13) if number is None else int(number)
    await context.abort(_STATUSES[code], error_text(answer), metadata)
    raise AssertionError("abort raises")


def error_text(answer: RpcAnswer) -> str:
    """The message of an error."""
    try:
        text: str = orjson.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"the answer has status {answer.status}"
    return text
