"""An extension of ASGI: reads a body and writes an answer in one step each, and reports a lost client by a callback.

`app.gateway.http.connection.BoundedConnection` puts an `Exchange` into each request's scope. Code that finds none
(under another server, or in tests) uses ``receive`` and ``send`` instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, cast

from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from app.errors import ClientGone

__all__ = ["EXTENSION", "DisconnectWatch", "Exchange", "LightEvent", "exchange_of"]


EXTENSION: Final = "headwater.exchange"

_JOIN_BYTES: Final = 64 * 1024
"""Up to this size, joining an answer's pieces costs less than writing each."""


class LightEvent(asyncio.Event):
    """An event without waiters yet: asyncio's has a queue for them from the start, of 700 bytes.

    Every connection has one for its lifetime, and every request one.
    """

    def __init__(self) -> None:
        self._value = False
        self._waiters: Any = ()

    async def wait(self) -> Literal[True]:
        """See `asyncio.Event`."""
        if not self._value and not self._waiters:
            self._waiters = deque()
        return await super().wait()


class Exchange:
    """A request and its answer, on their connection.

    Args:
        cycle: uvicorn's object for the same request and answer.
    """

    __slots__ = ("_cycle", "_pieces", "on_gone", "task")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        cast("dict[str, Any]", cycle.scope)["extensions"] = {EXTENSION: self}
        self.task: asyncio.Task[None] | None = None
        """Runs the application."""
        self.on_gone: Callable[[], None] | None = None
        """Called when the client leaves before its answer is complete."""
        self._pieces: list[bytes] | None = None

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` when the client leaves before its answer is complete; at once if it has left."""
        self.on_gone = on_gone
        if self._cycle.disconnected:
            on_gone()
        else:
            # uvicorn stops reading at 64 KiB of a body, and only a read shows that the connection has ended.
            self._cycle.flow.resume_reading()

    def lose(self) -> None:
        """The connection is lost."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self.on_gone is not None and not self._cycle.response_complete:
            self.on_gone()

    def end(self) -> None:
        """The answer is complete. Breaks the cycle between this object and the scope, so that both are freed."""
        self.task = self.on_gone = None
        self._cycle.scope.pop("extensions", None)

    @property
    def is_writable(self) -> bool:
        """Whether the client has read enough of what was written for more."""
        return not self._cycle.flow.write_paused

    def abort(self) -> None:
        """Drop the connection, and with it what the client has not read."""
        self._cycle.transport.abort()

    def take_body(self) -> bytes | None:
        """The body, if all of it has arrived. May be called once: afterwards ``receive`` only reports a lost client."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        return body

    async def gather_body(self) -> bytes | None:
        """Wait for the whole body, whose length must have been checked. None: the client has gone.

        ``receive`` would stop reading at 64 KiB, wake the application for each piece, and copy it twice.
        """
        cycle = self._cycle
        pieces = self._pieces = [bytes(cycle.body)]
        cycle.body = bytearray()
        try:
            if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
                cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                cycle.waiting_for_100_continue = False
            if not cycle.disconnected:
                cycle.flow.resume_reading()
            while cycle.more_body and not cycle.disconnected:
                cycle.message_event.clear()
                await cycle.message_event.wait()
        finally:
            self._pieces = None
        cycle.message_event.clear()
        return None if cycle.disconnected else b"".join(pieces)

    def takes_piece(self, piece: bytes) -> bool:
        """Take the next piece of the body if `gather_body` waits for it. Returns whether it was taken."""
        if self._pieces is None or not self._cycle.more_body:  # the piece may belong to the next request
            return False
        self._pieces.append(piece)
        return True

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: Sequence[bytes | memoryview]) -> bool:
        """Write a whole answer at once.

        Args:
            status: of the answer.
            headers: without Content-Length.
            body: in pieces.

        Returns:
            False: the client has not read the previous answer yet; ``send`` waits for that.
        """
        cycle = self._cycle
        if cycle.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        length = sum(map(len, body))
        pieces: list[bytes | memoryview] = [STATUS_LINE[status]]
        lines = 2
        for name, value in (*cycle.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
            lines += 1
        if cycle.keep_alive:
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
            cycle.transport.write(b"".join((head, *body)))
        else:
            cycle.transport.writelines([head, *body])
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def write(self, piece: bytes) -> bool:
        """Write a piece of an answer that ``send`` has begun.

        Returns:
            False: the client has not read the previous pieces yet; ``send`` waits for that.
        """
        cycle = self._cycle
        if cycle.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True


def exchange_of(scope: Mapping[str, Any]) -> Exchange | None:
    """The exchange of a request; None under another server."""
    extensions = scope.get("extensions")
    found: Exchange | None = extensions.get(EXTENSION) if extensions else None
    return found


WATCH_AFTER_S: Final = 0.02
"""Delay before a task waits in ``receive``, where there is no exchange: most answers are ready sooner."""


class DisconnectWatch:
    """A context whose body is cancelled when the client goes away; `ClientGone` comes out of it then.

    The request's own task must enter it, after the body has been read: from then on ``receive`` only reports the loss.
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
