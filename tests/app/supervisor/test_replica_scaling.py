"""More and fewer replicas of a deployment: by command, by load, as memory allows. The replicas are no processes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headwater_server.config.schema import Deployment, Server
from headwater_server.control.load import DeploymentLoad, LoadReport, together
from headwater_server.control.routing import State
from headwater_server.process.machine import HOST
from headwater_server.supervisor.memory_budget import ReplicaMemory
from tests.app.supervisor.stand_in import BUSY, GRAPH, QUIET, Machine, one, range_of, settle, started, until


def configs(machine: Machine) -> list[Deployment]:
    """What each replica was started with."""
    return [replica.config for replica in machine.launched if replica.config is not None]


async def test_workers_are_told_how_to_batch_and_have_their_share_of_what_is_bounded() -> None:
    batching = {"max_queue_size": 9, "max_queue_delay_ms": 3, "priority_weights": {1: 2, 10: 1}, "max_padding": 0.2}
    route = (await started(Machine(one(batching=batching)))).route(2)
    assert (route.max_queue_size, route.max_queue_delay_ms, route.max_padding) == (5, 3, 0.2)
    assert route.priority_weights == {1: 2, 10: 1}
    assert (await started(Machine(one()))).route(2).max_padding == 0


async def test_how_busy_replicas_are_is_told_of_all_deployments_that_have_some() -> None:
    machine = Machine({**one(replicas=2, instances=2), "b": {"model": "m:B"}})
    machine.failing.add("b")
    await started(machine, 2)
    for computing, share in ((0.0, 0.0), (1.0, 0.25), (4.0, 1.0), (9.0, 1.0)):  # by two workers at once, too
        machine.loads = {"a": DeploymentLoad("a", 0, 0.0, computing, 1)}
        await machine.tick(0.5)
        assert machine.utilization == {"a": share}
    machine.loads = {}
    await machine.tick(0.5)
    assert machine.utilization == {"a": 0.0}
    await machine.told("unload", "a")
    await machine.tick(0.5)
    assert machine.utilization == {}


# By command


async def test_a_command_adds_replicas_and_takes_the_newest_away_once_they_have_finished() -> None:
    machine = Machine(one(drain_timeout_s=7))
    a = await started(machine)
    answer = await machine.scale("a", 3)
    assert (answer.status, answer.content["replicas"]) == (200, {"ready": 3, "wanted": 3, "min": 3, "max": 3})
    assert list(a.ready) == ["a-0", "a-1", "a-2"]
    machine.drain_gate = asyncio.Event()
    scaling = asyncio.create_task(machine.scale("a", 1))
    await settle()
    # They get nothing new, and are there until they have finished.
    route = a.route(1)
    assert [one.id for one in route.replicas] == ["a-0"]
    assert {one.id for one in route.retiring} == {"a-1", "a-2"}
    assert machine.alive == ["a-0", "a-1", "a-2"]
    machine.drain_gate.set()
    answer = await scaling
    assert (answer.status, answer.content["replicas"]["ready"], answer.content["leftovers"]) == (200, 1, [])
    assert [(name, timeout_s, sorted(ids or ())) for name, timeout_s, ids in machine.drains] == [
        ("a", 7, ["a-1", "a-2"])
    ]
    assert (machine.alive, a.route(1).retiring, a.state) == (["a-0"], (), State.READY)


async def test_of_a_scaling_in_which_one_replica_fails_nothing_stays() -> None:
    machine = Machine(one())
    a = await started(machine)
    machine.auto_ready = False
    scaling = asyncio.create_task(machine.scale("a", 3))
    await until(lambda: len(machine.launched) == 3)
    machine.launched[1].get_ready()
    machine.launched[2].end("out of memory")
    answer = await scaling
    assert (answer.status, "out of memory" in answer.content["error"]) == (500, True)
    assert (machine.alive, list(a.ready), a.wanted, a.bounds.max, a.state) == (["a-0"], ["a-0"], 1, 1, State.READY)


async def test_what_an_operator_set_stays_over_a_crash_a_reload_and_an_unload_but_not_over_another_configuration() -> (
    None
):
    machine = Machine(one())
    a = await started(machine)
    await machine.scale("a", 2)
    machine.launched[0].end("killed")
    await until(lambda: list(a.ready) == ["a-1", "a-2"])
    assert (await machine.told("reload", "a"))[0] == 200
    assert (list(a.ready), machine.alive) == (["a-3", "a-4"], ["a-3", "a-4"])
    assert (await machine.told("unload", "a"))[0] == 200
    assert machine.alive == []
    assert (await machine.told("load", "a"))[0] == 200
    assert len(a.ready) == 2
    assert (await machine.told("reload", "a", {"replicas": 3}))[0] == 200
    assert (len(a.ready), a.bounds.min, len(machine.alive)) == (3, 3, 3)


async def test_what_is_not_there_or_not_loaded_or_has_no_replicas_is_not_scaled() -> None:
    machine = Machine({**one(), "p": {"pipeline": GRAPH}, "shared": {"model": "m:S"}})
    await started(machine)
    await settle()
    assert (await machine.scale("nothing", 2)).status == 404
    answer = await machine.scale("p", 2)
    assert answer.status == 409
    assert answer.content["error"].endswith("expected one of `p.trunk`, `p.head`")
    assert (await machine.scale("p.trunk", 2)).status == 200
    await machine.do("unload", "a")
    answer = await machine.scale("a", 2)
    assert (answer.status, "expected it loaded" in answer.content["error"]) == (409, True)
    assert len(machine.sets["a"].ready) == 0


async def test_one_command_at_a_time_a_pipeline_and_its_steps_together() -> None:
    machine = Machine({"p": {"pipeline": GRAPH}, "shared": {"model": "m:S"}})
    await started(machine, name="p.trunk")
    await settle()
    machine.auto_ready = False
    scaling = asyncio.create_task(machine.scale("p.trunk", 2))
    await settle()
    for action, name in (("reload", "p"), ("unload", "p")):
        status, error = await machine.told(action, name)
        assert (status, "`p.trunk`: scale is under way" in error) == (409, True)
    assert (await machine.scale("p.trunk", 3)).status == 409
    machine.launched[-1].get_ready()
    assert (await scaling).status == 200
    reloading = asyncio.create_task(machine.told("reload", "p"))
    await settle()
    assert (await machine.scale("p.trunk", 3)).status == 409
    for replica in machine.launched:
        if not replica.ready.done():
            replica.get_ready()
    await settle()
    machine.auto_ready = True
    assert (await reloading)[0] == 200
    assert len(machine.sets["p.trunk"].ready) == 2


# Memory


async def test_beyond_the_budget_a_scaling_is_refused_with_figures_and_changes_nothing() -> None:
    machine = Machine(one(), limit=350)
    a = await started(machine)
    assert (await machine.scale("a", 3)).status == 200
    answer = await machine.scale("a", 4)
    assert answer.status == 409
    assert answer.content["error"].startswith("no capacity for another replica of `a`: memory of the machine")
    assert (len(machine.launched), a.wanted, a.bounds.max, a.shortage) == (3, 3, 3, "")
    answer = await machine.scale("a", 2)
    assert (answer.status, len(machine.alive)) == (200, 2)
    assert (await machine.scale("a", 3)).status == 200


async def test_a_reload_beside_needs_room_for_both_and_recreate_does_not() -> None:
    machine = Machine(one(replicas=2), limit=350)
    a = await started(machine, 2)
    status, error = await machine.told("reload", "a")
    assert status == 409
    assert "no capacity for 2 more replicas of `a`" in error
    assert "expected `strategy: recreate`" in error
    assert (a.state, list(a.ready), len(machine.launched)) == (State.READY, ["a-0", "a-1"], 2)
    assert (await machine.told("reload", "a", {"strategy": "recreate"}))[0] == 200
    assert len(a.ready) == 2


async def test_a_load_for_which_there_is_no_room_leaves_the_state_as_it_was() -> None:
    machine = Machine({**one(), "b": {"model": "m:B", "memory": 300}}, limit=350)
    b = machine.sets["b"]
    b.start()
    await until(lambda: len(b.ready) == 1)
    before = machine.sets["a"].state
    assert await machine.told("unload", "b") == (200, "")
    machine.sets["a"].start()
    await until(lambda: len(machine.sets["a"].ready) == 1)
    assert before is State.LOADING
    states = list(machine.states["b"])
    status, error = await machine.told("load", "b")
    assert (status, "it takes 0 MiB" in error) == (409, True)
    assert (b.state, machine.states["b"]) == (State.UNAVAILABLE, states)


async def test_the_first_replica_shows_what_one_takes_before_others_start() -> None:
    machine = Machine(one(replicas=3), limit=1000)
    machine.sizes["a"] = 400
    machine.auto_ready = False
    a = machine.sets["a"]
    a.start()
    await until(lambda: len(machine.launched) == 1)
    for _ in range(5):
        await settle()
    assert len(machine.launched) == 1
    machine.launched[0].get_ready()
    await until(lambda: len(machine.launched) == 2)
    machine.launched[1].get_ready()
    await until(lambda: len(a.ready) == 2)
    await until(lambda: bool(a.shortage))
    # The third would cross the budget: the others serve, and it is told why there are no more.
    assert (a.state, len(machine.launched), a.route(1).shortage) == (State.READY, 2, a.shortage)
    machine.launched[0].end("killed")
    await until(lambda: len(machine.launched) == 3)
    machine.launched[2].get_ready()
    await until(lambda: len(a.ready) == 2)


async def test_a_replica_that_is_too_large_stays_if_it_is_the_first(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(one(replicas=2), limit=300)
    machine.sizes["a"] = 400
    a = await started(machine)
    await until(lambda: bool(a.shortage))
    assert (list(a.ready), len(machine.launched)) == (["a-0"], 1)
    assert "this replica stays, and no more are started" in caplog.text


async def test_replicas_go_where_there_are_fewest_and_leave_where_there_are_most() -> None:
    machine = Machine(one(device=["cuda:0", "cuda:1"], replicas=3, memory=100), limit=10_000)
    a = await started(machine, 3)
    placed = [str(config.device) for config in configs(machine)]
    assert sorted(placed) == ["cuda:0", "cuda:0", "cuda:1"]
    await machine.scale("a", 2)
    left = [placed[int(id.removeprefix("a-"))] for id in a.ready]
    assert sorted(left) == ["cuda:0", "cuda:1"]


async def test_a_full_gpu_sends_replicas_to_the_other() -> None:
    fields = {"device": ["cuda:0", "cuda:1"], "replicas": 3, "memory": 100}
    machine = Machine(one(**fields), limit=10_000, gpus={"GPU 0": 250, "GPU 1": 150})
    a = await started(machine, 3)
    placed = [str(config.device) for config in configs(machine)]
    assert sorted(placed) == ["cuda:0", "cuda:0", "cuda:1"]
    answer = await machine.scale("a", 4)
    assert (answer.status, len(a.ready)) == (409, 3)


@pytest.mark.parametrize(
    ("limit", "bytes_of_host", "gpu"), [(None, 800, 1600), (0.5, 500, 1000), (700, 700, 1600), (1.0, 1000, 2000)]
)
def test_a_part_bounds_machine_and_gpus_and_a_size_the_machine(
    limit: float | int | None, bytes_of_host: int, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater_server.supervisor.memory_budget.host_capacity", lambda: 1000)
    monkeypatch.setattr("headwater_server.supervisor.memory_budget.gpu_capacities", lambda: {"GPU 0": 2000})
    server = Server() if limit is None else Server.model_validate({"memory_limit": limit})
    assert ReplicaMemory.of(server).budget.limits == {HOST: bytes_of_host, "GPU 0": gpu}


# By load


async def test_load_brings_replicas_up_to_the_most_and_quiet_takes_them_away() -> None:
    machine = Machine(range_of(1, 3))
    a = await started(machine)
    machine.loads["a"] = BUSY
    await machine.tick(30)
    assert len(a.ready) == a.wanted == 3
    machine.loads["a"] = QUIET
    while len(machine.alive) > 1:  # an end is looked into in a thread
        await machine.tick(1)
    await machine.tick(60)
    assert (len(a.ready), len(machine.alive), a.wanted) == (1, 1, 1)


async def test_load_that_nobody_reports_changes_nothing() -> None:
    machine = Machine(range_of(1, 3))
    a = await started(machine)
    machine.loads["a"] = BUSY
    await machine.tick(30)
    machine.loads["a"] = QUIET
    await machine.tick(1.5)  # not long enough
    machine.loads.clear()
    await machine.tick(200)
    machine.loads["a"] = QUIET
    await machine.tick(1.5)  # nor is it now
    assert (len(a.ready), len(machine.alive), a.wanted) == (3, 3, 3)


async def test_without_a_range_load_changes_nothing() -> None:
    machine = Machine(one(replicas=2))
    a = await started(machine, 2)
    machine.loads["a"] = BUSY
    await machine.tick(30)
    machine.loads.clear()
    await machine.tick(200)
    assert len(a.ready) == len(machine.launched) == 2


async def test_where_there_is_no_room_it_is_told_once_until_there_is(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(range_of(1, 3), limit=250)
    a = await started(machine)
    machine.loads["a"] = BUSY
    while machine.measurements < 6:  # each in a thread; that of the second replica is the last with room
        await machine.tick(0.5)
    assert (len(a.ready), a.wanted) == (2, 2)
    assert "no capacity for another replica of `a`" in a.route(1).shortage
    assert caplog.text.count("no capacity for another replica of `a`") == 1
    machine.launched[0].is_reachable = False
    await machine.tick(1)
    assert a.route(1).shortage, "a replica out of reach has ended it"
    machine.launched[0].is_reachable = True
    machine.launched[0].end("killed")
    await until(lambda: list(a.ready) == ["a-1", "a-2"])
    assert a.route(1).shortage, "a replacement has ended it"
    machine.loads["a"] = QUIET
    await machine.tick(1)
    assert a.route(1).shortage == ""


async def test_a_command_under_way_keeps_load_from_changing_anything() -> None:
    machine = Machine(range_of(1, 3))
    a = await started(machine)
    machine.auto_ready = False
    reloading = asyncio.create_task(machine.told("reload", "a"))
    await settle()
    machine.loads["a"] = BUSY
    await machine.tick(30)
    assert len(machine.launched) == 2
    machine.launched[1].get_ready()
    assert await reloading == (200, "")
    assert (list(a.ready), a.wanted) == (["a-1"], 1)


async def test_an_unload_ends_what_was_about_to_leave_too() -> None:
    machine = Machine(range_of(1, 2))
    a = await started(machine)
    machine.loads["a"] = BUSY
    await machine.tick(5)
    assert len(a.ready) == 2
    machine.loads["a"] = QUIET
    machine.drain_gate = asyncio.Event()
    await machine.tick(5)
    assert (len(a.ready), len(machine.alive)) == (1, 2)
    # The unload has waited for all of its requests, and not for the one that was about to leave.
    assert await machine.told("unload", "a") == (200, "")
    assert (machine.alive, a.state) == ([], State.UNAVAILABLE)
    machine.drain_gate.set()
    await machine.tick(30)
    assert machine.alive == []


async def test_a_replica_that_dies_while_it_leaves_is_not_replaced() -> None:
    machine = Machine(range_of(1, 2))
    a = await started(machine)
    machine.loads["a"] = BUSY
    await machine.tick(5)
    machine.loads["a"] = QUIET
    machine.drain_gate = asyncio.Event()
    await machine.tick(5)
    machine.launched[1].end("killed")
    await settle()
    machine.drain_gate.set()
    await settle()
    assert (list(a.ready), machine.alive, a.route(1).retiring) == (["a-0"], ["a-0"], ())


async def test_a_reload_while_load_starts_another_replica_replaces_both() -> None:
    machine = Machine(range_of(1, 2))
    a = await started(machine)
    machine.auto_ready = False
    machine.loads["a"] = BUSY
    await machine.tick(5)
    assert (len(machine.launched), len(a.ready)) == (2, 1)
    reloading = asyncio.create_task(machine.told("reload", "a"))
    await settle()
    for replica in machine.launched[2:]:
        replica.get_ready()
    assert await reloading == (200, "")
    assert (list(a.ready), machine.alive) == (["a-2", "a-3"], ["a-2", "a-3"])


async def test_load_that_calls_for_what_cannot_start_leaves_what_serves_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    machine = Machine(range_of(1, 2))
    a = await started(machine)
    machine.failing.add("a")
    machine.loads["a"] = BUSY
    await machine.tick(5)
    await until(lambda: a.wanted == 1 and len(machine.alive) == 1)
    tried = len(machine.launched)
    await machine.tick(60)
    assert (a.state, list(a.ready), len(machine.launched)) == (State.READY, ["a-0"], tried)
    assert a.shortage == "another replica did not start: RuntimeError: no weights here"


async def test_a_replica_that_was_given_up_is_still_missing_once_another_was_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    machine = Machine(one(replicas=2))
    a = await started(machine, 2)
    machine.failing.add("a")
    machine.launched[0].end("killed")
    await until(lambda: bool(a.shortage))
    machine.failing.clear()
    machine.launched[1].end("killed")
    await until(lambda: list(a.ready) == [machine.launched[-1].id])
    assert (a.wanted, a.shortage) == (2, "another replica did not start: RuntimeError: no weights here")


async def test_what_lost_too_many_replicas_keeps_trying_for_as_many_as_there_are_at_least(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    machine = Machine(range_of(2, 3, max_crashes=1))
    a = await started(machine, 2)
    machine.auto_ready = False
    machine.launched[0].end("killed by SIGKILL")
    await until(lambda: len(machine.launched) == 3)
    assert (a.state, a.wanted, list(a.ready)) == (State.READY, 2, ["a-1"])
    assert "trying again slowly" in a.shortage
    machine.launched[2].get_ready()
    await until(lambda: len(a.ready) == 2)


def test_the_loads_of_all_workers_are_summed() -> None:
    one_worker = LoadReport([DeploymentLoad("a", 3, 0.5, 1.5, 4), DeploymentLoad("b", 1, 0.1, 0.5, 1)])
    other = LoadReport([DeploymentLoad("a", 2, 0.7, 0.25, 3)])
    assert together([one_worker, other]) == {
        "a": DeploymentLoad("a", 5, 0.7, 1.75, 7),
        "b": DeploymentLoad("b", 1, 0.1, 0.5, 1),
    }
