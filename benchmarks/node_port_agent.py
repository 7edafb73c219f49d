"""A replica behind its port, as another machine has it: a process that starts the replica and holds the port.

``python -m benchmarks.node_port_agent NAME DEPLOYMENT USER_PATHS TLS`` (JSON, JSON and a folder): says its `Served` on
a line, and ends with its input. Its event loop is the gateway's, uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.stream_child import Child
from headwater.signature import Signature
from headwater_server.cluster.port import Port
from headwater_server.config.schema import Deployment
from headwater_server.control.route_kinds import LanguageKind, TensorKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.security.peer_tls import PeerTls
from headwater_server.supervisor.replica_process import ReplicaProcess

__all__ = ["LOCAL", "PLAIN", "SECURED", "Served", "serving"]

LOCAL, PLAIN, SECURED = "local", "port", "port with TLS"


class Served(msgspec.Struct):
    """A replica, and its addresses."""

    name: str
    signature: Signature
    is_language_model: bool
    routes: dict[str, ReplicaRoute]
    """By way: `LOCAL`, `PLAIN` or `SECURED`."""

    def route(self, way: str) -> DeploymentRoute:
        """The deployment for a gateway that takes this way."""
        return DeploymentRoute(
            self.name, State.READY, "", self.signature, (self.routes[way],),
            max_in_flight=2, kind=LanguageKind() if self.is_language_model else TensorKind(),
        )  # fmt: skip


@contextlib.contextmanager
def serving(name: str, deployment: dict[str, Any], tls: Path, user_paths: Sequence[str] = ()) -> Iterator[Served]:
    """Have a replica of a deployment served in every way.

    Args:
        name: the deployment's.
        deployment: as in the configuration.
        tls: a folder with certificates.
        user_paths: for its ``sys.path``.
    """
    arguments = [name, json.dumps(deployment), json.dumps(list(user_paths)), str(tls)]
    with Child("benchmarks.node_port_agent", arguments) as agent:
        yield msgspec.json.decode(agent.receive(), type=Served)


async def _said_nothing_more() -> None:
    """Wait for the end of the input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _no_control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Nobody asks for control."""


async def _serve(name: str, deployment: Deployment, user_paths: tuple[str, ...], tls: Path, folder: Path) -> None:
    replica = ReplicaProcess(name, f"{name}-1", deployment, folder / "r1", user_paths, lambda stage: None)
    guardian = replica.start()
    assert isinstance(guardian, subprocess.Popen)
    exited: asyncio.Future[int] = asyncio.ensure_future(asyncio.to_thread(guardian.wait))
    following = asyncio.create_task(replica.follow(exited))
    ports = []
    try:
        if not await replica.ready:
            raise SystemExit(f"the replica did not start: {replica.account()}")
        route = replica.route()
        routes = {LOCAL: route}
        for way, secured in ((PLAIN, None), (SECURED, PeerTls(tls))):
            port = Port(name, route, tls=secured, on_control=_no_control)
            ports.append(port)
            address = await port.start("127.0.0.1")
            grpc = address if route.grpc_address else ""
            routes[way] = ReplicaRoute(route.id, address, route.token, grpc, route.facts)
        assert replica.signature is not None
        served = Served(name, replica.signature, deployment.kind.takes_text, routes)
        print(msgspec.json.encode(served).decode(), flush=True)
        await _said_nothing_more()
    finally:
        for port in ports:
            await port.close()
        replica.stop()
        await following


def main() -> None:
    """Serve until the input ends."""
    name, deployment, user_paths, tls = sys.argv[1:]
    config = Deployment.model_validate(json.loads(deployment))
    with tempfile.TemporaryDirectory(prefix="hw-", ignore_cleanup_errors=True) as folder:
        uvloop.run(_serve(name, config, tuple(json.loads(user_paths)), Path(tls), Path(folder)))


if __name__ == "__main__":
    main()
