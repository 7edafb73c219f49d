"""Three raylets on this machine in place of three machines, what ends them, and gateways in front of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.servers import free_port
from tests.running import wait_for

__all__ = [
    "Gateway",
    "Load",
    "Outcome",
    "Raylets",
    "agents",
    "gateway",
    "hosts",
    "raylets",
    "redis",
    "stop_cluster",
    "supervisors",
]

START_S = 90.0
CPUS = 8
CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""As docs/ray.md recommends: a node that hangs is gone after some 4 s, rather than after a minute."""


class Raylets:
    """A Ray cluster: a head that has no CPUs for replicas, and nodes that have.

    Args:
        nodes: besides the head.
        storage: the address of a Redis that keeps the head's state; empty: it is in memory only.
        settings: of Ray, besides `CHECKS`.
        own_cores: whether each node has a core of its own, as machines have. Two vLLMs whose processes spin on the same
            two cores leave each other without time for 20 s and more.
    """

    def __init__(self, nodes: int, storage: str, settings: Mapping[str, Any], *, own_cores: bool = False) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, "_system_config": {**CHECKS, **settings}}
        if storage:
            head["external_addresses"] = [storage]
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        """Of the head. Ray itself forgets it while the head's state server is gone."""
        self.knows_all = True
        """Whether the head is there, with all that it ever knew."""
        self._has_storage = bool(storage)
        self._cores = itertools.cycle([{core} for core in os.sched_getaffinity(0)] if own_cores else [])
        self.nodes = [self.add() for _ in range(nodes)]

    def kill_head(self) -> None:
        """End what the head has besides a raylet: the server of the cluster's state (GCS)."""
        self._cluster.head_node.kill_gcs_server()
        self.knows_all = False

    def restart_head(self) -> None:
        """Start that server again, at the same address; with a storage it goes on where the last one stopped."""
        self._cluster.head_node.start_gcs_server()
        self.knows_all = self._has_storage

    def add(self) -> Any:
        """Another node."""
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, next(self._cores, ours))  # inherited by all that runs on the node
        try:
            return self._cluster.add_node(num_cpus=CPUS)
        finally:
            os.sched_setaffinity(0, ours)

    def keep(self, count: int) -> None:
        """See that there are so many nodes, after some were killed."""
        self.nodes = [node for node in self.nodes if psutil.pid_exists(self.raylet(node).pid) and self.tree(node)]
        while len(self.nodes) < count:
            self.nodes.append(self.add())

    @staticmethod
    def raylet(node: Any) -> Any:
        """The process of a node's raylet."""
        return node.all_processes["raylet"][0].process

    def tree(self, node: Any) -> list[psutil.Process]:
        """All that runs on a node: its raylet, and everything that it has started."""
        try:
            raylet = psutil.Process(self.raylet(node).pid)
            if raylet.status() == psutil.STATUS_ZOMBIE:
                return []
            return [raylet, *raylet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, node: Any) -> None:
        """End a node as a power failure does."""
        tree = self.tree(node)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.raylet(node).wait()

    def stop(self, node: Any, number: int = signal.SIGSTOP) -> None:
        """Send a signal to all that runs on a node; the raylet first, so that it starts nothing in place of others."""
        for process in self.tree(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        """End all of it."""
        for node in self.nodes:
            self.stop(node, signal.SIGCONT)
        self._cluster.shutdown()


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """A Redis that stores nothing on disk. Gives its address."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port), what="Redis")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def raylets(nodes: int = 2, storage: str = "", *, own_cores: bool = False, **settings: Any) -> Iterator[Raylets]:
    """A Ray cluster for tests; see `Raylets`."""
    found = Raylets(nodes, storage, settings, own_cores=own_cores)
    try:
        yield found
    finally:
        found.close()


@dataclass
class Outcome:
    """What became of one request."""

    at_s: float
    took_s: float
    status: int
    """0: no answer."""
    text: str = ""


_firsts = itertools.count(0, 10_000)
"""So that no request is one that an earlier load had."""


class Load:
    """Requests for `scale` at a steady rate, over one gateway or several, until it ends."""

    def __init__(self, urls: Collection[str], rate: float = 20.0) -> None:
        self.outcomes: list[Outcome] = []
        self._urls = list(urls)
        self._rate = rate
        self._first = next(_firsts)
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Load:
        self._pacing = threading.Thread(target=self._run)
        self._pacing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._pacing.join()
        for thread in self._threads:
            thread.join()

    @property
    def failed(self) -> list[Outcome]:
        """The requests that were not answered with 200."""
        return [one for one in self.outcomes if one.status != 200]

    def _run(self) -> None:
        number, next_s = 0, time.monotonic()
        while not self._ends.is_set():
            thread = threading.Thread(target=self._ask, args=(self._urls[number % len(self._urls)], number))
            thread.start()
            self._threads.append(thread)
            number += 1
            next_s += 1 / self._rate
            self._ends.wait(max(0.0, next_s - time.monotonic()))

    def _ask(self, url: str, number: int) -> None:
        began_s = time.monotonic()
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [number + self._first]}
        status, text = 0, ""
        try:
            answer = httpx.post(f"{url}/v2/models/scale/infer", json={"inputs": [tensor]}, timeout=40, trust_env=False)
            status, text = answer.status_code, answer.text[:200]
            if status == 200 and answer.json()["outputs"][0]["data"] != [2.0 * (number + self._first)]:
                status, text = -1, f"a wrong answer: {text}"
        except httpx.HTTPError as error:
            text = repr(error)
        self.outcomes.append(Outcome(began_s, time.monotonic() - began_s, status, text))


class Gateway:
    """A running ``headwater serve`` or ``headwater join``."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def replicas(self, model: str = "scale") -> int:
        """How many replicas of a model this gateway has."""
        with contextlib.suppress(httpx.HTTPError):
            for one in self.client.post("/v2/repository/index").json():
                if one["name"] == model:
                    return int(one["replicas"]["ready"]) if one["state"] == "READY" else 0
        return 0

    def command(self, name: str, model: str = "scale", body: Any = None) -> httpx.Response:
        """An operator's command."""
        return self.client.post(f"/v2/repository/models/{model}/{name}", json=body or {})

    def is_ready(self) -> bool:
        """Whether it is ready."""
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get("/v2/health/ready").status_code == 200
        return False


@contextlib.contextmanager
def gateway(
    address: str,
    folder: Path,
    deployments: dict[str, Any] | None,
    *,
    tls: Path | None = None,
    port: int = 0,
    within_s: float = START_S,
) -> Iterator[Gateway]:
    """Serve deployments on a cluster, or join what is served there; wait until it is ready.

    Args:
        address: of the cluster's head.
        folder: for the configuration and the log.
        deployments: of the configuration; None: join.
        tls: the cluster's certificates.
        port: 0: any.
        within_s: how long it may take to be ready.
    """
    port = port or free_port()
    log = folder / f"gateway-{port}.log"
    if deployments is None:
        command = ["join", "--address", address, "--port", str(port)]
    else:
        cluster: dict[str, Any] = {"engine": "ray", "address": address}
        if tls is not None:
            cluster["tls"] = str(tls)
        server = {"port": port, "access_log": False, "shutdown_timeout_s": 5}
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({"cluster": cluster, "server": server, "deployments": deployments}))
        command = ["serve", str(path)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater_server", *command], stdout=output, stderr=output, start_new_session=True
        )
    found = Gateway(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_for(found.is_ready, within_s, "the gateway to be ready", every_s=0.1)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        found.client.close()


def stop_cluster(address: str) -> None:
    """``headwater stop``."""
    subprocess.run([sys.executable, "-m", "headwater_server", "stop", "--address", address], check=True, timeout=90)


def agents(address: str) -> list[psutil.Process]:
    """The agents of a cluster's replicas."""
    return _named("headwater_server.cluster.agent", address)


def supervisors(address: str) -> list[psutil.Process]:
    """The processes of a cluster's supervisors."""
    return _named("headwater_server.cluster.cluster_supervisor", address)


def hosts(address: str, model: str = "") -> list[psutil.Process]:
    """The hosts of a cluster's replicas, of one model if it is named."""
    return _named("headwater.replica", address, model)


def _named(module: str, address: str, argument: str = "") -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if (
            process.info["status"] == psutil.STATUS_ZOMBIE
            or command[1:3] != ["-m", module]
            or (argument and argument not in command)
        ):
            continue
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HEADWATER_RAY") == address:
                found.append(process)
    return found
