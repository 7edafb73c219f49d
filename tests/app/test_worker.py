"""A gateway worker's process, and what it does beside answering."""

from __future__ import annotations

import asyncio
import logging

import pytest

from app.worker import serve_beside


def test_a_background_task_that_fails_is_logged_and_ends_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[str] = []

    async def fails() -> None:
        raise ValueError("a date that there is not")

    async def goes_on() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.append("cancelled")

    async def scenario() -> bool:
        ended = asyncio.Event()

        async def serve() -> None:
            await ended.wait()

        return await asyncio.wait_for(serve_beside(serve, [fails, goes_on], ended.set), 10)

    with caplog.at_level(logging.ERROR):
        assert not asyncio.run(scenario())
    assert stopped == ["cancelled"]
    assert "a date that there is not" in caplog.text


def test_background_tasks_end_with_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def ends() -> None:
        await asyncio.sleep(0)

    async def goes_on() -> None:
        await asyncio.sleep(600)

    async def serve() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def scenario() -> bool:
        return await asyncio.wait_for(serve_beside(serve, [ends, goes_on], lambda: None), 10)

    assert asyncio.run(scenario())
    assert not caplog.records
