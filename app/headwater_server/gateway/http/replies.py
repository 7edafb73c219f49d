"""Answers: errors in each API's form, and complete bodies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.types import Message, Receive, Scope, Send

from headwater_server.errors import CallableFailed, HeadwaterError, anthropic_error, openai_error
from headwater_server.gateway.http.exchange import exchange_of

__all__ = [
    "ANTHROPIC_PATH",
    "JSON",
    "MODELS_PATH",
    "OPENAI_PATHS",
    "RETRY_AFTER_S",
    "Reply",
    "answers_as_anthropic",
    "cache_headers",
    "error_reply",
    "internal_error",
    "json_reply",
]

logger = logging.getLogger("headwater")

RETRY_AFTER_S: Final = 2
"""The ``Retry-After``, in seconds, of a 503 whose error has no time."""

OPENAI_PATHS: Final = (
    "/v1/", "/v2/rerank", "/v2/embed", "/rerank", "/score", "/classify", "/pooling", "/invocations", "/tokenize",
    "/detokenize",
)  # fmt: skip
"""Prefixes of the paths that answer in the form of OpenAI's API."""

ANTHROPIC_PATH: Final = "/v1/messages"
"""Prefix of the paths that answer in the form of Anthropic's API, although they are among `OPENAI_PATHS`."""

MODELS_PATH: Final = "/v1/models"
"""Path of the list of models, and prefix of each model's path."""

JSON: Final = (b"content-type", b"application/json")
"""The header of a JSON body."""

Headers = list[tuple[bytes, bytes]]


class Reply:
    """An ASGI response with a complete body, in pieces."""

    def __init__(self, status: int, body: Sequence[bytes | memoryview], headers: Headers) -> None:
        self.status = status
        self._body = body
        self._headers = headers

    def content(self) -> tuple[bytes, Headers]:
        """The body in one piece, and the headers without Content-Length."""
        return b"".join(self._body), self._headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        body, headers = self.content()
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": self.status, "headers": [*headers, length]})
        await send({"type": "http.response.body", "body": body})

    async def send(self, scope: Scope, send: Send, more_headers: Headers) -> None:
        """Send the response with additional headers: in a single write past any middleware, if the connection can."""
        exchange = exchange_of(scope)
        headers = [*self._headers, *more_headers]
        if exchange is None or not exchange.answer(self.status, headers, self._body):
            await Reply(self.status, self._body, headers)(scope, _nothing, send)


async def _nothing() -> Message:
    raise AssertionError("an answer that is ready asks for nothing")


def cache_headers(cache: str) -> Headers:
    """The header that says how a deployment's cache was used (``cache`` of `headwater_server.codecs.tensors.Answer`);
    an empty list if ``cache`` is empty."""
    return [(b"headwater-cache", cache.encode())] if cache else []


def json_reply(content: object, status: int = 200, headers: Headers | None = None) -> Reply:
    """A JSON answer."""
    return Reply(status, [msgspec.json.encode(content)], [JSON, *(headers or ())])


def answers_as_anthropic(scope: Scope) -> bool:
    """Whether a request is answered in the form of Anthropic's API: under `ANTHROPIC_PATH`, and under `MODELS_PATH` for
    Anthropic's clients, which send the header ``anthropic-version``."""
    path = scope["path"]
    if path.startswith(MODELS_PATH):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return bool(path.startswith(ANTHROPIC_PATH))


def error_reply(error: HeadwaterError, scope: Scope) -> Reply:
    """An error in the form of the API that a request asks: Anthropic's (see `answers_as_anthropic`), OpenAI's under
    `OPENAI_PATHS`, Triton's elsewhere. Anthropic's form has the request's id, if it is known."""
    if answers_as_anthropic(scope):
        content: object = anthropic_error(error, scope.get("state", {}).get("request_id"))
    elif scope["path"].startswith(OPENAI_PATHS):
        content = openai_error(error)
    else:
        content = {"error": error.message}
    headers: Headers = []
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    retry_after_s = error.retry_after_s or (RETRY_AFTER_S if error.status == 503 else None)
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    return json_reply(content, error.status, headers)


def internal_error(state: Mapping[str, Any], error: Exception) -> CallableFailed:
    """Log a bug of the gateway. Returns the error for the client, of status 500, which names only the request id."""
    request_id = state.get("request_id", "?")
    logger.error("request %s failed in the gateway", request_id, exc_info=error, extra={"request_id": request_id})
    return CallableFailed(f"internal error; the log has more under request id {request_id}")
