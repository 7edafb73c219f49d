"""Three raylets for each module, and two gateways, with TLS between all: run by ``make test-ray``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.certificates import authority, issue
from tests.ray.raylets import Gateway, Raylets, agents, gateway, hosts, raylets, stop_cluster, supervisors
from tests.running import wait_for

DEPLOYMENTS: dict[str, Any] = {
    "scale": {"model": "headwater.zoo.scale:Scale", "replicas": 2},
    "faulty": {"model": "tests.services.faulty:Faulty", "replicas": 2, "batching": {"max_batch_size": 4}},
    "pieces": {"model": "tests.services.light:Pieces", "options": {"count": 10_000, "interval_s": 0.02}},
}


class Served(NamedTuple):
    """A cluster of three nodes, one of them the head, and what is served on it."""

    raylets: Raylets
    serving: Gateway
    """Which started it."""
    joined: Gateway

    @property
    def address(self) -> str:
        """Of Ray's head."""
        return self.raylets.address

    def make_whole(self) -> None:
        """Have two nodes again, and a replica of ``scale`` on each."""
        self.raylets.keep(2)
        wait_for(lambda: self.serving.replicas() == 2, 90, "two replicas", every_s=0.1)
        self.spread()

    def spread(self) -> None:
        """Have a replica of ``scale`` on each node, if there was no other when one was placed."""
        if not self.is_spread():
            assert self.serving.command("reload").status_code == 200
        assert self.is_spread()

    def is_spread(self) -> bool:
        """Whether each node has a replica of ``scale``."""
        of_scale = set(hosts(self.address, "scale"))
        return all(of_scale & set(self.raylets.tree(node)) for node in self.raylets.nodes)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A cluster with TLS, on which `DEPLOYMENTS` are served. Tests must leave it whole."""
    pytest.importorskip("ray", reason="needs Ray: run `make test-ray`")
    with raylets() as found, serve(found, DEPLOYMENTS, tmp_path_factory.mktemp("ray")) as served:
        yield served


@contextlib.contextmanager
def serve(found: Raylets, deployments: dict[str, Any], folder: Path) -> Iterator[Served]:
    """Serve deployments over two gateways with TLS, and stop all of it afterwards, if Ray still knows it then."""
    tls = issue(authority(folder), folder / "peer")
    try:
        with (
            gateway(found.address, folder, deployments, tls=tls) as serving,
            gateway(found.address, folder, None) as joined,
        ):
            served = Served(found, serving, joined)
            assert served.is_spread()
            yield served
    finally:
        if found.knows_all:
            stop_cluster(found.address)
            assert [*hosts(found.address), *agents(found.address), *supervisors(found.address)] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For files of a module's tests."""
    return tmp_path_factory.mktemp("files")
