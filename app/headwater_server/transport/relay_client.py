"""HTTP client of a single replica's server, vLLM or Triton, to which requests are relayed. Answers are read whole or
piece by piece, with flow control."""

from __future__ import annotations

import asyncio
from typing import Final

from headwater_server.errors import RETRY_AFTER_LOST_S, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.address import TOKEN_HEADER, UNSENT_HEADER, ClientTls, dial, is_local
from headwater_server.transport.http_connection import HttpConnection

__all__ = ["RelayClient", "UpstreamAnswer"]

HIGH_BYTES: Final = 256 * 1024
"""The client stops reading from a connection while more bytes than this have been received and not been read by
`UpstreamAnswer.read`."""
IDLE_S: Final = 2.0
"""Seconds after the end of an answer in which its connection may be reused. vLLM closes a connection after 5 s, which
may coincide with a new request."""
LOST: Final = "the replica ended while it had the request"
"""The message of `ReplicaLost`."""


class RelayClient:
    """Sends requests to the HTTP server of a single replica.

    Args:
        address: where the server listens, or the replica's port in front of it; see
            `headwater_server.transport.address`.
        token: the secret token of the port; not sent to a unix socket.
        tls: the cluster's certificates for mutual TLS; not used for a unix socket.
    """

    def __init__(self, address: str, token: str = "", tls: ClientTls | None = None) -> None:
        self._address = address
        self._tls = tls
        self._headers = "" if is_local(address) else f"{TOKEN_HEADER}: {token}\r\n"
        self._idle: list[UpstreamAnswer] = []
        self._all: set[UpstreamAnswer] = set()
        self._is_closed = False

    async def connect(self) -> UpstreamAnswer:
        """A connection for a single request, unused or new. The caller must release it.

        Raises:
            ReplicaUnreachable: the server, or the port in front of it, can't be reached, or this client is closed.
        """
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            answer = self._idle.pop()
            if now_s - answer.idle_since_s < IDLE_S:
                return answer
            answer.close()
        if not self._is_closed:
            answer = await dial(self._address, lambda: UpstreamAnswer(self._all, self._idle, self._headers), self._tls)
            if not self._is_closed:
                return answer
            answer.close()
        raise ReplicaUnreachable("the replica ended", retry_after_s=RETRY_AFTER_LOST_S)

    async def get(self, path: str) -> bytes:
        """Send a GET request, and return the body of the answer.

        Raises:
            ReplicaLost: the server ended, can't be reached, or answered with another status than 200.
        """
        answer = await self.connect()
        try:
            await answer.send("GET", path)
            body = await answer.whole()
        except BaseException:
            answer.close()
            raise
        answer.release()
        if answer.status != 200:
            raise ReplicaLost(f"{path} was answered with {answer.status}")
        return body

    def close(self) -> None:
        """End all connections. Reads in flight raise `ReplicaLost`, and `connect` raises `ReplicaUnreachable`."""
        self._is_closed = True
        for answer in list(self._all):
            answer.close()


class UpstreamAnswer(HttpConnection):
    """An answer and its connection. Once the answer is complete and closed, the connection, with this object, is reused
    for another answer.

    Args:
        all: all connections of the client.
        idle: the connections that may be reused.
        headers: headers sent with every request, each with its line end.
    """

    def __init__(self, all: set[UpstreamAnswer], idle: list[UpstreamAnswer], headers: str = "") -> None:
        super().__init__()
        self._headers = headers
        self._all = all
        self._idle = idle
        self._size = 0
        self._is_paused = False
        self._is_complete = self._is_unsent = False
        self._waiter: asyncio.Future[None] | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        """The answer's headers, with names in lower case."""
        self.idle_since_s = 0.0
        """Loop time of the last `release` that kept the connection."""

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: str = "", content_type: str = "application/json"
    ) -> None:
        """Send a request, and wait for the answer's status.

        Args:
            method: the HTTP method.
            path: the path of the URL.
            body: the request's body; empty without a body.
            headers: additional headers, each with its line end.
            content_type: the type of the body.

        Raises:
            ReplicaUnreachable: the server didn't get the request.
            ReplicaLost: the server ended before it answered.
        """
        if self.is_lost:
            raise ReplicaUnreachable("the replica ended", retry_after_s=RETRY_AFTER_LOST_S)
        self._is_complete = self._is_unsent = False
        self.headers = []
        length = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: replica\r\n{length}{self._headers}{headers}\r\n"
        self.begin([head.encode(), body])
        while not self.status:
            await self._wait()
        if self._is_unsent:
            raise ReplicaUnreachable(
                f"the replica's port didn't pass the request on: {self.status}", retry_after_s=RETRY_AFTER_LOST_S
            )

    async def read(self) -> bytes:
        """The next bytes of the body, as many as have arrived; empty at its end.

        Raises:
            ReplicaLost: the server ended before the end of the body, or `close` was called.
        """
        while not self._size:
            if self._is_complete:
                return b""
            await self._wait()
        self._size = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return self.take_body()

    async def whole(self) -> bytes:
        """The rest of the body. Raises as `read`."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def release(self) -> None:
        """Release the answer, which must not be read afterwards. The connection of an incomplete answer is ended: vLLM
        then cancels the request."""
        if self.is_lost:
            return
        if not self._is_complete or not self.is_kept:
            self.close()
            return
        self._is_complete = False
        self._size = 0
        self.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(self)

    async def _wait(self) -> None:
        if self.is_lost:
            raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._size > HIGH_BYTES and not self._is_paused and not self.is_lost and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def ended(self, error: Exception | None) -> None:
        self._all.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._is_unsent = self._is_unsent or name == UNSENT_HEADER
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._wake()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._size += len(body)
        self._wake()

    def answered(self) -> None:
        self._is_complete = True
        self._wake()
