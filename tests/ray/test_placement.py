"""On which nodes replicas are, among actors of others that are unevenly spread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.ray.conftest import Served
from tests.ray.raylets import CPUS, Raylets, gateway, hosts, raylets, stop_cluster
from tests.running import wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

DEPLOYMENTS = {
    "scale": {"model": "headwater.zoo.scale:Scale", "replicas": 3},
    "packed": {"model": "headwater.zoo.scale:Scale", "replicas": 3, "device": {"pack": True}},
}
TAKE = """
import ray, sys
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(address=sys.argv[1], namespace="others", log_to_driver=False)

class Taking:
    def here(self):
        pass

for number, (node, cpus) in enumerate(zip(sys.argv[2::2], sys.argv[3::2])):
    kind = ray.remote(Taking).options(
        name=f"{node}-{cpus}-{number}", lifetime="detached", num_cpus=float(cpus),
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    ray.get(kind.remote().here.remote())
"""
"""Starts actors of somebody else: node and CPUs of each."""
DEMAND = """
import sys
from ray.autoscaler.v2.sdk import get_cluster_status

demand = get_cluster_status(sys.argv[1]).resource_demands.ray_task_actor_demand
print(sum(one.count for asked in demand for one in asked.bundles_by_count))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A cluster of three nodes and their head, with three small actors on the first node and one on the second."""
    pytest.importorskip("ray", reason="needs Ray: run `make test-ray`")
    folder = tmp_path_factory.mktemp("ray")
    with raylets(3) as found:
        take(found, *((at, 0.5) for at in (0, 0, 0, 1)))
        try:
            with gateway(found.address, folder, DEPLOYMENTS) as serving:
                yield Served(found, serving, serving)
        finally:
            stop_cluster(found.address)


def python(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def take(raylets: Raylets, *wanted: tuple[int, float]) -> None:
    """Have actors of somebody else take so many CPUs of nodes, which are numbered."""
    python(TAKE, raylets.address, *(str(word) for at, cpus in wanted for word in (raylets.nodes[at].node_id, cpus)))


def counts(served: Served, model: str) -> list[int]:
    """How many replicas of a model each node has."""
    found = {one.pid for one in hosts(served.address, model)}
    return [sum(one.pid in found for one in served.raylets.tree(node)) for node in served.raylets.nodes]


def test_each_of_three_nodes_has_one_of_three_replicas(served: Served) -> None:
    assert counts(served, "scale") == [1, 1, 1]
    hosts(served.address, "scale")[0].kill()
    wait_for(lambda: served.serving.replicas() == 2)
    wait_for(lambda: served.serving.replicas() == 3, 30, "another replica")
    assert counts(served, "scale") == [1, 1, 1]
    assert served.serving.command("reload").status_code == 200
    assert counts(served, "scale") == [1, 1, 1]


def test_replicas_that_are_packed_are_on_one_node(served: Served) -> None:
    assert sorted(counts(served, "packed")) == [0, 0, 3]


def test_the_index_says_where_replicas_are(served: Served) -> None:
    address = served.raylets.nodes[0].node_ip_address  # all nodes are this machine
    index = {one["name"]: one for one in served.serving.client.get("/v2/repository/index").json()}
    assert index["scale"]["nodes"] == {address: 3}
    status = served.serving.client.get("/v2/status").json()
    assert {one["node"] for model in status["deployments"] for one in model["replica_list"]} == {address}


def test_one_that_no_node_has_capacity_for_is_known_to_rays_autoscaler(served: Served) -> None:
    ours = [sum(both) for both in zip(counts(served, "scale"), counts(served, "packed"), strict=True)]
    free = [CPUS - taken - number for taken, number in zip((1.5, 0.5, 0), ours, strict=True)]
    take(served.raylets, *zip(range(3), (free[0], free[1], free[2] - 1), strict=True))  # which leaves one
    answers: list[httpx.Response] = []
    scaling = threading.Thread(target=lambda: answers.append(served.serving.command("scale", body={"replicas": 5})))
    scaling.start()
    wait_for(lambda: python(DEMAND, served.raylets.address) == "1", 60, "one to wait", every_s=1)
    served.raylets.nodes.append(served.raylets.add())
    scaling.join(60)
    assert answers[0].status_code == 200, answers[0].text
    assert counts(served, "scale") == [1, 1, 2, 1]
