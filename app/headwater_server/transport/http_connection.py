"""A client's HTTP/1.1 connection: the only reader of HTTP answers in the server and its commands.

A client with pools, redirects and cookies takes several times as long as the gateway takes for a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import httptools

__all__ = ["HttpConnection"]


class HttpConnection(asyncio.Protocol):
    """A connection that carries one request at a time. A subclass gets the headers and the body through `on_header` and
    `on_body`, which httptools calls, the answer's end through `answered`, and the connection's end through `ended`.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._body: list[bytes] = []
        self.status = 0
        """HTTP status of the current answer; 0 until its headers are complete."""
        self.is_kept = False
        """Whether the server keeps the connection open after the current answer; known once its headers are
        complete."""
        self.is_lost = False
        """Whether the connection has ended."""

    def begin(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send a request, given in pieces. The connection must not be lost, and no other request may be pending."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self.status = 0
        self.is_kept = False
        self._transport.writelines(pieces)

    def take_body(self) -> bytes:
        """The bytes of the body that have arrived since the last call of this method."""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        return body

    def close(self, error: Exception | None = None) -> None:
        """End the connection. `ended` is called with the error, unless the connection has ended before."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(error)

    def answered(self) -> None:
        """The answer is complete."""
        raise NotImplementedError

    def ended(self, error: Exception | None) -> None:
        """The connection has ended; a pending answer will not be completed.

        Args:
            error: a system error, or `httptools.HttpParserError` for data that are not HTTP; None: the server or
                `close` ended the connection.
        """
        raise NotImplementedError

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # uvloop would write at the end of its turn

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self.ended(exc)
        self._parser = None  # the parser refers to this object: a reference cycle

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # data that no request asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(error)

    # httptools

    def on_headers_complete(self) -> None:
        if self._parser is not None:
            self.status = self._parser.get_status_code()
            self.is_kept = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser is None:  # a second answer, which no request asked for
            self.close()
            return
        self._parser = None
        self.answered()
