"""A lean HTTP/1.1 client: one connection, with at most one request on it, as fast as Python allows.

A client with pools, redirects and cookies takes several times a gateway's time, and would measure itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NamedTuple, Protocol, cast

import httptools

from app.cli.bench.faults import AskFailed, Fault, os_reason
from app.cli.bench.target import Target
from app.cli.client import CONNECT_TIMEOUT_S, tls_context

__all__ = ["Connection", "Dialler", "EventReader", "Reply"]


class Reply(NamedTuple):
    """One answer; times are `time.perf_counter`'s."""

    status: int
    json_length: int | None
    """The value of the header ``Inference-Header-Content-Length``."""
    body: bytes
    sent_s: float
    ended_s: float
    """When its last byte arrived."""


class EventReader(Protocol):
    """Reads a stream while it comes."""

    @property
    def is_done(self) -> bool:
        """Whether the stream's last event has come."""
        ...

    def feed(self, data: bytes, now_s: float) -> None:
        """Read data that arrived at this time."""
        ...


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: EventReader | None = None
        self._body: list[bytes] = []
        self._json_length: int | None = None
        self._sent_s = 0.0
        self._now_s = 0.0
        self.lost = False
        self.expires_s: float | None = None
        """When the pending request expires; None: no request is pending."""
        self.idle_since_s = 0.0

    def exchange(self, request: bytes, expires_s: float, reader: EventReader | None = None) -> asyncio.Future[Reply]:
        """Send a request; the connection must not be `lost`.

        Args:
            request: all of it, encoded.
            expires_s: when `expire` ends the request.
            reader: reads the body of an answer with status 200 while it comes; it is then not in the reply.

        Returns:
            A future of the answer, which may raise `AskFailed`.
        """
        assert self._transport is not None
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reader = reader
        self._body = []
        self._json_length = None
        self.expires_s = expires_s
        self._sent_s = time.perf_counter()
        self._transport.write(request)
        return waiter

    def expire(self, now_s: float) -> None:
        """Fail a request that has taken too long, and close the connection."""
        if self.expires_s is not None and now_s > self.expires_s:
            self._fail(Fault("timeout", None, "no whole answer in time"))
            self.close()

    def close(self) -> None:
        """Close the connection; a pending request fails."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._reader is not None and self._reader.is_done and self._parser is not None:
            self._end(self._parser.get_status_code())  # a server that ends its streams by disconnecting
            return
        self._fail(Fault("reset", None, os_reason(exc) if exc else "the connection ended before the answer did"))

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._parser is None:  # data that no request asked for
            self.close()
            return
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Fault("bad answer", None, f"not HTTP: {error}"[:160]))
            self.close()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 31 and name.lower() == b"inference-header-content-length" and value.isdigit():
            self._json_length = int(value)

    def on_body(self, body: bytes) -> None:
        if self._reader is not None and self._parser is not None and self._parser.get_status_code() == 200:
            self._reader.feed(body, self._now_s)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.close()
        self._end(self._parser.get_status_code())

    def _end(self, status: int) -> None:
        waiter, self._waiter, self.expires_s = self._waiter, None, None
        self.idle_since_s = self._now_s
        if waiter is not None and not waiter.done():
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            waiter.set_result(Reply(status, self._json_length, body, self._sent_s, self._now_s))

    def _fail(self, fault: Fault) -> None:
        waiter, self._waiter, self.expires_s = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(AskFailed(fault))


class Dialler:
    """Opens connections to a target.

    Args:
        target: gives host and port.
    """

    def __init__(self, target: Target) -> None:
        self._host, self._port = target.host, target.port
        self._tls: ssl.SSLContext | None = tls_context(target.url) if target.is_tls else None
        self.open: set[Connection] = set()
        """Connections that are not known to be lost."""
        self.failing_since_s: float | None = None
        """Since when connecting fails; None: the last attempt succeeded."""
        self.last_reason = ""

    async def dial(self) -> Connection:
        """Open a connection.

        Raises:
            AskFailed: connecting failed.
        """
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(Connection, self._host, self._port, ssl=self._tls), CONNECT_TIMEOUT_S
            )
        except (OSError, asyncio.TimeoutError) as error:  # ssl's errors are among the first
            reason = "no connection in time" if isinstance(error, asyncio.TimeoutError) else os_reason(error)
            if self.failing_since_s is None:
                self.failing_since_s = time.perf_counter()
            self.last_reason = reason
            raise AskFailed(Fault("connect", None, reason)) from error
        self.failing_since_s = None
        self.open.add(connection)
        return connection

    def expire(self) -> None:
        """End every request that has taken too long, and forget lost connections."""
        now_s = time.perf_counter()
        for connection in list(self.open):
            if connection.lost:
                self.open.discard(connection)
            else:
                connection.expire(now_s)

    def close(self) -> None:
        """Close all connections."""
        for connection in self.open:
            connection.close()
        self.open.clear()
