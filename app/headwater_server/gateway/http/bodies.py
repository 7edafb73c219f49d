"""Reads request bodies, with limits on their size, their time, and the size of their unpacked and decoded content."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import anyio
from starlette.types import Receive, Scope

from headwater_server.codecs.memory import object_bytes
from headwater_server.errors import BadRequest, BodyTooLarge, BodyTooSlow, ClientGone, UnsupportedMediaType
from headwater_server.gateway.http.body_budget import BodyBudget, BodyLease, take_for_objects
from headwater_server.gateway.http.exchange import exchange_of

__all__ = ["LARGE_BYTES", "BodyReader", "decoded"]

LARGE_BYTES: Final = 256 * 1024
"""From this size on, decoding takes milliseconds and is left to a thread so that other requests don't wait for it."""

_PIECE_BYTES = 64 * 1024
_JSON_TYPES = (b"application/json", b"application/octet-stream", b"application/vnd.sagemaker-triton")
# No content type, and the type that curl sends by default. Browsers let every page send both to any server without
# asking it first, but send the page's Origin along.
_UNSAID = (None, b"application/x-www-form-urlencoded")
# zlib's window bits: for gzip, and for zlib's format, which HTTP calls deflate.
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


_Request = TypeVar("_Request")


async def decoded(
    decode: Callable[[bytes], _Request], body: bytes, scope: Scope, memory: Callable[[bytes], int] = object_bytes
) -> _Request:
    """Decode a body, in a thread if it is large.

    Args:
        decode: decodes the JSON.
        body: the request's body, as `BodyReader.read` returned it.
        scope: the request's scope. The decoded objects are charged to the request.
        memory: estimates the memory of the decoded objects, in bytes; see `headwater_server.codecs.memory`.

    Raises:
        Unavailable: the bodies of all requests together are over the budget.
        ClientGone: the request has ended.
        HeadwaterError: an error from ``decode``.
    """

    def take_and_decode() -> _Request:
        take_for_objects(scope, memory(body))
        return decode(body)

    return take_and_decode() if len(body) < LARGE_BYTES else await asyncio.to_thread(take_and_decode)


class BodyReader:
    """Reads bodies.

    Args:
        max_bytes: the limit of a body, and of its unpacked content.
        timeout_s: how long a body may take to arrive, in seconds.
        budget: limits the bodies of all requests together; default: a budget of ``max_bytes``.
    """

    def __init__(self, max_bytes: int, timeout_s: float, budget: BodyBudget | None = None) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._budget = budget or BodyBudget(max_bytes)

    async def read(self, scope: Scope, receive: Receive, *, form: bool = False) -> tuple[bytes, dict[bytes, bytes]]:
        """Read a body. Returns it, unpacked, and the headers by name; of a repeated header, the last value.

        Args:
            scope, receive: ASGI arguments of the request.
            form: whether the body must be of type ``multipart/form-data`` instead of JSON or octets.

        Raises:
            UnsupportedMediaType: the content type is wrong, or the encoding isn't gzip or deflate. Without ``form``,
                JSON and octets are right; in a request without an ``Origin`` also no type and curl's default; with an
                ``Origin`` no type only if there is no body.
            BodyTooLarge: the body, or its unpacked content, is over the limit. If the Content-Length is over it, the
                rest of the body isn't read.
            Unavailable: the bodies of all requests together are over the budget.
            BodyTooSlow: the body did not arrive in time.
            BadRequest: the compressed body is damaged, or bytes follow it.
            ClientGone: the client went away.
        """
        headers = dict(scope["headers"])
        if form:
            _check_form(headers.get(b"content-type"))
        else:
            self._check_type(headers)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity" and encoding not in _WINDOW_BITS:
            raise UnsupportedMediaType(
                f"header Content-Encoding: expected gzip, deflate or identity, got {_shown(encoding)}"
            )
        lease = self.lease(scope)
        exchange = exchange_of(scope)
        body = None if exchange is None else exchange.take_body()
        if body is None:
            length = headers.get(b"content-length")
            if length is not None:
                length = length.strip()  # the parser leaves trailing spaces
                if length.isdigit() and int(length) > self._max_bytes:
                    raise self._too_large(int(length))
            try:
                with anyio.fail_after(self._timeout_s):
                    if exchange is not None:
                        body = await exchange.gather_body(lease.take)
                    else:
                        body = await self._read_all(receive, lease)
            except TimeoutError:
                raise BodyTooSlow(f"body: expected all of it within {self._timeout_s:g} s") from None
            if body is None:
                raise ClientGone("the client went away before its body had arrived")
        else:
            lease.take(len(body), len(body))
        if encoding != b"identity":
            body = await asyncio.to_thread(self._unpack, body, _WINDOW_BITS[encoding], encoding, lease)
        return body, headers

    def lease(self, scope: Scope) -> BodyLease:
        """A request's share of the budget, the same for each call; `release_body` gives it back when the request ends.
        Call `BodyLease.take` before further bytes are unpacked from the body."""
        state: dict[str, Any] = scope.setdefault("state", {})
        lease: BodyLease | None = state.get("body")
        if lease is None:
            lease = state["body"] = BodyLease(self._budget, self._max_bytes)
        return lease

    async def _read_all(self, receive: Receive, lease: BodyLease) -> bytes | None:
        buffer = io.BytesIO()
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            lease.take(len(chunk), size)
            buffer.write(chunk)
            if not message.get("more_body", False):
                return buffer.getvalue()

    def _unpack(self, packed: bytes, window_bits: int, encoding: bytes, lease: BodyLease) -> bytes:
        unpacker = zlib.decompressobj(window_bits)
        buffer = io.BytesIO()
        size, rest = 0, packed
        try:
            while rest and not unpacker.eof:
                piece = unpacker.decompress(rest, _PIECE_BYTES)
                size += len(piece)
                lease.take(len(piece), size)
                buffer.write(piece)
                rest = unpacker.unconsumed_tail
            buffer.write(unpacker.flush())
        except zlib.error as error:
            raise BadRequest(f"body: not valid {encoding.decode()} data: {error}", field="body") from error
        if not unpacker.eof:
            raise BadRequest(f"body: its {encoding.decode()} data are cut short", field="body")
        if unpacker.unused_data:
            raise BadRequest(f"body: bytes follow the end of its {encoding.decode()} data", field="body")
        return buffer.getvalue()

    def _check_type(self, headers: dict[bytes, bytes]) -> None:
        content_type = headers.get(b"content-type")
        if content_type in _JSON_TYPES:
            return
        kind = None if content_type is None else content_type.partition(b";")[0].strip().lower()
        if kind is not None and (kind in _JSON_TYPES or kind.endswith(b"+json")):
            return
        fix = "with curl, add -H 'Content-Type: application/json'"
        if b"origin" in headers:
            if kind is None and not _has_body(headers):
                return
            fix = "a web page must say so"
        elif kind in _UNSAID:
            return
        raise UnsupportedMediaType(
            "header Content-Type: expected application/json, or application/octet-stream for binary tensors, "
            f"got {'none' if kind is None else _shown(kind)}; {fix}"
        )

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(f"body: expected at most {self._max_bytes} bytes (server.max_body_bytes), got {size}")


def _check_form(content_type: bytes | None) -> None:
    if content_type is None or content_type.partition(b";")[0].strip().lower() != b"multipart/form-data":
        got = "none" if content_type is None else _shown(content_type)
        raise UnsupportedMediaType(
            f"header Content-Type: expected multipart/form-data, got {got}; with curl, send fields by -F"
        )


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
