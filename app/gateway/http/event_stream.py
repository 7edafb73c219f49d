"""An answer as server-sent events: an ASGI response over a stream of events.

Source: the HTML standard's section on server-sent events. sse-starlette sends the response with its keep-alive
comments, and notices a client that goes away or stops reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from app.errors import ClientGone, HeadwaterError
from app.gateway.http.exchange import Exchange, exchange_of
from app.gateway.http.replies import internal_error
from app.lm.answers import Event
from app.telemetry.recorder import note_error

__all__ = ["EventStream", "StreamLimits"]

FIRST_EVENT_TIMEOUT_S = 0.25
"""How long the status line waits for the first event, so that an early failure has its true status."""


class StreamLimits(NamedTuple):
    """The limits of a server's streams; `app.gateway.http.entry.RequestRecords` puts them into a request's state."""

    ping_s: float = 15
    """Between keep-alive comments."""
    write_timeout_s: float = 30
    """How long one event may wait for a client that does not read."""


PING: Final = b": ping\n"
"""A comment of one line: with an empty line after it, some clients would see an empty event."""


class _Ping(ServerSentEvent):
    def encode(self) -> bytes:
        return PING


class EventStream:
    """A response whose events are computed while it is sent.

    However the response ends, what computes the events is closed.

    Args:
        events: what is sent. Whatever it raises ends the stream.
        ending: the events that end the stream, after an error or (None) without one.
        on_closed: called once, when the last event is written or the stream is left.
    """

    __slots__ = ("_ending", "_events", "_first", "_on_closed")

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
        """Computes the first event, until that is sent."""

    async def open(self) -> None:
        """Wait for the first event, at most `FIRST_EVENT_TIMEOUT_S`.

        Raises:
            Exception: what the events raised before the first one.
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
                if first.cancel():  # wait only if need be: a caller cancelled here would leave events open
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
        response = EventSourceResponse(
            self._frames(state, exchange_of(scope)),
            ping=limits.ping_s,
            sep="\n",
            ping_message_factory=_Ping,
            send_timeout=limits.write_timeout_s,
        )
        del response.headers["connection"]  # set by the server
        try:
            await response(scope, receive, send)
        except Exception as error:
            # An event and a ping that time out at once come as an ExceptionGroup, which Python 3.10 doesn't have.
            if not all(isinstance(one, SendTimeoutError) for one in getattr(error, "exceptions", (error,))):
                raise
            state["status"] = ClientGone.status
            state["note"] = f"cut off: the client took nothing for {limits.write_timeout_s:g} s"
            if "abort" not in state:  # another server than ours
                raise
            state["abort"]()  # closing the connection in order would wait for the client, too
        finally:
            await self.close()

    async def _frames(self, state: dict[str, Any], exchange: Exchange | None) -> AsyncGenerator[bytes, None]:
        error: HeadwaterError | None = None
        try:
            event = await (self._compute() if self._first is None else self._first)
            self._first = None
            while event is not None:
                frame = _frame(event)
                # What the client has room for needs none of sse-starlette's timers, which cost as much as the write.
                if exchange is None or not exchange.write(frame):
                    yield frame
                del event, frame  # the next one may be long in coming
                event = await anext(self._events, None)
        except HeadwaterError as raised:
            error = raised
        except Exception as raised:
            error = internal_error(state, raised)
        if error is not None:
            note_error(state, error)
            # The error's traceback references this frame, and this frame the error: break the cycle.
            state["error"] = error.with_traceback(None)
        yield b"".join(map(_frame, self._ending(error)))
        # sse-starlette bounds how long a piece may wait for the client, but not the end of the response behind it.
        yield b""

    async def _compute(self) -> Event | None:
        return await anext(self._events, None)


def _frame(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % event if isinstance(event, tuple) else b"data: %b\n\n" % event
