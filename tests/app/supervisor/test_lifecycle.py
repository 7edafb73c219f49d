"""Load, unload and reload as the supervisor carries them out, with replicas that are no processes."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
from typing import Any

import pytest

from headwater_server.config.schema import Deployment
from headwater_server.control.messages import Command, CommandAnswer, Drained
from headwater_server.control.route_kinds import GraphKind
from headwater_server.control.routing import State
from headwater_server.errors import MemoryBudgetExceeded
from headwater_server.process.proc import GroupUse
from headwater_server.supervisor.child_processes import FIRST_BACKOFF_S
from headwater_server.supervisor.slot import SLOW_FIRST_S
from headwater_server.telemetry.recorder import recorder, use
from headwater_server.telemetry.store import SeriesKey, Store
from tests.app.supervisor.stand_in import GRAPH, Replica, Supervisor, one, pipeline, settle, until

# One deployment


async def test_unload_drains_then_ends_and_says_so_and_load_brings_it_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    supervisor = Supervisor(one(drain_timeout_s=7))
    await supervisor.start()
    a = supervisor.sets["a"]
    supervisor.drained = Drained(2, 1)
    supervisor.drain_gate = asyncio.Event()
    unloading = asyncio.create_task(supervisor.do("unload", "a"))
    await settle()
    assert (a.state, a.is_set_aside, list(a.ready)) == (State.DRAINING, True, ["a-0"])
    supervisor.drain_gate.set()
    answer = await unloading
    assert answer.status == 200
    assert answer.content.pop("took_s") >= 0
    assert answer.content == {
        "name": "a", "state": "UNAVAILABLE", "drained": 2, "ended": 1,
        "freed": {"host_bytes": 0, "gpu_bytes": None}, "leftovers": [],
    }  # fmt: skip
    assert supervisor.drains == [("a", 7, None)]
    assert a.reason == "it is unloaded: load it with POST /v2/repository/models/a/load"
    assert (a.ready, a.is_loaded, len(supervisor.launched)) == ({}, False, 1)

    answer = await supervisor.do("load", "a")
    assert (answer.status, answer.content["state"]) == (200, "READY")
    assert (list(a.ready), a.is_set_aside) == (["a-1"], False)
    seen = ["LOADING", "READY", "DRAINING", "UNLOADING", "UNAVAILABLE", "LOADING", "READY"]
    logged = [line for line in caplog.messages if " -> " in line]
    assert [line.split(": ")[1] for line in logged] == [
        f"{before} -> {after}" for before, after in itertools.pairwise(seen)
    ]


@pytest.mark.parametrize("failing", [{"before"}, {"after"}, {"before", "after"}])
async def test_what_an_unload_freed_is_unknown_if_it_cannot_be_measured(
    failing: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(self: Replica) -> GroupUse:
        when = "after" if self.exited.done() else "before"
        if when in failing and self.name != "p.head":
            raise OSError(errno.EMFILE, "Too many open files")
        return GroupUse(gpu_bytes=0) if when == "after" else GroupUse(3, 1000, 50)

    monkeypatch.setattr(Replica, "use", use)
    caplog.set_level(logging.CRITICAL)

    supervisor = Supervisor({**one(), "p": {"pipeline": GRAPH}, "shared": {"model": "m:S"}})
    await supervisor.start()
    for name in ("a", "p"):
        answer = await supervisor.do("unload", name)
        assert (answer.status, answer.content["state"]) == (200, "UNAVAILABLE")
        assert answer.content["freed"] == {"host_bytes": None, "gpu_bytes": None}


async def test_what_it_is_in_already_is_a_conflict_that_changes_nothing() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    status, error = await supervisor.told("load", "a")
    assert (status, "READY" in error, "reload" in error) == (409, True, True)
    assert supervisor.sets["a"].state is State.READY
    await supervisor.do("unload", "a")
    before = supervisor.sets["a"].since_s
    status, error = await supervisor.told("unload", "a")
    assert (status, "nothing to unload" in error) == (409, True)
    status, error = await supervisor.told("reload", "a")
    assert (status, "expected load" in error) == (409, True)
    assert supervisor.sets["a"].since_s == before
    assert (await supervisor.told("load", "b"))[0] == 404
    assert (await supervisor.told("unload", "b")) == (404, "model 'b': unknown; this server has `a`")


@pytest.mark.parametrize("first", ["unload", "reload"])
@pytest.mark.parametrize("second", ["load", "unload", "reload"])
async def test_one_thing_at_a_time(first: str, second: str) -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.drain_gate = asyncio.Event()
    under_way = asyncio.create_task(supervisor.do(first, "a"))
    await settle()
    assert await supervisor.told(second, "a") == (
        409,
        f"model `a`: {first} is under way; expected {second} after its end",
    )
    supervisor.drain_gate.set()
    assert (await under_way).status == 200


@pytest.mark.parametrize("second", ["load", "unload", "reload"])
async def test_nothing_else_is_done_during_a_load(second: str) -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    await supervisor.do("unload", "a")
    supervisor.auto_ready = False
    loading = asyncio.create_task(supervisor.do("load", "a"))
    await settle()
    config = None if second == "unload" else {"timeout_s": 3}
    assert await supervisor.told(second, "a", config) == (
        409,
        f"model `a`: load is under way; expected {second} after its end",
    )
    assert supervisor.sets["a"].state is State.LOADING
    supervisor.launched[1].get_ready()
    assert (await loading).status == 200
    assert supervisor.sets["a"].config.timeout_s == 30


async def test_a_load_while_it_starts_by_itself_is_a_conflict() -> None:
    supervisor = Supervisor(one())
    supervisor.auto_ready = False
    await supervisor.start()
    status, error = await supervisor.told("load", "a", {"timeout_s": 3})
    assert (status, "is LOADING: it is already loaded" in error) == (409, True)
    supervisor.launched[0].get_ready()
    await settle()
    assert (supervisor.sets["a"].state, len(supervisor.launched)) == (State.READY, 1)


async def test_a_load_that_fails_is_tried_once_and_may_be_told_again() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    await supervisor.do("unload", "a")
    supervisor.failing.add("a")
    status, error = await supervisor.told("load", "a")
    a = supervisor.sets["a"]
    assert (status, "RuntimeError: no weights here" in error) == (500, True)
    assert (a.state, a.is_set_aside, a.has_given_up, len(supervisor.launched)) == (State.FAILED, False, False, 2)
    supervisor.failing.clear()
    assert await supervisor.told("load", "a") == (200, "")
    assert a.state is State.READY


async def test_of_a_load_with_several_replicas_all_start_or_none_stays() -> None:
    supervisor = Supervisor(one(replicas=2))
    await supervisor.start()
    assert len(supervisor.sets["a"].ready) == 2
    await supervisor.do("unload", "a")
    supervisor.auto_ready = False
    loading = asyncio.create_task(supervisor.told("load", "a"))
    await settle()
    good, bad = supervisor.launched[2:]
    good.get_ready()
    bad.end("out of memory")
    assert (await loading)[0] == 500
    assert good.exited.done()
    assert not supervisor.sets["a"].is_loaded


async def test_a_deployment_that_lost_too_many_replicas_can_be_loaded_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    supervisor = Supervisor(one(max_crashes=1))
    await supervisor.start()
    a = supervisor.sets["a"]
    supervisor.launched[0].end("killed")
    await until(lambda: a.state is State.FAILED)
    assert (a.slots.is_failing, await supervisor.told("load", "a")) == (True, (200, ""))
    assert (a.state, list(a.ready), a.slots.is_failing) == (State.READY, ["a-1"], False)
    supervisor.launched[1].end("killed")
    await until(lambda: a.state is State.FAILED)
    assert (await supervisor.told("unload", "a"), a.is_loaded) == ((200, ""), False)


async def test_a_deployment_that_has_given_up_can_be_loaded() -> None:
    supervisor = Supervisor(one())
    supervisor.failing.add("a")
    await supervisor.start()
    a = supervisor.sets["a"]
    await until(lambda: a.state is State.FAILED)
    assert (a.has_given_up, len(supervisor.launched)) == (True, 5)
    assert (await supervisor.told("unload", "a"))[0] == 409
    supervisor.failing.clear()
    assert await supervisor.told("load", "a") == (200, "")
    assert (a.state, a.has_given_up) == (State.READY, False)


async def test_without_a_place_no_start_has_failed_and_the_slot_waits() -> None:
    use(Store())

    supervisor = Supervisor(one(load_timeout_s=60))
    supervisor.has_place = False
    await supervisor.start()
    a = supervisor.sets["a"]
    await until(lambda: len(supervisor.launched) > 10)  # more than failed starts may be
    assert (a.state, a.has_given_up) == (State.LOADING, False)
    assert a.shortage == "no place for it within load_timeout_s = 60 s"
    supervisor.has_place = True
    await until(lambda: a.state is State.READY)
    assert (list(a.ready), a.shortage) == ([supervisor.launched[-1].id], "")
    assert all(replica.exited.done() for replica in supervisor.launched[:-1])
    counted = recorder().store.snapshot().records
    for name in ("headwater_replica_start_failures", "headwater_replica_restarts"):
        assert SeriesKey(name, ("a",)) not in counted


async def test_a_loss_with_the_node_is_no_crash_and_is_replaced_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Store())
    paused: list[float] = []

    async def wait_for_stop(timeout_s: float) -> None:
        paused.append(timeout_s)

    supervisor = Supervisor(one(max_crashes=1))
    monkeypatch.setattr(supervisor, "wait_for_stop", wait_for_stop)
    await supervisor.start()
    a = supervisor.sets["a"]
    for count in range(1, 4):
        supervisor.launched[-1].is_lost_with_node = True
        supervisor.launched[-1].end("its node is gone")
        await until(lambda count=count: list(a.ready) == [f"a-{count}"])  # type: ignore[misc]
    assert recorder().store.snapshot().records[SeriesKey("headwater_replica_restarts", ("a",))] == [3]
    assert paused == [FIRST_BACKOFF_S] * 3
    supervisor.launched[-1].end("killed by SIGSEGV")
    await until(lambda: a.state is State.FAILED)
    await until(lambda: len(paused) == 4)
    assert (a.has_given_up, paused) == (False, [*[FIRST_BACKOFF_S] * 3, SLOW_FIRST_S])


@pytest.mark.parametrize(
    ("replicas", "pauses"), [(1, [0.5, 1, 2, 2, 2, 2]), (2, [0.5, 1, 2, 4, 8, 16])], ids=["alone", "beside another"]
)
async def test_a_lost_replica_is_replaced_soon_while_no_other_one_serves(
    replicas: int, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []

    async def wait_for_stop(timeout_s: float) -> None:
        paused.append(timeout_s)

    supervisor = Supervisor(one(replicas=replicas))
    monkeypatch.setattr(supervisor, "wait_for_stop", wait_for_stop)
    await supervisor.start()
    a = supervisor.sets["a"]
    for count in range(replicas, replicas + 6):
        supervisor.launched[-1].end("killed by SIGKILL")
        await until(lambda count=count: f"a-{count}" in a.ready)  # type: ignore[misc]
    assert paused == pauses


async def test_a_pause_ends_when_the_last_replica_that_served_is_lost() -> None:
    supervisor = Supervisor(one(replicas=2))
    await supervisor.start()
    a = supervisor.sets["a"]
    pauses: list[float] = []

    async def wait_for_stop(timeout_s: float) -> None:
        pauses.append(timeout_s)
        await asyncio.Event().wait()

    supervisor.wait_for_stop = wait_for_stop  # type: ignore[method-assign]
    supervisor.launched[0].end("killed by SIGKILL")
    await until(lambda: len(pauses) == 1)
    assert list(a.ready) == ["a-1"]
    supervisor.launched[1].end("killed by SIGKILL")
    await until(lambda: list(a.ready) == ["a-2"])
    assert len(pauses) == 2
    await supervisor.told("unload", "a")


async def test_a_replica_that_is_lost_while_it_drains_is_not_replaced() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.drain_gate = asyncio.Event()
    unloading = asyncio.create_task(supervisor.do("unload", "a"))
    await settle()
    supervisor.launched[0].end("killed by SIGKILL")
    await settle()
    assert supervisor.sets["a"].state is State.DRAINING
    assert supervisor.sets["a"].ready == {}
    supervisor.drain_gate.set()
    assert (await unloading).content["state"] == "UNAVAILABLE"
    assert len(supervisor.launched) == 1


async def test_what_waits_for_its_next_try_can_be_unloaded() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.auto_ready = False
    supervisor.launched[0].end("killed by SIGKILL")
    await settle()
    assert (supervisor.sets["a"].state, len(supervisor.launched)) == (State.UNAVAILABLE, 2)
    assert await supervisor.told("unload", "a") == (200, "")
    assert supervisor.launched[1].exited.done()
    assert (supervisor.sets["a"].state, len(supervisor.launched)) == (State.UNAVAILABLE, 2)
    assert supervisor.sets["a"].is_set_aside


async def test_what_remains_makes_it_failed_and_is_told() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.launched[0].leftovers = ["/dev/shm/psm_1: Permission denied"]
    answer = await supervisor.do("unload", "a")
    assert (answer.status, answer.content["state"]) == (500, "FAILED")
    assert answer.content["leftovers"] == ["/dev/shm/psm_1: Permission denied"]
    assert "/dev/shm/psm_1" in answer.content["error"]
    assert "/dev/shm/psm_1" in supervisor.sets["a"].reason
    assert await supervisor.told("load", "a") == (200, "")


async def test_a_replica_that_does_not_end_when_told_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.supervisor.slot.REPLICA_END_TIMEOUT_S", 0.05)

    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.launched[0].is_stubborn = True
    answer = await supervisor.do("unload", "a")
    assert (answer.status, answer.content["warnings"]) == (200, ["replica a-0: killed"])


# Reload


async def test_reload_switches_when_the_new_one_is_ready_and_then_retires_the_old() -> None:
    supervisor = Supervisor(one(drain_timeout_s=7))
    await supervisor.start()
    a = supervisor.sets["a"]
    supervisor.auto_ready = False
    supervisor.drained = Drained(4, 0)
    supervisor.drain_gate = asyncio.Event()
    reloading = asyncio.create_task(supervisor.do("reload", "a"))
    await settle()
    assert list(a.ready) == ["a-0"]
    supervisor.launched[1].get_ready()
    await settle()
    route = a.route(1)
    assert [replica.id for replica in route.replicas] == ["a-1"]
    assert [replica.id for replica in route.retiring] == ["a-0"]
    assert supervisor.drains == [("a", 7, ["a-0"])]
    assert not supervisor.launched[0].exited.done()
    supervisor.drain_gate.set()
    answer = await reloading
    assert (answer.status, answer.content["state"], answer.content["drained"]) == (200, "READY", 4)
    assert supervisor.launched[0].exited.done()
    assert a.route(1).retiring == ()
    assert supervisor.states["a"] == [State.LOADING, State.READY]

    supervisor.launched[1].end("killed by SIGKILL")  # the new one is kept like any other
    await settle()
    assert len(supervisor.launched) == 3


async def test_a_reload_that_fails_leaves_what_serves() -> None:
    supervisor = Supervisor(one(replicas=2))
    await supervisor.start()
    supervisor.failing.add("a")
    status, error = await supervisor.told("reload", "a")
    assert (status, "RuntimeError: no weights here" in error, "still serves" in error) == (500, True, True)
    a = supervisor.sets["a"]
    assert (a.state, list(a.ready), supervisor.drains) == (State.READY, ["a-0", "a-1"], [])
    assert supervisor.states["a"] == [State.LOADING, State.READY]


async def test_with_strategy_recreate_the_old_one_ends_first() -> None:
    supervisor = Supervisor(one(strategy="recreate"))
    await supervisor.start()
    supervisor.auto_ready = False
    reloading = asyncio.create_task(supervisor.do("reload", "a"))
    await until(lambda: len(supervisor.launched) == 2)
    assert supervisor.launched[0].exited.done()
    supervisor.launched[1].get_ready()
    answer = await reloading
    assert (answer.status, answer.content["state"]) == (200, "READY")
    assert supervisor.states["a"][-5:] == [
        State.DRAINING, State.UNLOADING, State.UNAVAILABLE, State.LOADING, State.READY,
    ]  # fmt: skip


async def test_nothing_is_started_by_a_server_that_stops() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.stop()
    assert await supervisor.told("reload", "a") == (
        503,
        "the server is stopping; the previous configuration still serves",
    )
    assert len(supervisor.launched) == 1


# A pipeline whose steps are deployments


async def test_a_step_goes_with_its_pipeline_only() -> None:
    supervisor = Supervisor(pipeline())
    await supervisor.start()
    for action in ("load", "unload", "reload"):
        status, error = await supervisor.told(action, "p.trunk")
        assert (status, "step of the pipeline `p`" in error) == (409, True)


async def test_a_pipeline_drains_before_its_steps_and_takes_only_its_own_with_it() -> None:
    supervisor = Supervisor(pipeline(drain_timeout_s=5))
    await supervisor.start()
    graph = supervisor.composites["p"]
    assert graph.state is State.READY
    supervisor.drain_gate = asyncio.Event()
    unloading = asyncio.create_task(supervisor.do("unload", "p"))
    await settle()
    kind = graph.route(1).kind
    assert (graph.state, isinstance(kind, GraphKind) and kind.is_open) == (State.DRAINING, False)
    assert supervisor.sets["p.trunk"].state is State.READY  # what is in flight needs it
    supervisor.drain_gate.set()
    answer = await unloading
    assert (answer.status, answer.content["state"]) == (200, "UNAVAILABLE")
    assert [name for name, _, _ in supervisor.drains] == ["p", "p.trunk", "p.head"]
    assert all(left_s <= 5 for _, left_s, _ in supervisor.drains)
    states = {name: one.state for name, one in supervisor.sets.items()}
    assert states == {"p.trunk": State.UNAVAILABLE, "p.head": State.UNAVAILABLE, "shared": State.READY}
    assert graph.is_set_aside
    assert graph.reason == "it is unloaded: load it with POST /v2/repository/models/p/load"
    assert (await supervisor.told("unload", "p"))[0] == 409

    assert await supervisor.told("load", "p") == (200, "")
    assert (graph.state, graph.is_set_aside) == (State.READY, False)
    assert supervisor.states["p"][-5:] == [
        State.DRAINING, State.UNLOADING, State.UNAVAILABLE, State.LOADING, State.READY,
    ]  # fmt: skip
    assert (await supervisor.told("load", "p"))[0] == 409


async def test_a_shared_step_can_be_unloaded_and_the_pipeline_says_so() -> None:
    supervisor = Supervisor(pipeline())
    await supervisor.start()
    assert await supervisor.told("unload", "shared") == (200, "")
    graph = supervisor.composites["p"]
    assert (graph.state, "step `other` is UNAVAILABLE: it is unloaded" in graph.reason) == (State.READY, True)


async def test_a_pipeline_of_which_a_step_fails_to_load_can_be_told_again() -> None:
    supervisor = Supervisor(pipeline())
    await supervisor.start()
    await supervisor.do("unload", "p")
    supervisor.failing.add("p.trunk")
    status, error = await supervisor.told("load", "p")
    assert (status, "p.trunk" in error) == (500, True)
    assert supervisor.composites["p"].state.value == "FAILED"
    supervisor.failing.clear()
    assert await supervisor.told("load", "p") == (200, "")
    assert supervisor.composites["p"].state is State.READY
    assert [replica.name for replica in supervisor.launched].count("p.head") == 2  # it was there already


async def test_a_pipelines_reload_replaces_all_its_own_steps_or_none() -> None:
    supervisor = Supervisor(pipeline())
    await supervisor.start()
    supervisor.failing.add("p.head")
    before = {name: list(one.ready) for name, one in supervisor.sets.items()}
    assert (await supervisor.told("reload", "p"))[0] == 500
    assert {name: list(one.ready) for name, one in supervisor.sets.items()} == before
    assert [replica.exited.done() for replica in supervisor.launched[3:]] == [True, True]
    supervisor.failing.clear()
    assert await supervisor.told("reload", "p") == (200, "")
    after = {name: list(one.ready) for name, one in supervisor.sets.items()}
    assert after["shared"] == before["shared"]
    assert after["p.trunk"] != before["p.trunk"]
    assert after["p.head"] != before["p.head"]
    assert supervisor.states["p"] == [State.LOADING, State.READY]


# A configuration that comes with the command


def launched_with(supervisor: Supervisor, name: str) -> Deployment:
    """What the newest replica of a deployment was started with."""
    config = next(one for one in reversed(supervisor.launched) if one.name == name).config
    assert config is not None
    return config


async def test_a_load_with_a_config_lays_it_over_the_servers_and_it_holds_until_there_is_another() -> None:
    supervisor = Supervisor(one(timeout_s=7))
    await supervisor.start()
    a = supervisor.sets["a"]
    await supervisor.do("unload", "a")
    answer = await supervisor.do("load", "a", {"replicas": 2, "batching": {"max_queue_delay_ms": 5}})
    assert (answer.status, answer.content["state"]) == (200, "READY")
    assert len(a.ready) == 2
    assert supervisor.sets["a"] is a
    for config in (a.config, launched_with(supervisor, "a"), supervisor.deployments.config.deployments["a"]):
        assert (config.batching.max_queue_delay_ms, config.timeout_s) == (5, 7)
    assert a.route(1).max_queue_delay_ms == 5

    await supervisor.do("unload", "a")
    assert await supervisor.told("load", "a") == (200, "")  # as it was last
    assert (len(a.ready), a.route(1).max_queue_delay_ms) == (2, 5)
    await supervisor.do("unload", "a")
    assert await supervisor.told("load", "a", {}) == (200, "")  # as the server was started with it
    assert (len(a.ready), a.route(1).max_queue_delay_ms) == (1, 0)


async def test_a_reload_with_a_config_switches_to_it_with_the_new_replicas() -> None:
    supervisor = Supervisor(one(drain_timeout_s=7))
    await supervisor.start()
    a = supervisor.sets["a"]
    supervisor.auto_ready = False
    reloading = asyncio.create_task(supervisor.do("reload", "a", {"timeout_s": 3, "replicas": 2}))
    await settle()
    assert (a.route(1).timeout_s, len(supervisor.launched)) == (30, 3)  # not before
    supervisor.launched[0].end("killed by SIGKILL")
    await until(lambda: len(supervisor.launched) == 4)
    assert [replica.config and replica.config.timeout_s for replica in supervisor.launched] == [30, 3, 3, 30]
    for replica in supervisor.launched[1:]:
        replica.get_ready()
    assert (await reloading).status == 200
    route = a.route(1)
    assert (route.timeout_s, [replica.id for replica in route.replicas]) == (3, ["a-1", "a-2"])


@pytest.mark.parametrize(
    ("config", "status", "told"),
    [
        ("{", 400, "parameters.config: not valid JSON"),
        ({"timeout_s": 0}, 400, "`deployments.a.timeout_s`: input should be greater than 0, got 0"),
        ({"colour": "blue"}, 400, "`deployments.a.colour`: unknown field"),
        ({"replicas": 1001}, 400, "`deployments.a.replicas"),
        ({"options": {"mode": "x"}}, 403, "parameters.config.options: it chooses the code that runs"),
        ({"model": "os:system"}, 403, "parameters.config.model: it chooses the code that runs"),
    ],
)
async def test_a_config_that_is_refused_changes_nothing(config: Any, status: int, told: str) -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    a = supervisor.sets["a"]
    before = a.config, supervisor.deployments.config
    for action, state in (("reload", State.READY), ("unload", State.UNAVAILABLE), ("load", State.UNAVAILABLE)):
        if action == "unload":
            await supervisor.do(action, "a")
            continue
        since = a.since_s
        found = await supervisor.told(action, "a", config)
        assert (found[0], told in found[1]) == (status, True), found
        assert (a.state, a.since_s, len(supervisor.launched)) == (state, since, 1)
        assert a.config is before[0]
        assert supervisor.deployments.config is before[1]
    assert await supervisor.told("load", "a") == (200, "")


async def test_a_config_where_the_state_does_not_allow_it_is_a_conflict() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    status, error = await supervisor.told("load", "a", {"timeout_s": 3})
    assert (status, "expected reload, or unload first" in error) == (409, True)
    await supervisor.do("unload", "a")
    status, error = await supervisor.told("reload", "a", {"timeout_s": 3})
    assert (status, "expected load" in error) == (409, True)
    assert supervisor.sets["a"].config.timeout_s == 30
    status, error = await supervisor.told("reload", "b", {"model": "m:B"})
    assert (status, "unknown" in error) == (404, True)


async def test_a_reload_with_a_config_that_fails_leaves_what_serves_and_its_config() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    supervisor.failing.add("a")
    status, error = await supervisor.told("reload", "a", {"timeout_s": 3})
    assert (status, "still serves" in error) == (500, True)
    a = supervisor.sets["a"]
    assert (a.state, list(a.ready), a.config.timeout_s) == (State.READY, ["a-0"], 30)
    assert supervisor.deployments.config.deployments["a"].timeout_s == 30


async def test_a_config_that_says_recreate_is_reloaded_that_way() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    assert await supervisor.told("reload", "a", {"strategy": "recreate", "timeout_s": 3}) == (200, "")
    assert supervisor.states["a"][-4:-1] == [State.UNLOADING, State.UNAVAILABLE, State.LOADING]
    assert supervisor.sets["a"].config.timeout_s == 3


async def test_a_model_that_the_server_does_not_name_needs_allow_load_any() -> None:
    for allow_load in ("settings", "never"):
        supervisor = Supervisor(one(), allow_load)
        await supervisor.start()
        status, error = await supervisor.told("load", "b", {"model": "m:B"})
        assert (status, f"server.allow_load is {allow_load}" in error) == (403, True)
        assert list(supervisor.sets) == ["a"]
    assert (await supervisor.told("reload", "a", {}))[0] == 403


async def test_an_added_model_is_served_like_any_other_and_forgotten_when_it_is_unloaded() -> None:
    supervisor = Supervisor(one(), "any")
    await supervisor.start()
    answer = await supervisor.do("load", "b", {"model": "m:B", "replicas": 2})
    assert (answer.status, answer.content["state"]) == (200, "READY")
    assert list(supervisor.deployments.config.deployments) == ["a", "b"]
    assert len(supervisor.sets["b"].ready) == 2
    assert supervisor.states["b"] == [State.LOADING, State.READY]
    assert (await supervisor.told("load", "b", {"model": "m:B"}))[0] == 409
    assert await supervisor.told("reload", "b", {"model": "m:Other"}) == (200, "")
    assert launched_with(supervisor, "b").model == "m:Other"
    answer = await supervisor.do("unload", "b")
    assert (answer.status, answer.content["state"]) == (200, "UNAVAILABLE")
    assert (list(supervisor.sets), list(supervisor.deployments.config.deployments)) == (["a"], ["a"])
    assert (await supervisor.told("unload", "b"))[0] == 404
    assert (await supervisor.told("load", "b"))[0] == 404
    assert all(replica.exited.done() for replica in supervisor.launched[1:])


async def test_an_added_model_that_fails_is_failed_until_it_is_loaded_rightly_or_unloaded() -> None:
    supervisor = Supervisor(one(), "any")
    await supervisor.start()
    supervisor.failing.add("b")
    assert (await supervisor.told("load", "b", {"model": "m:B"}))[0] == 500
    assert supervisor.sets["b"].state.value == "FAILED"
    supervisor.failing.clear()
    assert await supervisor.told("load", "b", {"model": "m:B2"}) == (200, "")
    assert supervisor.sets["b"].config.model == "m:B2"
    supervisor.failing.add("c")
    assert (await supervisor.told("load", "c", {"model": "m:C"}))[0] == 500
    assert await supervisor.told("unload", "c") == (200, "")
    assert list(supervisor.sets) == ["a", "b"]


async def test_names_that_stand_for_something_else_are_refused() -> None:
    supervisor = Supervisor(pipeline(), "any")
    await supervisor.start()
    status, error = await supervisor.told("load", "p.trunk", {"model": "m:B"})
    assert (status, "step of the pipeline `p`" in error) == (409, True)
    for name, told in (("not a name", "deployment name 'not a name'"), ("x" * 101, "at most 100 characters")):
        status, error = await supervisor.told("load", name, {"model": "m:B"})
        assert (status, told in error) == (400, True), error
    assert set(supervisor.sets) == {"p.trunk", "p.head", "shared"}


async def test_two_models_loaded_at_once_are_both_kept() -> None:
    supervisor = Supervisor(one(), "any")
    await supervisor.start()
    found = await asyncio.gather(
        supervisor.told("load", "b", {"model": "m:B"}),
        supervisor.told("load", "b", {"model": "m:Other"}),
        supervisor.told("load", "c", {"model": "m:C"}),
        supervisor.told("reload", "a", {"timeout_s": 3}),
    )
    assert [status for status, _ in found] == [200, 409, 200, 200]
    deployments = supervisor.deployments.config.deployments
    assert {name: one.model for name, one in deployments.items()} == {"a": "m:A", "b": "m:B", "c": "m:C"}
    assert deployments["a"].timeout_s == 3


async def test_a_pipelines_config_reaches_its_own_steps() -> None:
    supervisor = Supervisor(pipeline())
    await supervisor.start()
    assert await supervisor.told("reload", "p", {"timeout_s": 3, "batching": {"max_queue_size": 9}}) == (200, "")
    graph = supervisor.composites["p"]
    assert (graph.route(1).timeout_s, graph.route(1).max_queue_size) == (3, 9)
    for name, timeout_s in (("p.trunk", 3), ("p.head", 3), ("shared", 30)):
        assert supervisor.sets[name].config.timeout_s == timeout_s
    assert launched_with(supervisor, "p.head").timeout_s == 3
    assert (await supervisor.told("reload", "p", {"pipeline": {}}))[0] == 403


async def test_a_pipeline_becomes_another_only_while_it_is_not_loaded() -> None:
    supervisor = Supervisor(pipeline(), "any")
    await supervisor.start()
    longer = {"pipeline": {"heads": {"more": {"deployment": "shared"}}}}
    status, error = await supervisor.told("reload", "p", longer)
    assert (status, "expected strategy recreate, or unload the model first" in error) == (409, True)
    await supervisor.do("unload", "p")
    before = supervisor.sets["p.trunk"]
    await supervisor.do("load", "p", longer)
    assert supervisor.sets["p.trunk"] is not before
    assert set(supervisor.composites["p"].deployments) == {"trunk", "head", "other", "more"}
    assert set(supervisor.sets) == {"p.trunk", "p.head", "shared"}
    await supervisor.do("unload", "p")
    assert await supervisor.told("load", "p", {"pipeline": None, "model": "m:A"}) == (200, "")
    assert (set(supervisor.sets), supervisor.composites) == ({"p", "shared"}, {})
    assert await supervisor.told("reload", "p", {"strategy": "recreate"}) == (200, "")
    assert supervisor.composites["p"].state is State.READY


async def test_an_added_step_stays_as_long_as_a_pipeline_needs_it() -> None:
    supervisor = Supervisor(one(), "any")
    await supervisor.start()
    shared = {"placement": "graph", "trunk": {"model": "m:T"}, "heads": {"h": {"deployment": "shared"}}}
    status, error = await supervisor.told("load", "p", {"pipeline": shared})
    assert (status, "unknown deployment `shared`" in error) == (400, True)
    assert await supervisor.told("load", "shared", {"model": "m:S"}) == (200, "")
    assert await supervisor.told("load", "p", {"pipeline": shared}) == (200, "")
    assert supervisor.composites["p"].state is State.READY
    status, error = await supervisor.told("unload", "shared")
    assert (status, "pipeline `p` has it as a step" in error) == (409, True)
    assert supervisor.sets["shared"].state is State.READY
    assert await supervisor.told("unload", "p") == (200, "")
    assert (await supervisor.told("unload", "shared"), list(supervisor.sets)) == ((200, ""), ["a"])


@pytest.mark.parametrize(
    ("deployments", "name", "config"),
    [
        (one(), "a", {"timeout_s": 3}),
        (one(), "a", {"model": None, "pipeline": GRAPH}),
        (one(), "b", {"model": "m:B"}),
        ({"p": {"pipeline": GRAPH}, "shared": {"model": "m:Shared"}}, "p", {"timeout_s": 3}),
    ],
    ids=["settings", "another kind", "new", "pipeline"],
)
async def test_a_load_for_which_there_is_no_room_changes_nothing(
    deployments: dict[str, Any], name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(*_: Any) -> None:
        raise MemoryBudgetExceeded("memory of the host: a replica takes 2 GiB")

    supervisor = Supervisor({"shared": {"model": "m:Shared"}, **deployments}, "any")
    await supervisor.start()
    if name in deployments:
        await supervisor.do("unload", name)
    before = supervisor.deployments.config, dict(supervisor.sets), dict(supervisor.composites)
    states = {one: supervisor.states[one][-1] for one in supervisor.states}
    monkeypatch.setattr(supervisor.memory, "reserve", no_room)
    status, error = await supervisor.told("load", name, config)
    assert (status, "memory of the host" in error) == (409, True)
    assert (supervisor.deployments.config, supervisor.sets, supervisor.composites) == before
    assert {one: supervisor.states[one][-1] for one in states} == states
    assert all(found.config.timeout_s == 30 for found in supervisor.sets.values())
    if name in supervisor.composites:
        assert supervisor.composites[name].is_set_aside
    monkeypatch.undo()
    assert (await supervisor.told("load", name, config))[0] != 409


async def test_a_reload_without_a_config_keeps_what_an_operator_scaled() -> None:
    supervisor = Supervisor(one())
    await supervisor.start()
    answer = await supervisor.lifecycle.answer(Command(7, "scale", "a", {"min": 2, "max": 2}))
    assert answer.status == 200
    for config, replicas in ((None, 2), ({"replicas": 3}, 3), ({}, 1)):
        assert await supervisor.told("reload", "a", config) == (200, "")
        assert len(supervisor.sets["a"].ready) == replicas


# Versions


def versions(**fields: Any) -> dict[str, Any]:
    return {"c": {"model": "m:C", "versions": {"1": {}, "2": {"replicas": 2}}, **fields}}


async def shared(supervisor: Supervisor, action: str, **arguments: Any) -> CommandAnswer:
    return await supervisor.lifecycle.answer(Command(7, action, "c", arguments))


async def test_a_reload_that_changes_only_the_traffic_starts_and_ends_no_replica() -> None:
    supervisor = Supervisor(versions())
    await supervisor.start()
    assert await supervisor.told("reload", "c", {"traffic": {"1": 0.9, "2": 0.1}}) == (200, "")
    traffic = supervisor.composites["c"].route(1).traffic
    assert traffic is not None
    assert traffic.shares == {"1": 0.9, "2": 0.1}
    assert (len(supervisor.launched), supervisor.drains) == (3, [])


async def test_a_reload_that_adds_a_version_starts_only_that_and_one_that_removes_it_drains_and_ends_it() -> None:
    supervisor = Supervisor(versions(), allow_load="any")
    await supervisor.start()
    assert await supervisor.told("reload", "c", {"versions": {"3": {"timeout_s": 7}}}) == (200, "")
    assert [replica.name for replica in supervisor.launched] == ["c.1", "c.2", "c.2", "c.3"]
    assert supervisor.sets["c.3"].config.timeout_s == 7
    assert (supervisor.sets["c.3"].state, supervisor.drains) == (State.READY, [])
    assert await supervisor.told("reload", "c", {"timeout_s": 30}) == (200, "")
    assert "c.3" not in supervisor.sets
    assert supervisor.drains == [("c.3", 30, None)]
    assert [replica.name for replica in supervisor.launched if replica.exited.done()] == ["c.3"]


async def test_a_version_that_is_gone_still_accepts_what_was_given_to_it_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater_server.supervisor.replacement.CHOSEN_S", 600)

    supervisor = Supervisor(versions(), allow_load="any")
    await supervisor.start()
    assert await supervisor.told("reload", "c", {"versions": {"3": {}}}) == (200, "")
    reloading = asyncio.ensure_future(supervisor.told("reload", "c", {}))
    await until(lambda: "3" not in supervisor.deployments.config.deployments["c"].versions)
    assert (supervisor.sets["c.3"].state, supervisor.drains) == (State.READY, [])
    reloading.cancel()


async def test_a_reload_that_changes_a_version_replaces_only_its_replicas() -> None:
    supervisor = Supervisor(versions(), allow_load="any")
    await supervisor.start()
    assert await supervisor.told("reload", "c", {"versions": {"1": {"options": {"weights": "new"}}}}) == (200, "")
    assert [replica.name for replica in supervisor.launched][3:] == ["c.1"]
    assert list(supervisor.sets["c.1"].ready) == ["c.1-3"]


async def test_a_version_that_does_not_start_changes_nothing() -> None:
    supervisor = Supervisor(versions(), allow_load="any")
    await supervisor.start()
    supervisor.failing.add("c.3")
    config = {"versions": {"3": {}}, "traffic": {"3": 1}}
    status, error = await supervisor.told("reload", "c", config)
    assert (status, "the previous configuration still serves" in error) == (500, True)
    assert set(supervisor.sets) == {"c.1", "c.2"}
    assert supervisor.deployments.config.deployments["c"].traffic is None


async def test_a_plain_reload_replaces_all_versions_and_unload_takes_all_with_it() -> None:
    supervisor = Supervisor(versions())
    await supervisor.start()
    assert await supervisor.told("reload", "c") == (200, "")
    assert [replica.name for replica in supervisor.launched][3:] == ["c.1", "c.2", "c.2"]
    assert await supervisor.told("unload", "c") == (200, "")
    assert {one.state for one in supervisor.sets.values()} == {State.UNAVAILABLE}
    assert supervisor.composites["c"].is_set_aside
    assert (await shared(supervisor, "promote", version="2")).status == 200
    assert await supervisor.told("load", "c") == (200, "")
    assert supervisor.composites["c"].state is State.READY


async def test_a_version_is_scaled_but_neither_loaded_nor_unloaded_alone() -> None:
    supervisor = Supervisor(versions())
    await supervisor.start()
    status, error = await supervisor.told("unload", "c.2")
    assert (status, "it is a version of `c`" in error) == (409, True)
    answer = await supervisor.lifecycle.answer(Command(7, "scale", "c.2", {"min": 3, "max": 3}))
    assert (answer.status, len(supervisor.sets["c.2"].ready)) == (200, 3)
    answer = await supervisor.lifecycle.answer(Command(7, "scale", "c", {"min": 3, "max": 3}))
    assert "its versions have replicas" in answer.content["error"]


async def test_promote_and_rollback_take_effect_at_once_and_say_so() -> None:
    supervisor = Supervisor({**versions(traffic={"1": 0.95, "2": 0.05}), **one()})
    await supervisor.start()
    answer = await shared(supervisor, "promote", version="2")
    assert answer.content == {"name": "c", "state": "READY", "traffic": {"1": 0.0, "2": 1.0}, "default": "2"}
    answer = await shared(supervisor, "rollback")
    assert answer.content["traffic"] == {"1": 0.95, "2": 0.05}
    refused = await shared(supervisor, "rollback")
    assert refused.status == 409
    assert "rolled back at an operator's request, from " in refused.content["error"]
    answer = await shared(supervisor, "rollback", undo=True)
    assert answer.content["traffic"] == {"1": 0.0, "2": 1.0}
    assert (await shared(supervisor, "rollback", undo=True)).status == 409
    assert (await shared(supervisor, "promote", version="3")).status == 409
    answer = await supervisor.lifecycle.answer(Command(7, "rollback", "a"))
    assert (answer.status, answer.content["error"]) == (
        409, "model `a`: expected a deployment with `versions`; it has none",
    )  # fmt: skip
    assert len(supervisor.launched) == 4


async def test_a_load_for_which_there_is_no_room_changes_no_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_room(*_: Any) -> None:
        raise MemoryBudgetExceeded("memory of the host: a replica takes 2 GiB")

    supervisor = Supervisor(versions(traffic={"1": 0.95, "2": 0.05}))
    await supervisor.start()
    assert (await shared(supervisor, "promote", version="2")).status == 200
    assert await supervisor.told("unload", "c") == (200, "")
    monkeypatch.setattr(supervisor.memory, "reserve", no_room)
    assert (await supervisor.told("load", "c", {"traffic": {"1": 0.5, "2": 0.5}}))[0] == 409
    answer = await shared(supervisor, "rollback")
    assert answer.content["traffic"] == {"1": 0.95, "2": 0.05}
