"""A client that stops reading at the very end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message

from app.gateway.http.event_stream import PING, EventStream, StreamLimits


def answer(state: dict[str, Any]) -> None:
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

    async def scenario() -> None:
        stream = EventStream(events(), lambda error: [b"x" * 2000], lambda: None)
        await asyncio.wait_for(stream({"type": "http", "method": "POST", "state": state}, receive, send), 5)

    asyncio.run(scenario())


@pytest.mark.parametrize("ping_s", [15, 0.01])
def test_a_client_that_does_not_read_the_end_is_cut_off(ping_s: float) -> None:
    aborted: list[bool] = []
    state = {"stream_limits": StreamLimits(ping_s, write_timeout_s=0.05), "abort": lambda: aborted.append(True)}
    answer(state)
    assert aborted == [True]
    assert state["status"] == 499
    assert state["note"] == "cut off: the client took nothing for 0.05 s"


def test_where_no_connection_can_be_dropped_the_answer_fails() -> None:
    state: dict[str, Any] = {"stream_limits": StreamLimits(write_timeout_s=0.05)}
    with pytest.raises(SendTimeoutError):
        answer(state)
    assert state["note"] == "cut off: the client took nothing for 0.05 s"
