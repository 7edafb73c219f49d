"""A client that stops reading at the very end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from headwater_server.gateway.http.event_stream import PING, EventStream, StreamLimits
from headwater_server.gateway.http.exchange import EXTENSION


class Unwritable:
    """Stands for an `Exchange` whose client takes no piece at once."""

    is_writable = False

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self.aborted = 0

    def watch(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone

    def write(self, piece: bytes) -> bool:
        return False

    def abort(self) -> None:
        """As the real one, whose connection then reports its end."""
        self.aborted += 1
        if self.on_gone is not None:
            self.on_gone()


async def answer(state: dict[str, Any], exchange: Unwritable | None = None) -> None:
    """Answer a request of this state, whose client reads nothing of the events that end the stream."""
    is_full = False

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"1"

    async def send(message: Message) -> None:
        """As a server with flow control: a message waits while the one before it is too large to be buffered."""
        nonlocal is_full
        if is_full:
            if message["body"] == PING:  # keep the event loop until both timeouts have passed
                until_s = asyncio.get_running_loop().time() + 0.1
                while asyncio.get_running_loop().time() < until_s:
                    pass
            await asyncio.Event().wait()
        is_full = len(message.get("body", b"")) > 1000

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    stream = EventStream(events(), lambda error: [b"x" * 2000], lambda: None)
    scope: dict[str, Any] = {"type": "http", "method": "POST", "state": state}
    answering = asyncio.create_task(stream(scope, receive, send))
    if exchange is not None:
        scope["extensions"] = {EXTENSION: exchange}
        exchange.task = answering
    await asyncio.wait_for(answering, 5)


@pytest.mark.parametrize("ping_s", [15, 0.01])
async def test_a_client_that_does_not_read_the_end_is_cut_off(ping_s: float) -> None:
    exchange = Unwritable()
    state: dict[str, Any] = {"stream_limits": StreamLimits(ping_s, write_timeout_s=0.05)}
    await answer(state, exchange)
    assert exchange.aborted
    assert state["status"] == 499
    assert state["note"] == "cut off: the client read no data for 0.05 s"


async def test_where_no_connection_can_be_dropped_the_answer_fails() -> None:
    state: dict[str, Any] = {"stream_limits": StreamLimits(write_timeout_s=0.05)}
    with pytest.raises(TimeoutError):
        await answer(state)
    assert state["note"] == "cut off: the client read no data for 0.05 s"
