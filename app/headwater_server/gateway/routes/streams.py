"""Answers in pieces, which are counted until they are closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from headwater_server.errors import HeadwaterError
from headwater_server.gateway.http.event_stream import EventStream
from headwater_server.gateway.models import Models
from headwater_server.lm.openai_answer import Event

__all__ = ["open_stream"]


async def open_stream(
    models: Models,
    events: AsyncGenerator[Event, None],
    ending: Callable[[HeadwaterError | None], Sequence[Event]],
    on_closed: Callable[[], None] = lambda: None,
) -> EventStream:
    """Open an answer in pieces; `Models.streams` counts it until it is closed. See `EventStream` for the arguments, and
    `EventStream.open` for the errors, after which the stream is closed."""

    def closed() -> None:
        models.streams -= 1
        on_closed()

    models.streams += 1
    stream = EventStream(events, ending, closed)
    try:
        await stream.open()
    except BaseException:
        await stream.close()
        raise
    return stream
