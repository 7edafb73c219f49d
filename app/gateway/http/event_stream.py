"""An answer as server-sent events: an ASGI response over a stream of JSON texts.

Source: the HTML standard's section on server-sent events. The response is sse-starlette's; on a connection of ours
(`app.gateway.http.exchange`) its headers only, because what it has three tasks more for, our connection and a timer do:
they took half of the memory of a stream on which nothing happens. For the same reason nothing here is made before it is
needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from app.dispatch.deadlines import TIMER_RESOLUTION_S
from app.errors import CallableFailed, ClientGone, HeadwaterError
from app.gateway.http.exchange import DisconnectWatch, Exchange, exchange_of
from app.telemetry.recorder import note_error

__all__ = ["EventStream", "StreamLimits"]

logger = logging.getLogger("headwater")

FIRST_EVENT_TIMEOUT_S = 0.25
"""How long the status line waits for the first event, so that an early failure has its true status."""


class StreamLimits(NamedTuple):
    """What holds for every stream of a server; `app.gateway.http.entry.RequestRecords` puts it into the request's
    state."""

    ping_s: float = 15
    """Between keep-alive comments."""
    write_timeout_s: float = 30
    """How long one event may wait for a client that doesn't read."""


PING: Final = b": ping\n"
"""A comment of one line: with an empty line after it, some clients would see an empty event."""


class _Ping(ServerSentEvent):
    def encode(self) -> bytes:
        return PING


class _WriteWatch:
    """Cuts a client off that takes nothing for too long.

    One timer in that time at most: one an event would cost a tenth of it. None while nothing is sent.

    Args:
        send: of the response.
        limit_s: how long one message may take.
        state: of the request; its ``abort`` drops the connection, with what it still has to send: closing it in order
            would wait for the client, too.
    """

    __slots__ = ("_is_late", "_limit_s", "_loop", "_send", "_sending", "_since_s", "_state", "_task", "_timer")

    def __init__(self, send: Send, limit_s: float, state: dict[str, Any]) -> None:
        self._send = send
        self._limit_s = limit_s
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._sending = 0
        """Messages: an event, and perhaps a comment behind it."""
        self._since_s = 0.0
        """When the first of them began to be sent."""
        self._task: asyncio.Task[Any] | None = None
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            TimeoutError: it took too long, on a server whose connections can't be dropped.
        """
        if not self._sending:
            self._since_s, self._task = self._loop.time(), asyncio.current_task()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._look)
        self._sending += 1
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_late:
                raise TimeoutError(self._state["note"]) from None
            raise
        finally:
            self._sending -= 1
            if self._sending:
                self._since_s = self._loop.time()

    def close(self) -> None:
        """The response is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._sending:  # the next message makes another
            return
        left_s = self._since_s + self._limit_s - self._loop.time()
        if left_s > TIMER_RESOLUTION_S:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._state["status"] = ClientGone.status
        self._state["note"] = f"cut off: the client took nothing for {self._limit_s:g} s"
        abort = self._state.get("abort")
        if abort is not None:
            abort()  # which `receive` reports like a client that went away
        elif self._task is not None:
            self._is_late = True
            self._task.cancel()


