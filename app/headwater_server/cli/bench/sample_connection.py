"""Connections of bench to a server, whose answers become samples."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import httptools

from headwater_server.cli.bench.sample_reader import (
    LONGEST_REASON,
    Fault,
    Sample,
    TokenReader,
    answer_fault,
    failed_status,
)
from headwater_server.cli.server_client import CONNECT_TIMEOUT_S, tls_context
from headwater_server.transport.http_connection import HttpConnection

__all__ = ["ConnectFailed", "Connection", "Dialler"]


class ConnectFailed(Exception):
    """No connection could be made."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.fault = Fault("connect", None, reason)


class Connection(HttpConnection):
    """A connection whose answers become samples."""

    def __init__(self) -> None:
        super().__init__()
        self._waiter: asyncio.Future[Sample] | None = None
        self._reader: TokenReader | None = None
        self._json_length: int | None = None
        self._sent_s = 0.0
        self._now_s = 0.0
        self._expires_s = 0.0
        self.idle_since_s = 0.0
        """When the last request ended, by `time.perf_counter`; 0 before the first."""

    def ask(self, request: bytes, mode: str, expires_s: float) -> asyncio.Future[Sample]:
        """Send a request; the connection must not be lost, and no other request may be pending.

        Args:
            request: the whole HTTP request, encoded.
            mode: a key of `headwater_server.cli.bench.job.PATHS`.
            expires_s: the time of `time.perf_counter` from which `expire` fails the request.

        Returns:
            A future that resolves to a sample, with the answer's times or the fault.
        """
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self._reader = None if mode == "infer" else TokenReader(mode)
        self._json_length = None
        self._expires_s = expires_s
        self._sent_s = time.perf_counter()
        self.begin([request])
        return waiter

    def expire(self, now_s: float) -> None:
        """If the pending request has expired, fail it and close the connection."""
        if self._waiter is not None and now_s > self._expires_s:
            self._fail("timeout", "no whole answer in time")
            self.close()

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 31 and name.lower() == b"inference-header-content-length" and value.isdigit():
            self._json_length = int(value)

    def on_body(self, body: bytes) -> None:
        if self._reader is not None and self.status == 200:
            self._reader.feed(body, self._now_s)
        else:
            super().on_body(body)

    def answered(self) -> None:
        body = self.take_body()
        if self.status != 200:
            fault: Fault | None = failed_status(self.status, body)
        else:
            fault = answer_fault(body, self._json_length) if self._reader is None else self._reader.end()
        self._settle(Sample(fault, self._sent_s, self._now_s, self._reader))
        if not self.is_kept:
            self.close()

    def ended(self, error: Exception | None) -> None:
        if isinstance(error, httptools.HttpParserError):
            self._fail("bad answer", f"not HTTP: {error}"[:LONGEST_REASON])
        elif self._waiter is not None and self._reader is not None and self._reader.is_done:
            self.answered()  # some servers end their streams by disconnecting
        else:
            self._fail("reset", _reason(error) if error else "the connection ended before the answer did")

    def _fail(self, kind: str, reason: str) -> None:
        self._settle(Sample(Fault(kind, None, reason), self._sent_s))

    def _settle(self, sample: Sample) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self.idle_since_s = self._now_s
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
            if connection.is_lost:
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
