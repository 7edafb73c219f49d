"""A replica on another machine, as the supervisor follows it from its place to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater_server.cluster import agent_link, remote_replica
from headwater_server.cluster.agent_messages import Beat, Said
from headwater_server.cluster.remote_replica import Context, RemoteReplica
from headwater_server.process.proc import GroupUse
from tests.app.cluster.stand_in import READY, SIGNATURE, Agent, Ray, clustered, until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again soon."""
    monkeypatch.setattr(agent_link, "RETRY_S", 0.01)
    monkeypatch.setattr(remote_replica, "PLACE_LOOK_S", 0.01)


class Followed:
    """A replica that is followed, and what its supervisor is told."""

    def __init__(self, ray: Ray, agent: Agent, place: asyncio.Future[Any]) -> None:
        self.ray = ray
        self.agent = agent
        self.place = place
        self.stages: list[str] = []
        self.reaches: list[bool] = []
        self.placings: list[bool] = []
        """For each time that it was placed, whether a node could be chosen."""
        self.is_node_chosen = False
        self.stale = asyncio.Event()
        client: Any = ray
        context = Context(client, 5, None, self._note_reach, self.stale.set)
        self.replica = RemoteReplica("m-5.1", "cpu", {}, {"CPU": 1}, context, self.stages.append)
        self.following = asyncio.create_task(self.replica.follow(self._find, self._look))
        self.replica.exited = self.following

    def _note_reach(self) -> None:
        self.reaches.append(self.replica.is_reachable)

    async def _find(self, is_chosen: bool) -> Any:
        self.placings.append(is_chosen)
        self.replica.node = "n1" if is_chosen and self.is_node_chosen else ""
        return await self.place

    async def _look(self) -> tuple[str, bool]:
        return self.ray.shortage, self.ray.has_room

    async def end(self) -> str:
        """Wait for its end. Returns the reason."""
        await self.following
        assert self.replica.ending.is_set()
        assert self.replica.ready.done()
        assert self.agent.gone.is_set() is ("m-5.1" in self.ray.killed)
        return self.replica.reason


@contextlib.asynccontextmanager
async def followed(*, has_actor: bool = True, **said: Any) -> AsyncIterator[Followed]:
    """A replica whose agent says this, if anything, once it has a place."""
    async with clustered() as ray:
        agent = ray.actors["replica:m-5.1"] = Agent("m-5.1")
        place: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if has_actor:
            place.set_result(agent)
        if said:
            await agent.open(**said)
        found = Followed(ray, agent, place)
        try:
            yield found
        finally:
            found.following.cancel()
            await asyncio.gather(found.following, return_exceptions=True)


async def until_use(replica: RemoteReplica, expected: GroupUse) -> None:
    """Wait until a replica has reported this use."""
    while await replica.use() != expected:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)


async def test_from_its_place_over_its_stages_to_ready() -> None:
    async with followed() as one:
        replica, agent = one.replica, one.agent
        await until(lambda: "waiting for a place in the cluster" in one.stages)
        await replica.wait_for_place(0)
        assert not replica.has_place
        one.ray.shortage = "it takes 2 GPU, and the largest node has 1"
        waiting = f"no node has room for it: {one.ray.shortage}; waiting for a node with room"
        await until(lambda: one.stages[-1] == waiting)
        placing = asyncio.create_task(replica.wait_for_place(60))
        await agent.open(stage="importing")
        await placing
        assert replica.has_place
        await until(lambda: one.stages[-1] == "importing")
        agent.say(stage="loading")
        await until(lambda: one.stages[-1] == "loading")
        assert not replica.ready.done()
        agent.say(stage="loading", batch_limit=4, **READY)
        assert await replica.ready
        assert one.stages.count("importing") == one.stages.count("loading") == 1
        assert agent.epochs == [5]
        assert (replica.signature, replica.facts, replica.batch_limit) == (SIGNATURE, {"device": "cpu"}, 4)
        assert replica.route().http_address == agent.address
        assert (replica.group, replica.is_reachable, replica.account()) == (0, True, "")
        agent.send(Beat(7, 1000, 50, 0.5))
        await until_use(replica, GroupUse(7, 1000, 50, 0.5))
        assert await replica.remains() == ["replica m-5.1: its node can't be reached, so perhaps all of it"]
        assert one.reaches == []


