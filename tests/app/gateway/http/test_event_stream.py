"""How long a stream waits for a client that doesn't read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.types import Message

from app.gateway.http.event_stream import _WriteWatch

MESSAGE: Message = {"type": "http.response.body", "body": b"x", "more_body": True}


class Clock:
    """Stands for the event loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.due.append((self.now_s + delay_s, callback))
        return cast("asyncio.TimerHandle", self)

    def go(self, until_s: float) -> None:
        """Let time pass."""
        while self.due and self.due[0][0] <= until_s:
            self.now_s, callback = self.due.pop(0)
            callback()
        self.now_s = until_s


class Client:
    """Takes messages when the test lets it."""

    def __init__(self) -> None:
        self.takes: list[asyncio.Future[None]] = []

    async def send(self, message: Message) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.takes.append(future)
        await future


class Stream:
    """A watch of 10 s with a client and a clock."""

    def __init__(self, *, can_abort: bool = True) -> None:
        self.clock, self.client = Clock(), Client()
        self.aborted: list[float] = []
        self.state: dict[str, Any] = {}
        if can_abort:
            self.state["abort"] = lambda: self.aborted.append(self.clock.now_s)
        self.watch = _WriteWatch(self.client.send, 10, self.state)
        self.watch._loop = cast("asyncio.AbstractEventLoop", self.clock)

    async def send(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.watch.send(MESSAGE))
        await asyncio.sleep(0)
        return task

    async def take(self) -> None:
        self.client.takes.pop(0).set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_a_client_that_takes_each_message_in_time_is_left_alone() -> None:
    async def scenario() -> None:
        stream = Stream()
        for turn in range(1, 6):
            await stream.send()
            stream.clock.go(turn * 9.0)
            await stream.take()
        stream.clock.go(1000)  # nothing to send
        assert stream.aborted == []

    asyncio.run(scenario())


def test_one_that_takes_nothing_is_cut_off_then() -> None:
    async def scenario() -> None:
        stream = Stream()
        stream.clock.go(7)
        await stream.send()
        stream.clock.go(30)
        assert stream.aborted == [17]
        assert stream.state["status"] == 499
        assert stream.state["note"] == "cut off: the client took nothing for 10 s"

    asyncio.run(scenario())


def test_a_comment_behind_it_prolongs_nothing() -> None:
    async def scenario() -> None:
        stream = Stream()
        await stream.send()
        stream.clock.go(8)
        await stream.send()
        stream.clock.go(30)
        assert stream.aborted == [10]

    asyncio.run(scenario())


def test_what_follows_has_a_time_of_its_own() -> None:
    async def scenario() -> None:
        stream = Stream()
        await stream.send()
        stream.clock.go(8)
        await stream.send()
        stream.clock.go(9)
        await stream.take()
        stream.clock.go(30)
        assert stream.aborted == [19]

    asyncio.run(scenario())


def test_where_no_connection_can_be_dropped_the_message_fails() -> None:
    async def scenario() -> None:
        stream = Stream(can_abort=False)
        task = await stream.send()
        stream.clock.go(10)
        with pytest.raises(TimeoutError, match="took nothing for 10 s"):
            await task

    asyncio.run(scenario())
