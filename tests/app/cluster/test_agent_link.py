"""The connection to an agent: what is heard, what is given up, and when it is opened again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.certificates import authority, issue
from headwater_server.cluster import agent_link
from headwater_server.cluster.agent_link import AgentLink
from headwater_server.cluster.agent_messages import AgentState, Beat, Order
from headwater_server.security.peer_tls import PeerTls
from tests.app.cluster.stand_in import READY, Agent, until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again soon."""
    monkeypatch.setattr(agent_link, "RETRY_S", 0.01)


class Listener:
    """What a link hears."""

    def __init__(self, agent: Agent, token: str = "token", epoch: int = 3, tls: PeerTls | None = None) -> None:
        self.states: list[AgentState] = []
        self.beats: list[Beat] = []
        self.reaches: list[bool] = []
        self.link = AgentLink(
            agent.address, token, epoch, tls, order_token=agent.order_token,
            on_state=self.states.append, on_beat=self.beats.append, on_reach=self.reaches.append,
        )  # fmt: skip
        self.running = asyncio.create_task(self.link.run())


@contextlib.asynccontextmanager
async def listening(agent: Agent, beats: bool = True, tls: PeerTls | None = None) -> AsyncIterator[Listener]:
    """A link to an agent, whose port is opened first."""
    await agent.open(beats, **READY)
    listener = Listener(agent, tls=tls)
    try:
        yield listener
    finally:
        listener.running.cancel()
        await asyncio.gather(listener.running, return_exceptions=True)
        await agent.end()


async def test_states_and_beats_are_heard_and_orders_given() -> None:
    agent = Agent("m-1")
    async with listening(agent) as one:
        one.link.tell(Order("stop"))  # lost: it is not connected yet
        await until(lambda: bool(one.states))
        agent.say(batch_limit=8)
        agent.send(Beat(2, 3))
        await until(lambda: Beat(2, 3) in one.beats)
        assert [state.batch_limit for state in one.states] == [0, 8]
        one.link.tell(Order("kill"))
        await until(lambda: one.states[-1].has_exited)
        assert (agent.orders, agent.epochs, one.reaches) == (["kill"], [3], [])


async def test_a_broken_connection_is_opened_again() -> None:
    agent = Agent("m-1")
    async with listening(agent) as one:
        await until(lambda: bool(one.states))
        agent.leave()
        await until(lambda: one.reaches == [False])
        agent.is_away = False
        await until(lambda: one.reaches == [False, True])
        assert not one.link.has_ended


async def test_an_agent_without_a_sign_of_life_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "BEAT_S", 0.02)

    agent = Agent("m-1")
    async with listening(agent, beats=False) as one:
        await until(lambda: one.reaches == [False])
        assert len(one.states) == 1
        agent.send(Beat())
        await until(lambda: True in one.reaches)
        assert one.reaches[:2] == [False, True]
        assert agent.epochs == [3]  # over the same connection


async def test_two_refused_connections_mean_that_it_has_ended() -> None:
    agent = Agent("m-1")
    async with listening(agent) as one:
        await until(lambda: bool(one.states))
        await agent.end()
        await one.running
        assert (one.link.has_ended, one.reaches) == (True, [False])


async def test_one_refused_connection_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent("m-1")
    async with listening(agent) as one:
        await until(lambda: bool(one.states))
        connect, refused = asyncio.open_connection, 0

        async def refuse(*address: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            nonlocal refused
            if refused < 3 and len(agent.epochs) == refused + 1:
                refused += 1
                raise ConnectionRefusedError
            return await connect(*address, **options)

        monkeypatch.setattr(asyncio, "open_connection", refuse)
        for count in range(2, 5):  # each time it is refused once, and then connects
            agent.leave()
            agent.is_away = False
            await until(lambda count=count: len(agent.epochs) == count)  # type: ignore[misc]
        assert (refused, one.link.has_ended) == (3, False)


async def test_with_a_wrong_token_nothing_is_heard() -> None:
    agent = Agent("m-1")
    async with listening(agent):
        other = Listener(agent, token="of an earlier replica")
        await until(lambda: other.reaches == [False])
        other.link.tell(Order("kill"))
        assert (other.states, other.link.has_ended, agent.orders) == ([], False, [])
        other.running.cancel()


async def test_an_answer_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "CONNECT_TIMEOUT_S", 1)

    agent = Agent("m-1")
    async with listening(agent) as one:
        await until(lambda: bool(one.states))
        agent.answer = None
        monkeypatch.setattr(agent_link, "CONNECT_TIMEOUT_S", 0)
        with pytest.raises(ConnectionError, match=r"no answer within 0\.01 s"):
            await one.link.ask_vllm("/v1/x", "{}", 0.01)
        assert not one.link._asked  # private: nothing public tells a question that is kept for ever


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
async def test_tls_on_both_sides(tmp_path: Path) -> None:
    signer, stranger = authority(tmp_path), authority(tmp_path, "stranger")
    one, other = (PeerTls(issue(signer, tmp_path / name)) for name in ("one", "other"))
    third = PeerTls(issue(stranger, tmp_path / "third"))

    agent = Agent("m-1", tls=one)
    async with listening(agent, tls=other) as found:
        await until(lambda: bool(found.states))
        for tls in (third, None):
            refused = Listener(agent, tls=tls)
            await until(lambda refused=refused: refused.reaches == [False])  # type: ignore[misc]
            assert not refused.states
            refused.running.cancel()