async def test_one_whose_node_never_takes_it_is_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "PLACE_AGAIN_S", 0.05)

    async with followed() as one:
        one.is_node_chosen = True
        await until(lambda: one.placings == [True] and one.replica.node == "n1")
        first, other = one.agent, Agent("m-5.1")
        one.place = asyncio.get_running_loop().create_future()
        one.place.set_result(other)
        await first.gone.wait()
        await until(lambda: one.placings == [True, False])
        assert one.replica.node == ""
        stages = len(one.stages)
        await until(lambda: len(one.stages) > stages + 20)  # which waits as long as it takes
        one.agent = one.ray.actors["replica:m-5.1"] = other
        await other.open(node="n2", **READY)
        assert await one.replica.ready
        assert (one.placings, one.replica.node) == ([True, False], "n2")


async def test_one_that_ends_by_itself_says_why_and_what_is_left() -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        one.agent.send(Beat(7, 1000, 50, 0.5))
        await until_use(one.replica, GroupUse(7, 1000, 50, 0.5))
        account = "killed by SIGSEGV; the last lines"
        one.agent.say(is_ending=True, reason="killed by SIGSEGV", account=account, cause="it crashed")
        await one.replica.ending.wait()
        assert not one.following.done()
        one.agent.say(has_exited=True, leftovers=["folder /x"])
        assert await one.end() == "killed by SIGSEGV"
        replica = one.replica
        assert (replica.account(), replica.cause()) == ("killed by SIGSEGV; the last lines", "it crashed")
        assert await replica.remains() == ["folder /x"]
        assert (replica.has_place, replica.is_lost_with_node) == (True, False)
        assert await replica.use() == GroupUse(gpu_bytes=0)  # not unknown, since its node has a driver
        assert one.ray.killed == ["m-5.1"]


async def test_one_that_ends_with_its_raylet_is_lost_with_its_node() -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        one.agent.say(is_ending=True, is_let_go=True, reason="the supervisor is gone")
        await one.replica.ending.wait()
        one.agent.say(has_exited=True)
        assert await one.end() == "its actor has ended, or its raylet"
        assert one.replica.is_lost_with_node


async def test_a_start_that_fails_for_good_is_not_ready() -> None:
    said: dict[str, Any] = {"reason": "there is no module m", "cause": "no module", "is_permanent": True}
    async with followed(is_ending=True, has_exited=True, **said) as one:
        assert await one.end() == "there is no module m"
        assert one.replica.ready.result() is False
        assert one.replica.is_permanent
        assert one.replica.cause() == "no module"


async def test_out_of_reach_and_back_it_stays() -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        one.agent.leave()
        await until(lambda: one.reaches == [False])
        assert not one.replica.ending.is_set()
        with pytest.raises(ConnectionError):
            await one.replica.ask_vllm("/v1/load_lora_adapter", "{}", 1)
        one.agent.is_away = False
        await until(lambda: one.reaches == [False, True])
        assert not one.replica.ending.is_set()
        assert (one.agent.epochs, one.ray.killed) == ([5, 5], [])


async def test_out_of_reach_for_too_long_it_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "OUT_OF_REACH_S", 0.3)

    async with followed(**READY) as one:
        await one.replica.ready
        one.agent.leave()
        assert await one.end() == "its node could not be reached for 0.3 s"
        assert (one.ray.killed, one.reaches) == (["m-5.1"], [False])
        assert one.replica.is_lost_with_node


async def test_an_agent_that_refuses_connections_has_ended() -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        await one.agent.port.close()
        assert await one.end() == "its agent has ended"
        assert one.replica.account() == "its agent has ended"


async def test_an_actor_that_ends_before_its_agent_has_said_anything() -> None:
    async with followed() as one:
        await one.agent.end()
        await one.following
        assert one.replica.reason == "its actor has ended: the actor died"
        assert (await one.replica.ready, one.replica.cause()) == (False, one.replica.reason)


async def test_what_ray_cannot_place_ends_with_its_reason() -> None:
    async with followed(has_actor=False) as one:
        one.place.set_exception(RuntimeError("no such resource\nat line 3"))
        await one.following
        assert one.replica.reason == "Ray could not run it: no such resource"
        await one.replica.wait_for_place(60)  # no longer, as it has ended
        assert not one.replica.has_place
        assert one.ray.killed == []


