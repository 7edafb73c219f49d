"""Ray's head is gone for a while, or for good, with a storage and without: 20 requests a second for `scale` go on."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.conftest import Served, serve
from tests.ray.raylets import Gateway, Load, agents, hosts, raylets, redis, supervisors
from tests.running import wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

SCALE: dict[str, Any] = {"scale": {"model": "headwater.zoo.scale:Scale", "replicas": 2}}
STEADY = 40
"""Answers before and after each loss."""
AWAY_S = 12.0
PATIENCE_S = 15
"""How long Ray's processes wait for a head in the tests without storage; by default it is 60 s."""
GONE = "doesn't answer: running replicas serve, but no replica is placed, replaced or scaled"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A cluster whose head has a storage. Tests must leave it whole."""
    pytest.importorskip("ray", reason="needs Ray: run `make test-ray`")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server, of Debian's package of that name")
    folder = tmp_path_factory.mktemp("head")
    with redis() as storage, raylets(storage=storage) as found, serve(found, SCALE, folder) as served:
        yield served


def index(gateway: Gateway) -> dict[str, Any]:
    """What an operator reads of `scale`."""
    found: dict[str, Any] = gateway.client.post("/v2/repository/index").json()[0]
    return found


def says(gateway: Gateway, words: str) -> bool:
    """Whether a gateway says these words of `scale`; empty: that nothing is wrong."""
    found = index(gateway).get("shortage", "")
    return words in found if words else not found


def say_that_it_is_gone(served: Served) -> None:
    """Wait until both gateways say that the head is gone, though they are ready."""
    for one in (served.serving, served.joined):
        wait_for(functools.partial(says, one, GONE), 20, "the gateways to say it")
        assert served.address in index(one)["shortage"]
        assert one.log.read_text().count(GONE) >= 1
        assert one.is_ready()


def say_nothing(served: Served) -> None:
    """Wait until both gateways no longer say that anything is wrong."""
    for one in (served.serving, served.joined):
        wait_for(functools.partial(says, one, ""), 20, "the gateways to say nothing")


def wait_until(moment_s: float) -> None:
    """Wait until this moment of the monotonic clock: the time itself is what is tested."""
    wait_for(lambda: time.monotonic() >= moment_s, AWAY_S + 5)


def test_a_replica_is_lost_while_the_head_is_away(stored: Served) -> None:
    answers: list[httpx.Response] = []
    with Load([stored.serving.url, stored.joined.url]) as load:
        wait_for(lambda: len(load.outcomes) >= STEADY)
        stored.raylets.kill_head()
        gone_s = time.monotonic()
        os.killpg(hosts(stored.address, "scale")[0].pid, signal.SIGKILL)
        say_that_it_is_gone(stored)
        assert (index(stored.joined)["replicas"]["ready"], index(stored.joined)["replicas"]["wanted"]) == (1, 2)
        ordering = threading.Thread(target=lambda: answers.append(stored.joined.command("scale", body={"replicas": 3})))
        ordering.start()
        wait_until(gone_s + AWAY_S)
        assert (stored.serving.replicas(), answers) == (1, [])
        stored.raylets.restart_head()
        back_s = time.monotonic()
        wait_for(lambda: stored.serving.replicas() == 3, 90, "three replicas")
        whole_s = time.monotonic() - back_s
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) >= count + STEADY)
    print(f"\nhead back, a replica lost: whole {whole_s:.1f} s, {len(load.failed)} of {len(load.outcomes)} failed")
    assert load.failed == []
    ordering.join()
    assert (answers[0].status_code, answers[0].json()["replicas"]["max"]) == (200, 3)  # as was ordered meanwhile
    say_nothing(stored)
    assert stored.joined.command("scale", body={"replicas": 2}).status_code == 200


def test_the_supervisor_is_lost_while_the_head_is_away(stored: Served) -> None:
    before = {one.pid for one in hosts(stored.address)}
    with Load([stored.serving.url, stored.joined.url]) as load:
        wait_for(lambda: len(load.outcomes) >= STEADY)
        stored.raylets.kill_head()
        gone_s = time.monotonic()
        supervisors(stored.address)[0].kill()
        say_that_it_is_gone(stored)
        answer = stored.joined.command("scale", body={"replicas": 3})
        assert answer.status_code == 503
        assert "the cluster's supervisor is gone; expected it back soon" in answer.json()["error"]
        wait_until(gone_s + AWAY_S)
        stored.raylets.restart_head()
        back_s = time.monotonic()
        wait_for(lambda: stored.joined.command("load").status_code == 409, 90, "the next supervisor")
        print(f"\nhead back, the supervisor lost: whole {time.monotonic() - back_s:.1f} s")
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) >= count + STEADY)
    assert load.failed == []
    assert {one.pid for one in hosts(stored.address)} == before
    say_nothing(stored)


def test_a_gateway_that_starts_while_the_head_is_away_says_so(stored: Served) -> None:
    command = [sys.executable, "-m", "headwater_server", "join", "--address", stored.address, "--port", "0"]
    stored.raylets.kill_head()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    finally:
        stored.raylets.restart_head()
    assert done.returncode == 1
    assert f"cluster.address: no Ray at '{stored.address}': no answer within 30 s; start one" in done.stderr
    say_nothing(stored)


@pytest.mark.parametrize("is_restarted", [False, True], ids=["gone for good", "started anew"])
def test_without_a_storage_it_is_served_as_long_as_ray_lets_it(tmp_path: Path, is_restarted: bool) -> None:
    pytest.importorskip("ray", reason="needs Ray: run `make test-ray`")
    with (
        raylets(gcs_rpc_server_reconnect_timeout_s=PATIENCE_S) as found,
        serve(found, SCALE, tmp_path) as served,
        Load([served.serving.url, served.joined.url]) as load,
    ):
        wait_for(lambda: len(load.outcomes) >= STEADY)
        found.kill_head()
        gone_s = time.monotonic()
        if is_restarted:
            found.restart_head()
            words = "was restarted without its stored state"
        else:
            words = GONE
        for one in (served.serving, served.joined):
            wait_for(functools.partial(says, one, words), 30, "the gateways to say it")
        supervisor = supervisors(found.address)[0]
        if is_restarted:
            wait_for(lambda: not hosts(found.address), 120, "Ray to end the replicas")
            wait_for(lambda: not served.joined.is_ready(), what="a gateway without replicas not to be ready")
        else:
            wait_for(lambda: not supervisor.is_running(), PATIENCE_S + 20, "Ray to end the supervisor")
            count = len(load.outcomes)
            wait_for(lambda: len(load.outcomes) >= count + 5 * STEADY)
            assert (load.failed, served.serving.replicas(), served.joined.replicas()) == ([], 2, 2)
        print(f"\n{words}: {time.monotonic() - gone_s:.0f} s, {len(load.failed)} of {len(load.outcomes)} failed")
        assert all(one.at_s - gone_s > PATIENCE_S for one in load.failed)
    wait_for(lambda: not [*hosts(found.address), *agents(found.address)], 30, "the replicas to end with their raylets")
