"""An answer as server-sent events: an ASGI response over a stream of events.

Source: the HTML standard's section on server-sent events. A stream may be idle for hours, so every object is made only
when it is needed: an idle stream has only its request's task and a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, NamedTuple

import anyio
from sse_starlette import ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from headwater_server.errors import ClientGone, HeadwaterError
from headwater_server.gateway.http.exchange import DisconnectWatch, exchange_of
from headwater_server.gateway.http.replies import internal_error
from headwater_server.lm.openai_answer import Event
from headwater_server.telemetry.recorder import note_error

__all__ = ["EventStream", "StreamLimits"]

FIRST_EVENT_TIMEOUT_S = 0.25
"""Seconds that the status line waits for the first event, so that an early failure is answered with its true status."""


class StreamLimits(NamedTuple):
    """The limits of a server's streams; `headwater_server.gateway.http.entry.RequestRecords` puts them into a request's
    state."""

    ping_s: float = 15
    """Seconds between keep-alive comments."""
    write_timeout_s: float = 30
    """Seconds that an event may wait for a client that does not read."""


PING: Final = b": ping\n"
"""A comment of a single line: if an empty line followed, some clients would see an empty event."""


_START: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # else nginx would buffer events
    ),
}


class _StreamClient:
    """The client of a stream: pieces of the answer are sent to it, and comments in between.

    Args:
        scope, send: ASGI arguments of the request.
    """

    __slots__ = ("_comment", "_exchange", "_limits", "_send", "_state")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._exchange = exchange_of(scope)
        self._send = send
        self._state: dict[str, Any] = scope["state"]
        self._limits: StreamLimits = self._state.get("stream_limits", StreamLimits())
        self._comment: asyncio.TimerHandle | asyncio.Task[None] | None = None
        """The timer of the next comment, or the task that sends a comment to a client that is not reading now."""

    async def begin(self) -> None:
        """Send the response's head, and start the comments. Raises the same error as `send`."""
        await self._send_in_time({**_START})
        if self._exchange is not None:
            self._exchange.comment = PING
        self._comment_later()

    def takes(self, piece: bytes) -> bool:
        """Write a piece if the client has capacity for it. Returns False if the piece must be sent by `send`."""
        return self._exchange is not None and self._exchange.write(piece)

    async def send(self, piece: bytes) -> None:
        """Send a piece.

        Raises:
            TimeoutError: the client read nothing for too long.
        """
        await self._send_in_time({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """End the response. Raises the same error as `send`."""
        self.close()
        await self._send_in_time({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Send no more comments."""
        if self._comment is not None:
            self._comment.cancel()

    def cut_off(self) -> bool:
        """Drop the connection. Closing it in order would wait for the client, too.

        Returns:
            Whether it could be dropped; under another server than Headwater's it can't.
        """
        self._state["status"] = ClientGone.status
        self._state["note"] = f"cut off: the client read no data for {self._limits.write_timeout_s:g} s"
        if self._exchange is not None:
            self._exchange.abort()
        return self._exchange is not None

    async def _send_in_time(self, message: Message) -> None:
        if self._exchange is not None and self._exchange.is_writable:  # then nothing waits for the client
            await self._send(message)
            return
        with anyio.fail_after(self._limits.write_timeout_s):
            await self._send(message)

    def _comment_later(self) -> None:
        self._comment = asyncio.get_running_loop().call_later(self._limits.ping_s, self._comment_now)

    def _comment_now(self) -> None:
        if self.takes(PING):
            self._comment_later()
        else:
            self._comment = asyncio.get_running_loop().create_task(self._comment_in_time())

    async def _comment_in_time(self) -> None:
        try:
            await self.send(PING)
        except TimeoutError:
            self.cut_off()
        else:
            self._comment_later()


class EventStream:
    """A response whose events are computed while it is sent.

    However the response ends, the generator of events is closed.

    Args:
        events: the events to send. An error from the generator ends the stream.
        ending: makes the last events of the stream, given the error, or None if there was no error.
        on_closed: called once, after the generator has been closed.
    """

    __slots__ = ("_ending", "_events", "_first", "_has_ended", "_on_closed")

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        ending: Callable[[HeadwaterError | None], Sequence[Event]],
        on_closed: Callable[[], None],
    ) -> None:
        self._events = events
        self._ending = ending
        self._on_closed: Callable[[], None] | None = on_closed
        self._first: asyncio.Task[Event | None] | None = None
        """Task that computes the first event, until the event is sent."""
        self._has_ended = False

    async def open(self) -> None:
        """Wait for the first event, at most `FIRST_EVENT_TIMEOUT_S`.

        Raises:
            Exception: an error that the generator raised in that time, before the first event. The caller must `close`
                the stream.
        """
        self._first = first = asyncio.get_running_loop().create_task(self._compute())
        await asyncio.wait([first], timeout=FIRST_EVENT_TIMEOUT_S)
        if first.done() and (error := first.exception()) is not None:
            raise error

    async def close(self) -> None:
        """Close the generator of events; may be called more than once."""
        on_closed, self._on_closed = self._on_closed, None
        first, self._first = self._first, None
        try:
            if first is not None:
                if first.cancel():  # wait only if needed: a cancellation here would leave the generator open
                    await asyncio.wait([first])
                if not first.cancelled():
                    first.exception()  # no other code reads the exception
            await self._events.aclose()
        finally:
            if on_closed is not None:
                on_closed()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        state: dict[str, Any] = scope["state"]
        state.setdefault("note", "streamed")
        client = _StreamClient(scope, send)
        try:
            with DisconnectWatch(scope, receive):
                await client.begin()
                while frame := await self._next_frame(state):
                    if not client.takes(frame):
                        await client.send(frame)
                    del frame  # the next event may take long
                await client.end()
        except ClientGone:
            pass  # the client has left, so the rest isn't sent
        except TimeoutError:
            if not client.cut_off():
                raise
        finally:
            client.close()
            await self.close()

    async def _next_frame(self, state: dict[str, Any]) -> bytes:
        """The next event, encoded; then all events that end the stream together; then empty."""
        if self._has_ended:
            return b""
        error: HeadwaterError | None = None
        try:
            event = await (anext(self._events, None) if self._first is None else self._first)
            self._first = None
            if event is not None:
                return _frame(event)
        except HeadwaterError as raised:
            error = raised
        except Exception as raised:
            error = internal_error(state, raised)
        self._has_ended = True
        if error is not None:
            note_error(state, error)
            # The error's traceback references this frame, and this frame the error: break this cycle.
            state["error"] = error.with_traceback(None)
        return b"".join(map(_frame, self._ending(error)))

    async def _compute(self) -> Event | None:
        return await anext(self._events, None)


def _frame(event: Event) -> bytes:
    if isinstance(event, tuple):
        name, data = event
        return ServerSentEvent(data.decode(), event=name.decode(), sep="\n").encode()
    return b"data: %b\n\n" % event
