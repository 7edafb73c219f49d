"""What dies on a cluster, and what becomes of requests meanwhile: 20 a second for `scale`, over both gateways."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.ray.conftest import Served
from tests.ray.raylets import Load, Outcome, agents, hosts, supervisors
from tests.running import wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

STEADY = 40
"""Answers before and after each loss."""


class Timed:
    """When a replica was out of the tables, and when there were two again, in seconds after the loss."""

    def __init__(self, served: Served, lose: Callable[[], Any], within_s: float) -> None:
        with Load([served.serving.url, served.joined.url]) as load:
            wait_for(lambda: len(load.outcomes) >= STEADY)
            began_s = time.monotonic()
            lose()
            wait_for(lambda: served.serving.replicas() < 2, 10, "a replica to be out of the table")
            self.out_s = time.monotonic() - began_s
            wait_for(lambda: served.serving.replicas() == 2, within_s, "two replicas")
            self.whole_s = time.monotonic() - began_s
            count = len(load.outcomes)
            wait_for(lambda: len(load.outcomes) >= count + STEADY)
        self.failed: list[Outcome] = load.failed
        self.count = len(load.outcomes)

    def report(self, what: str) -> None:
        """Print the figures."""
        figures = f"out {self.out_s:.2f} s, whole {self.whole_s:.1f} s, {len(self.failed)} of {self.count} failed"
        print(f"\n{what}: {figures}")


def one_agent(served: Served, model: str = "scale") -> psutil.Process:
    """The agent of a replica of a model."""
    host = one_host(served, model)
    return next(one for one in host.parents() if one in agents(served.address))


def one_host(served: Served, model: str = "scale") -> psutil.Process:
    """The host of a replica of a model."""
    return hosts(served.address, model)[0]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def node_with_replica(served: Served, *, of_supervisor: bool) -> Any:
    """A node with a replica, on which the supervisor is or isn't."""
    served.spread()
    (supervisor,) = supervisors(served.address)
    nodes = [node for node in served.raylets.nodes if (supervisor in served.raylets.tree(node)) is of_supervisor]
    if not nodes:
        pytest.skip("the supervisor is on the head")
    found = set(hosts(served.address, "scale"))
    return next(node for node in nodes if found & set(served.raylets.tree(node)))


def test_a_replicas_group_is_killed(served: Served) -> None:
    timed = Timed(served, lambda: os.killpg(one_host(served).pid, signal.SIGKILL), 10)
    timed.report("group killed")
    assert timed.failed == []


@pytest.mark.parametrize("is_stopped", [False, True], ids=["", "its agent is stopped"])
def test_a_replicas_actor_is_killed(served: Served, is_stopped: bool) -> None:
    agent = one_agent(served)
    held = [agent, *agent.children(recursive=True)]

    def kill() -> None:
        if is_stopped:
            agent.suspend()
        agent.parent().kill()

    timed = Timed(served, kill, 17)
    timed.report(f"actor killed{', agent stopped' * is_stopped}")
    assert timed.failed == []
    wait_for(lambda: not any(map(runs, held)), 10, "all of it to end")


def test_a_replicas_agent_is_killed(served: Served) -> None:
    timed = Timed(served, lambda: one_agent(served).kill(), 17)
    timed.report("agent killed")
    assert timed.failed == []


@pytest.mark.parametrize("holder", [False, True], ids=["process", "actor"])
def test_the_supervisor_is_killed_and_adopts_what_runs(served: Served, holder: bool) -> None:
    (supervisor,) = supervisors(served.address)
    before = {one.pid for one in hosts(served.address)}
    with Load([served.serving.url, served.joined.url]) as load:
        wait_for(lambda: len(load.outcomes) >= STEADY)
        began_s = time.monotonic()
        (supervisor.parent() if holder else supervisor).kill()
        supervisor.wait(10)

        def answers() -> bool:
            """Whether commands are carried out again: of these, it refuses to load what is loaded."""
            return served.joined.command("load").status_code == 409

        wait_for(answers, 20, "the next supervisor")
        took_s = time.monotonic() - began_s
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) >= count + STEADY)
    print(f"\nsupervisor's {'actor' if holder else 'process'} killed: whole {took_s:.1f} s, {len(load.failed)} failed")
    assert load.failed == []
    assert {one.pid for one in hosts(served.address)} == before


def test_the_supervisor_is_killed_while_a_replica_starts_and_none_is_doubled_or_lost(served: Served) -> None:
    os.killpg(one_host(served).pid, signal.SIGKILL)
    wait_for(lambda: served.serving.replicas() == 1)
    wait_for(lambda: len(hosts(served.address, "scale")) == 2, 20, "a start")
    supervisors(served.address)[0].kill()
    wait_for(lambda: served.serving.replicas() == 2, 40, "two replicas")
    wait_for(lambda: len(agents(served.address)) == 5, 20, "five agents, of which none is left over")
    assert len(hosts(served.address, "scale")) == 2


@pytest.mark.parametrize("turn", range(int(os.environ.get("HEADWATER_TURNS", "2"))))
def test_a_raylet_alone_is_killed_and_its_replicas_are_gone_before_others_serve(served: Served, turn: int) -> None:
    node = node_with_replica(served, of_supervisor=False)
    old = [one for one in served.raylets.tree(node) if one in hosts(served.address)]
    with Load([served.serving.url, served.joined.url]) as load:
        wait_for(lambda: len(load.outcomes) >= STEADY)
        served.raylets.raylet(node).kill()
        wait_for(lambda: served.serving.replicas() < 2)
        wait_for(lambda: served.serving.replicas() == 2, 40, f"two replicas, time {turn + 1}")
        left = [one for one in old if one.is_running()]
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) >= count + STEADY)
    assert (load.failed, left) == ([], [])
    served.make_whole()


@pytest.mark.parametrize("of_supervisor", [False, True], ids=["another", "of the supervisor"])
def test_a_node_is_killed(served: Served, of_supervisor: bool) -> None:
    node = node_with_replica(served, of_supervisor=of_supervisor)
    count = len(set(hosts(served.address)) & set(served.raylets.tree(node)))
    timed = Timed(served, lambda: served.raylets.kill(node), 30 if of_supervisor else 15)
    timed.report(f"node {'of the supervisor ' * of_supervisor}with {count} replicas killed")
    assert timed.failed == []
    served.make_whole()


def test_a_stream_outlives_a_pause_of_its_replicas_agent(served: Served) -> None:
    agent = one_agent(served, "pieces")
    with served.joined.client.stream("POST", "/v2/models/pieces/generate_stream", json={"x": [1.0] * 4}) as answer:
        assert answer.status_code == 200, answer.read()
        stream = answer.iter_lines()
        next(stream)
        agent.suspend()
        try:
            wait_for(lambda: served.joined.replicas("pieces") == 0, 10, "the replica to be out of reach")
        finally:
            agent.resume()
        wait_for(lambda: served.joined.replicas("pieces") == 1, 10, "the replica to be in reach")
        for _ in range(2 * STEADY):
            assert "error" not in next(stream)
    assert one_agent(served, "pieces") == agent


def test_a_node_hangs(served: Served) -> None:
    node = node_with_replica(served, of_supervisor=False)
    try:
        timed = Timed(served, lambda: served.raylets.stop(node), 60)
    finally:
        served.raylets.stop(node, signal.SIGCONT)
    timed.report("node hung")
    assert timed.out_s < 4
    assert len(timed.failed) <= 4  # what it held: two calls of each gateway
    wait_for(lambda: len(hosts(served.address, "scale")) == 2, 60, "the old to end")
    served.raylets.kill(node)
    served.make_whole()
