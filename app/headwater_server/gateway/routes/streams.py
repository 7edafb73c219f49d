"""Answers in pieces, which are counted until they are closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from headwater_server.errors import ContextTooLong, HeadwaterError
from headwater_server.gateway.http.event_stream import EventStream
from headwater_server.gateway.models import Models
from headwater_server.lm.openai_answer import Event
from headwater_server.lm.responses_answer import ResponsesAnswer
from headwater_server.lm.text_stream import Usage

__all__ = ["open_failed_response", "open_stream"]


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


async def open_failed_response(models: Models, answer: ResponsesAnswer, error: ContextTooLong) -> EventStream:
    """Open the stream of a response whose prompt is too long. It has the events of an answer that begins and fails, as
    OpenAI's has: clients that then shorten their prompt, such as Codex, look for the error in these events only."""

    async def events() -> AsyncGenerator[Event, None]:
        for event in answer.begin():
            yield event
        raise error

    return await open_stream(models, events(), partial(answer.end, Usage(0, 0)))
