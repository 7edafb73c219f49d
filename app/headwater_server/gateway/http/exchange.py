"""An extension of ASGI: reads a body or writes an answer in a single step, and reports a lost client by a callback.

`headwater_server.gateway.http.bounded_connection.BoundedConnection` puts an `Exchange` into each request's scope.
Without an exchange (under another server, or in tests), code uses ``receive`` and ``send`` instead.
"""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, cast

from starlette.types import Receive, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from headwater_server.errors import ClientGone, HeadwaterError

__all__ = ["EXTENSION", "DisconnectWatch", "Exchange", "LightEvent", "exchange_of"]


EXTENSION: Final = "headwater.exchange"

_JOIN_BYTES: Final = 64 * 1024
"""Up to this size in bytes, joining an answer's pieces costs less than writing each piece."""


class LightEvent(asyncio.Event):
    """An event that creates its queue of waiters on demand; asyncio's event has the queue, of 700 bytes, from the
    start.

    Every connection has an event for its lifetime, and so has every request.
    """

    def __init__(self) -> None:
        self._value = False
        self._waiters: Any = ()

    async def wait(self) -> Literal[True]:
        """See `asyncio.Event`."""
        if not self._value and not self._waiters:
            self._waiters = deque()
        return await super().wait()


class Exchange(RequestResponseCycle):
    """A request and its answer, on their connection: uvicorn's object for both, with faster methods."""

    task: asyncio.Task[None] | None = None
    """The task that runs the application."""
    on_gone: Callable[[], None] | None = None
    """Called when the client leaves before its answer is complete."""
    comment = b""
    """Bytes that clients ignore between two pieces of the answer; empty: the answer has no such bytes."""
    _buffer: io.BytesIO | None = None
    """Body received so far, while `gather_body` waits."""
    _take: Callable[[int, int], None] | None = None
    _fault: HeadwaterError | None = None

    def begin(self) -> None:
        """Put this object into the request's scope; the application starts."""
        cast("dict[str, Any]", self.scope)["extensions"] = {EXTENSION: self}

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` if the client leaves before its answer is complete; at once if it has already left."""
        self.on_gone = on_gone
        if self.disconnected:
            on_gone()
        elif self.flow.read_paused:
            # Reading stopped at 64 KiB of a body, and only a read shows that the connection has ended.
            self.flow.resume_reading()

    def lose(self) -> None:
        """Note that the connection is lost."""
        self.disconnected = True
        self.message_event.set()
        if self.on_gone is not None and not self.response_complete:
            self.on_gone()

    def end(self) -> None:
        """Note that the answer is complete, or the connection lost. Breaks the cycle between this object and the scope,
        so that both are freed."""
        self.task = self.on_gone = None
        self.scope.pop("extensions", None)

    @property
    def is_writable(self) -> bool:
        """Whether the client has read enough of the earlier data for more to be written."""
        return not self.flow.write_paused

    def probe(self) -> None:
        """Send data that a waiting client ignores, and to which the system of a client that has left answers with a
        reset."""
        if not self.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self.comment:
            self.write(self.comment)

    def abort(self) -> None:
        """Drop the connection and the data that the client has not read."""
        self.transport.abort()

    def take_body(self) -> bytes | None:
        """The body; None if a part of it is missing, or the client has left. Returns the body only once: afterwards
        ``receive`` only reports a lost client."""
        if self.more_body or self.disconnected:
            return None
        body = bytes(self.body)
        self.body = bytearray()
        self.message_event.clear()
        return body

    async def gather_body(self, take: Callable[[int, int], None]) -> bytes | None:
        """Wait for the whole body. None: the client has left.

        ``receive`` would stop reading at 64 KiB, wake the application for each piece, and copy each piece twice.

        Args:
            take: called before a piece is stored, with the piece's size and the body's size up to and including the
                piece. An error that it raises ends the wait.
        """
        take(len(self.body), len(self.body))
        self._take, self._fault = take, None
        self._buffer = io.BytesIO()
        self._buffer.write(self.body)
        self.body = bytearray()
        try:
            if self.waiting_for_100_continue and not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self.waiting_for_100_continue = False
            if not self.disconnected:
                self.flow.resume_reading()
            while self.more_body and not self.disconnected and self._fault is None:
                self.message_event.clear()
                await self.message_event.wait()
            body = self._buffer.getvalue()
        finally:
            self._buffer = self._take = None
        if self._fault is not None:
            raise self._fault
        self.message_event.clear()
        return None if self.disconnected else body

    def take_piece(self, piece: bytes) -> None:
        """Store the next piece of the body."""
        if self._buffer is not None and self._take is not None:
            if self._fault is not None:
                return
            try:
                self._take(len(piece), self._buffer.tell() + len(piece))
                self._buffer.write(piece)
            except HeadwaterError as error:
                self._fault = error
                self.message_event.set()
        elif not self.response_complete:
            self.body += piece
            if len(self.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.message_event.set()

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: Sequence[bytes | memoryview]) -> bool:
        """Write a whole answer at once.

        Args:
            status: HTTP status.
            headers: headers without Content-Length.
            body: the body in pieces.

        Returns:
            False: the client has not read the previous answer yet; ``send`` waits for that. True: the answer is
            written, or the client has left.

        Raises:
            RuntimeError: a header has a line end in it.
        """
        if self.flow.write_paused:
            return False
        if self.disconnected:
            return True
        length = sum(map(len, body))
        pieces: list[bytes | memoryview] = [STATUS_LINE[status]]
        lines = 2
        for name, value in (*self.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
            lines += 1
        if self.keep_alive:
            pieces.append(b"content-length: %d\r\n\r\n" % length)
        else:
            pieces.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % length)
            lines += 1
        lines += 1
        head = b"".join(pieces)
        # A line end inside a value would start another header.
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise RuntimeError("an answer's headers: expected no line ends in them")
        if length <= _JOIN_BYTES:
            self.transport.write(b"".join((head, *body)))
        else:
            self.transport.writelines([head, *body])
        self.waiting_for_100_continue = False
        self.response_started = self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
        return True

    def write(self, piece: bytes) -> bool:
        """Write a piece of an answer that ``send`` has begun.

        Returns:
            False: the client has not read the previous pieces yet (``send`` waits for that), or the answer isn't
            chunked or is complete. True: the piece is written, or the client has left.
        """
        if self.flow.write_paused or not self.chunked_encoding or self.response_complete:
            return False
        if not self.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True


def exchange_of(scope: Mapping[str, Any]) -> Exchange | None:
    """The exchange of a request; None under another server."""
    extensions = scope.get("extensions")
    exchange: Exchange | None = extensions.get(EXTENSION) if extensions else None
    return exchange


WATCH_AFTER_S: Final = 0.02
"""Seconds before a task waits in ``receive``, where there is no exchange: most answers are ready sooner."""


class DisconnectWatch:
    """A context whose body is cancelled when the client goes away; then the context raises `ClientGone`.

    The request's task must enter the context after the body has been read: from then on ``receive`` only reports a lost
    client.
    """

    __slots__ = ("_exchange", "_is_gone", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._exchange = exchange_of(scope)
        self._receive = receive
        self._is_gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._task = exchange.task
            exchange.watch(self._leave)
            return
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange.on_gone = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._is_gone and kind is asyncio.CancelledError:
            raise ClientGone("the client went away before its answer") from None

    def _start(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._is_gone = True
        if self._task is not None:
            self._task.cancel()
