"""A lean HTTP/1.1 client: a connection carries one request at a time, as fast as Python allows.

A client with pools, redirects and cookies takes several times as long as the gateway, so a bench with it would measure
the client.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

from headwater_server.cli.bench.answer_reader import (
    LONGEST_REASON,
    Fault,
    Sample,
    TokenReader,
    answer_fault,
    failed_status,
)
from headwater_server.cli.server_client import CONNECT_TIMEOUT_S, tls_context

__all__ = ["ConnectFailed", "Connection", "Dialler"]


class ConnectFailed(Exception):
    """No connection could be made."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.fault = Fault("connect", None, reason)


class Connection(asyncio.Protocol):
    """A connection, with at most one pending request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Sample] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: TokenReader | None = None
        self._body: list[bytes] = []
        self._json_length: int | None = None
        self._sent_s = 0.0
        self._now_s = 0.0
        self._expires_s = 0.0
        self.lost = False
        """Whether the connection can no longer be used."""
        self.idle_since_s = 0.0
        """When the last request ended, by `time.perf_counter`; 0 before the first."""

    def ask(self, request: bytes, mode: str, expires_s: float) -> asyncio.Future[Sample]:
        """Send a request; the connection must not be `lost`, and no other request may be pending.

        Args:
            request: the whole HTTP request, encoded.
            mode: a key of `headwater_server.cli.bench.job.PATHS`.
            expires_s: the time of `time.perf_counter` from which `expire` fails the request.

        Returns:
            A future that resolves to a sample, with the answer's times or the fault.
        """
        assert self._transport is not None
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reader = None if mode == "infer" else TokenReader(mode)
        self._body = []
        self._json_length = None
        self._expires_s = expires_s
        self._sent_s = time.perf_counter()
        self._transport.write(request)
        return waiter

    def expire(self, now_s: float) -> None:
        """If the pending request has expired, fail it and close the connection."""
        if self._waiter is not None and now_s > self._expires_s:
            self._fail("timeout", "no whole answer in time")
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
        if self._reader is not None and self._reader.is_done:
            self._end()  # some servers end their streams by disconnecting
        else:
            self._fail("reset", _reason(exc) if exc else "the connection ended before the answer did")

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._parser is None:  # data without a pending request
            self.close()
            return
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("bad answer", f"not HTTP: {error}"[:LONGEST_REASON])
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
        if self._parser is not None and not self._parser.should_keep_alive():
            self.close()
        self._end()

    def _end(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if status != 200:
            fault: Fault | None = failed_status(status, body)
        else:
            fault = answer_fault(body, self._json_length) if self._reader is None else self._reader.end()
        self._settle(Sample(fault, self._sent_s, self._now_s, self._reader))

    def _fail(self, kind: str, reason: str) -> None:
        self._settle(Sample(Fault(kind, None, reason), self._sent_s))

    def _settle(self, sample: Sample) -> None:
        waiter, self._waiter = self._waiter, None
        self.idle_since_s = self._now_s
        if waiter is not None and not waiter.done():
            waiter.set_result(sample)


class Dialler:
    """Opens connections to a server.

    Args:
        url: the server's base.
    """

    def __init__(self, url: str) -> None:
        server = urlsplit(url)
        is_tls = server.scheme == "https"
        self._host, self._port = server.hostname or "", server.port or (443 if is_tls else 80)
        self._tls = tls_context(url) if is_tls else None
        self._open: set[Connection] = set()
        self.failing_since_s: float | None = None
        """Time of the first failed attempt since the last success; None: no attempt has failed since."""
        self.last_reason = ""
        """Why the last failed attempt failed; empty if no attempt failed."""

    async def dial(self) -> Connection:
        """Open a connection.

        Raises:
            ConnectFailed: connecting failed, or took more than `CONNECT_TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(Connection, self._host, self._port, ssl=self._tls), CONNECT_TIMEOUT_S
            )
        except (OSError, asyncio.TimeoutError) as error:  # ssl's errors are subclasses of OSError
            if self.failing_since_s is None:
                self.failing_since_s = time.perf_counter()
            self.last_reason = "no connection in time" if isinstance(error, asyncio.TimeoutError) else _reason(error)
            raise ConnectFailed(self.last_reason) from error
        self.failing_since_s = None
        self._open.add(connection)
        return connection

    def expire(self) -> None:
        """Fail every expired request, and forget lost connections."""
        now_s = time.perf_counter()
        for connection in list(self._open):
            if connection.lost:
                self._open.discard(connection)
            else:
                connection.expire(now_s)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.close()
        self._open.clear()


def _reason(error: BaseException) -> str:
    """The message of a system error, without addresses."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)[:LONGEST_REASON]
