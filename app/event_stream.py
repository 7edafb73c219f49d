"""An answer as server-sent events: an ASGI response over a stream of JSON texts.

Source: the HTML standard's section on server-sent events. The response is sse-starlette's; on a connection of ours
(`app.exchange`) its headers only, because what it has three tasks more for, our connection and a timer do: they took
half of the memory of a stream on which nothing happens.
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

from app.deadlines import TIMER_RESOLUTION_S
from app.disconnects import DisconnectWatch
from app.errors import CallableFailed, ClientGone, HeadwaterError
from app.exchange import exchange_of
from app.metrics.accounting import note_error

__all__ = ["EventStream", "StreamLimits"]

logger = logging.getLogger("headwater")

FIRST_EVENT_TIMEOUT_S = 0.25
"""How long the status line waits for the first event, so that an early failure has its true status."""


class StreamLimits(NamedTuple):
    """What holds for every stream of a server; `app.middleware.RequestRecords` puts it into the request's state."""

    ping_s: float = 15
    """Between keep-alive comments."""
    write_timeout_s: float = 30
    """How long one event may wait for a client that doesn't read."""


PING: Final = b": ping\n"
"""A comment of one line: with an empty line after it, some clients would see an empty event."""


class _Ping(ServerSentEvent):
    def encode(self) -> bytes:
        return PING


class _End:
    """What the reading task leaves behind the last event."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class _WriteWatch:
    """Cuts a client off that takes nothing for too long. One timer a stream: one an event would cost a tenth of it.

    Args:
        send: of the response.
        limit_s: how long one message may take.
        state: of the request; its ``abort`` drops the connection, with what it still has to send: closing it in order
            would wait for the client, too.
    """

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
        self._timer = self._loop.call_later(limit_s, self._look)

    async def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            TimeoutError: it took too long, on a server whose connections can't be dropped.
        """
        if not self._sending:
            self._since_s, self._task = self._loop.time(), asyncio.current_task()
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
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._limit_s
        if self._sending:
            left_s += self._since_s - self._loop.time()
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

    One task reads the events, one ahead of the client; however the response ends, that task is cancelled, and with it
    what computes them.

    Args:
        events: JSON texts. Whatever it raises ends the stream.
        ending: the events that end the stream, after an error or (None) without one.
        on_closed: called once, when the last event is written or the stream is left.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ending: Callable[[HeadwaterError | None], Sequence[bytes]],
        on_closed: Callable[[], None],
    ) -> None:
        self._events = events
        self._ending = ending
        self._on_closed: Callable[[], None] | None = on_closed
        self._ahead: asyncio.Queue[bytes | _End | None] = asyncio.Queue(1)
        """None stands for a comment that keeps the connection alive."""
        self._first: list[bytes | _End | None] = []
        self._ping: asyncio.TimerHandle | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def open(self) -> None:
        """Wait for the first event, but not long.

        Raises:
            Exception: what the events raised, if that came first.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            self._first.append(await asyncio.wait_for(self._ahead.get(), FIRST_EVENT_TIMEOUT_S))
        if self._first and isinstance(self._first[0], _End) and self._first[0].error is not None:
            raise self._first[0].error

    async def close(self) -> None:
        """End what computes the events; may be called more than once."""
        on_closed, self._on_closed = self._on_closed, None
        try:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        finally:
            if on_closed is not None:
                on_closed()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        state: dict[str, Any] = scope["state"]
        state.setdefault("note", "streamed")
        limits: StreamLimits = state.get("stream_limits", StreamLimits())

        watch = _WriteWatch(send, limits.write_timeout_s, state)
        try:
            if exchange_of(scope) is None:
                response = _response(self._frames(state), limits.ping_s)
                await response(scope, receive, watch.send)
            else:
                self._ping_later(limits.ping_s)
                with contextlib.suppress(ClientGone), DisconnectWatch(scope, receive):
                    await self._write(state, watch.send)
        finally:
            if self._ping is not None:
                self._ping.cancel()
            watch.close()
            await self.close()

    async def _write(self, state: dict[str, Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _headers()})
        async with contextlib.aclosing(self._frames(state)) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _ping_later(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()

        def ping() -> None:
            if self._ahead.empty():  # otherwise there is an event to write
                self._ahead.put_nowait(None)
            self._ping = loop.call_later(every_s, ping)

        self._ping = loop.call_later(every_s, ping)

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    await self._ahead.put(event)
        except Exception as raised:  # told to whoever reads the events
            error = raised
        if self._on_closed is not None:  # otherwise nobody does
            await self._ahead.put(_End(error))

    async def _frames(self, state: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        while True:
            event = self._first.pop() if self._first else await self._ahead.get()
            if isinstance(event, _End):
                break
            yield PING if event is None else _frame(event)
        error = event.error
        if error is not None and not isinstance(error, HeadwaterError):
            logger.error(
                "request %s failed in the gateway", state["request_id"],
                exc_info=error, extra={"request_id": state["request_id"]},
            )  # fmt: skip
            error = CallableFailed(f"internal error; the log has more under request id {state['request_id']}")
        if error is not None:
            note_error(state, error)
            state["error"] = error
        for event in self._ending(error):
            yield _frame(event)


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


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event
