"""The control socket between supervisor and workers."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from app.control import ControlServer, receive_tables
from app.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State


def table(*names: str, draining: bool = False) -> RoutingTable:
    return RoutingTable(
        tuple(
            DeploymentRoute(name, State.READY, replicas=(ReplicaRoute(f"{name}-1", "/h", "token"),)) for name in names
        ),
        draining,
    )


def test_every_worker_gets_the_present_table_and_every_change() -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="hw-") as folder:
            server = ControlServer()
            await server.start(Path(folder) / "control")
            server.publish(table("a"))
            workers = [receive_tables(Path(folder) / "control") for _ in range(2)]
            assert [await anext(worker) for worker in workers] == [table("a")] * 2
            server.publish(table("a", "b"))
            server.publish(table(draining=True))
            for worker in workers:
                assert await anext(worker) == table("a", "b")
                assert await anext(worker) == table(draining=True)
            await server.close()
            for worker in workers:
                assert await anext(worker, None) is None

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_worker_that_leaves_is_forgotten() -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="hw-") as folder:
            server = ControlServer()
            await server.start(Path(folder) / "control")
            worker = receive_tables(Path(folder) / "control")
            await anext(worker)
            await worker.aclose()
            for _ in range(100):
                server.publish(table("a"))
                await asyncio.sleep(0)
            other = receive_tables(Path(folder) / "control")
            assert await anext(other) == table("a")
            await other.aclose()
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