class EventStream:
    """A response whose events are computed while it is sent.

    However the response ends, what computes the events is closed.

    Args:
        events: JSON texts. Whatever it raises ends the stream.
        ending: the events that end the stream, after an error or (None) without one.
        on_closed: called once, when the last event is written or the stream is left.
    """

    __slots__ = ("_ending", "_events", "_first", "_has_ended", "_on_closed", "_ping", "_pinging")

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ending: Callable[[HeadwaterError | None], Sequence[bytes]],
        on_closed: Callable[[], None],
    ) -> None:
        self._events = events
        self._ending = ending
        self._on_closed: Callable[[], None] | None = on_closed
        self._first: asyncio.Task[bytes | None] | None = None
        """Computes the first event, until that is read."""
        self._has_ended = False
        self._ping: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        """Sends a comment to a client that reads nothing just now."""

    async def open(self) -> None:
        """Wait for the first event, but not long.

        Raises:
            Exception: what the events raised, if that came first.
        """
        self._first = first = asyncio.get_running_loop().create_task(self._compute())
        await asyncio.wait([first], timeout=FIRST_EVENT_TIMEOUT_S)
        if first.done() and (error := first.exception()) is not None:
            raise error

    async def close(self) -> None:
        """End what computes the events; may be called more than once."""
        on_closed, self._on_closed = self._on_closed, None
        first, self._first = self._first, None
        try:
            if first is not None:
                if first.cancel():  # otherwise nothing is waited for: whoever is cancelled here would leave events open
                    await asyncio.wait([first])
                if not first.cancelled():
                    first.exception()  # nobody else reads it
            await self._events.aclose()
        finally:
            if on_closed is not None:
                on_closed()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        state: dict[str, Any] = scope["state"]
        state.setdefault("note", "streamed")
        limits: StreamLimits = state.get("stream_limits", StreamLimits())
        exchange = exchange_of(scope)

        watch = _WriteWatch(send, limits.write_timeout_s, state)
        try:
            if exchange is None:
                response = _response(self._frames(state), limits.ping_s)
                await response(scope, receive, watch.send)
            else:
                with contextlib.suppress(ClientGone), DisconnectWatch(scope, receive):
                    # Before it there is only what the connection itself watches: an answer that is complete.
                    await send({"type": "http.response.start", "status": 200, "headers": _headers()})
                    self._ping_later(exchange, watch, limits.ping_s)
                    await self._write(exchange, watch, state)
        finally:
            for one in (self._ping, self._pinging):
                if one is not None:
                    one.cancel()
            watch.close()
            await self.close()

    async def _write(self, exchange: Exchange, watch: _WriteWatch, state: dict[str, Any]) -> None:
        while frame := await self._next_frame(state):
            if not exchange.write_piece(frame):
                await watch.send(_body(frame))
            del frame  # the next one may be long in coming
        if self._ping is not None:
            self._ping.cancel()  # behind the end there must be none
        await watch.send(_body(b"", more=False))

    async def _frames(self, state: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        while frame := await self._next_frame(state):
            yield frame

    def _ping_later(self, exchange: Exchange, watch: _WriteWatch, every_s: float) -> None:
        self._ping = asyncio.get_running_loop().call_later(every_s, self._write_ping, exchange, watch, every_s)

    def _write_ping(self, exchange: Exchange, watch: _WriteWatch, every_s: float) -> None:
        if not exchange.write_piece(PING) and (self._pinging is None or self._pinging.done()):
            self._pinging = asyncio.get_running_loop().create_task(watch.send(_body(PING)))
        self._ping_later(exchange, watch, every_s)

    async def _compute(self) -> bytes | None:
        return await anext(self._events, None)

    async def _next_frame(self, state: dict[str, Any]) -> bytes:
        """The next event, or those that end the stream, as it is sent; empty behind them."""
        if self._has_ended:
            return b""
        error: Exception | None = None
        try:
            if self._first is None:
                event = await anext(self._events, None)
            else:
                event = await self._first
                self._first = None
        except Exception as raised:
            error = raised
        else:
            if event is not None:
                return _frame(event)
        self._has_ended = True
        if error is not None and not isinstance(error, HeadwaterError):
            logger.error(
                "request %s failed in the gateway", state["request_id"],
                exc_info=error, extra={"request_id": state["request_id"]},
            )  # fmt: skip
            error = CallableFailed(f"internal error; the log has more under request id {state['request_id']}")
        if error is not None:
            note_error(state, error)
            state["error"] = error.with_traceback(None)  # which knows this frame, and this frame the error
        return b"".join(map(_frame, self._ending(error)))


def _response(frames: AsyncIterable[bytes], ping_s: float) -> EventSourceResponse:
    response = EventSourceResponse(frames, ping=ping_s, sep="\n", ping_message_factory=_Ping)
    del response.headers["connection"]  # the server's own business
    return response


@functools.cache
def _headers() -> tuple[tuple[bytes, bytes], ...]:
    return tuple(_response(_nothing(), 0).raw_headers)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


def _body(piece: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event
