"""Connections to other processes of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from headwater_server.cluster import dial
from headwater_server.cluster.dial import connected
from headwater_server.transport.address import host_and_port
from tests.app.cluster.stand_in import Agent

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.mark.parametrize("ending", ["cancelled", "too late"])
async def test_a_connection_that_opens_just_when_nobody_waits_any_more_is_closed(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(dial, "CONNECT_TIMEOUT_S", 0.01 if ending == "too late" else 10)

    agent = Agent("m-1")
    await agent.open()
    opened = await asyncio.open_connection(*host_and_port(agent.address))
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    is_waiting = asyncio.Event()

    async def connect(*address: Any, **options: Any) -> Pair:
        is_waiting.set()
        with contextlib.suppress(asyncio.CancelledError):  # it has opened in that moment
            await gate
        return opened

    async def use() -> None:
        async with connected(agent.address, None):
            pytest.fail("nobody waits any more")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    using = asyncio.create_task(use())
    await is_waiting.wait()
    if ending == "cancelled":
        gate.set_result(None)
        asyncio.get_running_loop().call_soon(using.cancel)  # after the connection, before who waits for that
    await asyncio.wait({using})
    assert using.cancelled() if ending == "cancelled" else isinstance(using.exception(), asyncio.TimeoutError)
    assert opened[1].is_closing()
    await agent.end()


@pytest.mark.parametrize("leave", [lambda: None, lambda: 1 / 0], ids=["end", "error"])
async def test_a_connection_is_closed_at_the_end(leave: Callable[[], object]) -> None:
    agent = Agent("m-1")
    await agent.open()
    try:
        async with connected(agent.address, None) as (_, writer):
            assert not writer.is_closing()
            leave()
    except ZeroDivisionError:
        pass
    assert writer.is_closing()
    await agent.end()