@pytest.mark.parametrize("what", ["stop", "kill"])
@pytest.mark.parametrize("has_actor", [False, True])
async def test_one_without_a_place_is_given_up(what: str, has_actor: bool) -> None:
    async with followed(has_actor=has_actor) as one:
        await until(lambda: bool(one.stages) is has_actor)
        getattr(one.replica, what)()
        if not has_actor:
            one.place.set_result(one.agent)
        assert await one.end() == "it was stopped"
        assert (one.ray.killed, one.agent.orders) == (["m-5.1"], [])


@pytest.mark.parametrize("what", ["stop", "kill"])
@pytest.mark.parametrize("is_away", [False, True])
async def test_an_order_is_given_as_soon_as_it_is_in_reach(what: str, is_away: bool) -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        if is_away:
            one.agent.leave()
            await until(lambda: one.reaches == [False])
        getattr(one.replica, what)()
        one.agent.is_away = False
        assert await one.end() == {"stop": "stopped", "kill": "killed"}[what]
        assert set(one.agent.orders) == {what}


async def test_a_supervisor_that_ends_leaves_the_replica_to_the_next() -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        one.following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.following
        assert one.ray.killed == []
        assert not one.replica.ending.is_set()
        assert not one.agent.gone.is_set()


async def test_a_supervisor_that_another_one_has_followed_is_told() -> None:
    async with followed(**READY) as one:
        await one.replica.ready
        one.agent.say(is_stale=True, is_ready=False, is_ending=True)
        await one.stale.wait()
        assert not one.replica.ending.is_set()  # it isn't this one's any more


async def test_adapters_are_the_agents_at_first_and_then_it_is_told() -> None:
    async with followed(**READY, adapters={"early": "early"}) as one:
        replica, agent = one.replica, one.agent
        await replica.ready
        assert replica.adapters == {"early": "early"}
        replica.adapters = {"early": "early", "late": "late"}
        agent.say(batch_limit=3)  # it has not been told yet
        await until(lambda: replica.batch_limit == 3)
        assert replica.adapters == {"early": "early", "late": "late"}
        await until(lambda: agent.state.adapters == {"early": "early", "late": "late"})
        replica.adapters = {"late": "late"}
        await until(lambda: agent.state.adapters == {"late": "late"})


async def test_adapters_that_were_lost_with_a_connection_are_told_again() -> None:
    async with followed(**READY) as one:
        replica, agent = one.replica, one.agent
        await replica.ready
        agent.leave()
        await until(lambda: one.reaches == [False])
        replica.adapters = {"late": "late"}
        agent.is_away = False
        await until(lambda: agent.state.adapters == {"late": "late"})
        assert replica.adapters == {"late": "late"}


async def test_what_is_asked_of_vllm_is_answered() -> None:
    async with followed() as one:
        with pytest.raises(ConnectionError, match="it has no place yet"):
            await one.replica.ask_vllm("/v1/x", "{}", 1)
        await one.agent.open(**READY)
        await one.replica.ready
        assert await one.replica.ask_vllm("/v1/load_lora_adapter", '{"a":1}', 3) == (200, b"done")
        (asked,) = one.agent.asked
        assert (asked.url, asked.body, asked.timeout_s) == ("/v1/load_lora_adapter", '{"a":1}', 3)
        one.agent.answer = Said(0, 0, "vLLM is gone")
        with pytest.raises(ConnectionError, match="vLLM is gone"):
            await one.replica.ask_vllm("/v1/x", "{}", 1)
        one.agent.answer = None
        asking = asyncio.create_task(one.replica.ask_vllm("/v1/x", "{}", 60))
        await until(lambda: len(one.agent.asked) == 3)
        one.agent.leave()  # who asks need not wait for the timeout
        with pytest.raises(ConnectionError, match="can't be reached"):
            await asking


async def test_ray_is_asked_anew_for_a_place_that_a_node_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "PLACE_AGAIN_S", 0.05)

    async with followed() as one:
        await until(lambda: len(one.stages) > 20)  # without room it waits
        assert one.ray.killed == []
        another = Agent("m-5.1")
        one.place = asyncio.get_running_loop().create_future()
        one.place.set_result(another)
        await another.open(**READY)
        one.ray.has_room = True
        assert await one.replica.ready
        assert (one.ray.killed, another.gone.is_set()) == (["m-5.1"], False)
        assert one.replica.route().http_address == another.address
        await another.end()
