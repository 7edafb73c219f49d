"""An answer as server-sent events: an ASGI response over a stream of JSON texts.

Source: the HTML standard's section on server-sent events; the connection's own tasks (keep-alive, noticing that the
client went away) are sse-starlette's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from app.errors import CallableFailed, ClientGone, HeadwaterError

__all__ = ["EventStream", "StreamLimits"]

logger = logging.getLogger("headwater")

FIRST_EVENT_TIMEOUT_S = 0.25
"""How long the status line waits for the first event, so that an early failure has its true status."""


class StreamLimits(NamedTuple):
    """What holds for every stream of a server; `app.middleware.RequestContext` puts it into the request's state."""

    ping_s: float = 15
    """Between keep-alive comments."""
    write_timeout_s: float = 30
    """How long one event may wait for a client that doesn't read."""


class _Ping(ServerSentEvent):
    """A comment of one line: with an empty line after it, some clients would see an empty event."""

    def encode(self) -> bytes:
        return b": ping\n"


class _End:
    """What the reading task leaves behind the last event."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


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
        self._ahead: asyncio.Queue[bytes | _End] = asyncio.Queue(1)
        self._first: list[bytes | _End] = []
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

        async def send_in_time(message: Message) -> None:
            with anyio.move_on_after(limits.write_timeout_s) as waiting:
                await send(message)
            if waiting.cancelled_caught:
                state["status"] = ClientGone.status
                state["note"] = f"cut off: the client took nothing for {limits.write_timeout_s:g} s"
                _cut_off(state)

        response = EventSourceResponse(
            self._frames(state),
            ping=limits.ping_s,
            sep="\n",
            ping_message_factory=_Ping,
        )
        del response.headers["connection"]  # the server's own business
        try:
            await response(scope, receive, send_in_time)
        finally:
            await self.close()

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

    async def _frames(self, state: dict[str, Any]) -> AsyncIterator[bytes]:
        while True:
            event = self._first.pop() if self._first else await self._ahead.get()
            if isinstance(event, _End):
                break
            yield _frame(event)
        error = event.error
        if error is not None and not isinstance(error, HeadwaterError):
            logger.error("request %s failed in the gateway", state["request_id"], exc_info=error)
            error = CallableFailed(f"internal error; the log has more under request id {state['request_id']}")
        if error is not None:
            state["note"] = error.message[:200]
        for event in self._ending(error):
            yield _frame(event)


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event


def _cut_off(state: dict[str, Any]) -> None:
    """Drop the connection, with what it still has to send: closing it in order would wait for the client, too."""
    abort = state.get("abort")
    if abort is None:
        raise TimeoutError(state["note"])
    abort()  # which `receive` reports like a client that went away
