"""From an operator's request to the answer: gateway, control socket and lifecycle together, without processes."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.config.schema import Deployment, Server
from headwater_server.control.control_server import ControlServer
from headwater_server.control.link import SupervisorLink
from headwater_server.control.messages import Drained
from headwater_server.control.routing import ReplicaRoute, RoutingTable
from headwater_server.gateway.app import body_reader, create_app
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.security.operator import OperatorGuard
from headwater_server.supervisor.handle import ReplicaHandle
from tests.app.dispatch.stand_in import NUMBERS
from tests.app.dispatch.stand_in import Replica as Client
from tests.app.supervisor.stand_in import Supervisor, one, until

ASK = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2]}]}


class Whole(Supervisor):
    """A supervisor with its control socket, and one gateway worker, all in this process."""

    def __init__(self, folder: Path, *, allow_load: str = "settings", **fields: Any) -> None:
        super().__init__(one(**fields), allow_load)
        self._path = folder / "control"
        self._control = ControlServer(self.lifecycle.answer)
        self.clients: dict[str, Client] = {}
        self._models = Models(self._connect)
        link = SupervisorLink(self._models.drain)
        server = Server(access_log=False)
        routes = repository_routes(link.command, OperatorGuard(True), body_reader(server), self._models)
        transport = httpx.ASGITransport(create_app(self._models, server, routes))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=10)
        self._link = link

    def _connect(self, name: str, route: ReplicaRoute) -> Client:
        return self.clients.setdefault(route.id, Client())

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None], fork: object) -> ReplicaHandle:
        launched = super().launch(name, config, on_progress, fork)
        self.launched[-1].signature = NUMBERS
        return launched

    def on_change(self) -> None:
        super().on_change()
        self._control.publish(RoutingTable(tuple(one.route(1) for one in self.sets.values())))

    async def drain(self, name: str, timeout_s: float, replicas: list[str] | None) -> Drained:
        return await self._control.drain(name, timeout_s, replicas)

    async def serve(self) -> asyncio.Task[None]:
        await self._control.start(self._path)

        async def follow() -> None:
            async for table in self._link.tables(self._path):
                self._models.update(table)

        following = asyncio.create_task(follow())
        await self.start()
        await until(lambda: bool(self.clients))
        return following

    async def close(self) -> None:
        self._models.close()
        await self._control.close()
        await self.http.aclose()

    def ask(self) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.http.post("/v2/models/a/infer", json=ASK))

    async def command(self, action: str, parameters: dict[str, Any] | None = None) -> httpx.Response:
        body = None if parameters is None else {"parameters": parameters}
        return await self.http.post(f"/v2/repository/models/a/{action}", json=body)

    async def state(self) -> str:
        return str((await self.http.get("/v2/repository/index")).json()[0]["state"])


@contextlib.asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[Whole]:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        whole = Whole(Path(folder), **fields)
        following = await whole.serve()
        try:
            yield whole
        finally:
            await whole.close()
            await following


async def test_unload_waits_for_what_is_in_flight_and_load_brings_the_model_back() -> None:
    async with served() as whole:
        asked = whole.ask()
        client = whole.clients["a-0"]
        await client.called.wait()
        unloading = asyncio.create_task(whole.command("unload"))
        while await whole.state() != "DRAINING":  # noqa: ASYNC110 - no event of the product's
            await asyncio.sleep(0)  # the transport alone never lets the loop turn
        refused = await whole.ask()
        assert (refused.status_code, "DRAINING" in refused.json()["error"]) == (503, True)
        assert not unloading.done()
        client.calls[0].answer()
        assert (await asked).status_code == 200
        answer = await unloading
        assert (answer.status_code, answer.json()["drained"], answer.json()["ended"]) == (200, 1, 0)
        refused = await whole.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        assert "it is unloaded: load it with POST /v2/repository/models/a/load" in refused.json()["error"]
        assert (await whole.http.get("/v2/health/ready")).status_code == 200
        entry = (await whole.http.get("/v2/repository/index")).json()[0]
        assert (entry["state"], entry["version"], entry["since"][-1]) == ("UNAVAILABLE", "1", "Z")

        assert (await whole.command("load")).status_code == 200
        await until(lambda: "a-1" in whole.clients)
        asked = whole.ask()
        await whole.clients["a-1"].called.wait()
        whole.clients["a-1"].calls[0].answer()
        assert (await asked).status_code == 200


async def test_what_outlasts_the_drain_is_answered_with_an_error_of_its_own() -> None:
    async with served(drain_timeout_s=0.05) as whole:
        asked = whole.ask()
        await whole.clients["a-0"].called.wait()
        answer = await whole.command("unload")
        assert (answer.status_code, answer.json()["drained"], answer.json()["ended"]) == (200, 0, 1)
        ended = await asked
        assert (ended.status_code, "drain_timeout_s" in ended.json()["error"]) == (503, True)


async def test_a_refusal_has_the_supervisors_words() -> None:
    async with served() as whole:
        answer = await whole.command("load")
        assert (answer.status_code, "is READY: it is already loaded" in answer.json()["error"]) == (409, True)
        whole.failing.add("a")
        answer = await whole.command("reload")
        assert (answer.status_code, "still serves" in answer.json()["error"]) == (500, True)
        assert await whole.state() == "READY"


async def test_a_config_in_the_body_reaches_the_routes_of_the_workers() -> None:
    async with served() as whole:
        answer = await whole.command("reload", {"config": '{"timeout_s": 3, "batching": {"max_queue_size": 1}}'})
        assert (answer.status_code, answer.json()["state"]) == (200, "READY"), answer.text
        rows = {"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [2, 3]}
        refused = await whole.http.post("/v2/models/a/infer", json={"inputs": [rows]})
        assert (refused.status_code, "at most 1 rows (max_queue_size" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("action", "parameters", "status", "told"),
    [
        (
            "reload",
            {"config": {"timeout_s": 3}},
            400,
            "parameters.config: expected a deployment's section as JSON text",
        ),
        ("reload", {"config": " " * 300_000}, 400, "at most 262144 characters"),
        ("reload", {"config": "{"}, 400, "parameters.config: not valid JSON"),
        (
            "reload",
            {"config": '{"timeout_s": 0}'},
            400,
            "`deployments.a.timeout_s`: input should be greater than 0, got 0",
        ),
        ("load", {"config": '{"timeout_s": 3}'}, 409, "expected reload"),
        ("reload", {"config": '{"model": "os:system"}'}, 403, "server.allow_load is settings"),
        ("reload", {"file:1/model.py": "aW1wb3J0IG9z"}, 400, "parameters.file:1/model.py: not supported"),
        ("unload", {"config": "{}"}, 400, "parameters.config: unknown; unload has no such parameter"),
        ("load", {"colour": 1}, 400, "parameters.colour: unknown"),
    ],
)
async def test_what_a_body_may_not_say(action: str, parameters: dict[str, Any], status: int, told: str) -> None:
    async with served() as whole:
        answer = await whole.command(action, parameters)
        assert (answer.status_code, told in answer.json()["error"]) == (status, True), answer.text
        assert (await whole.state(), len(whole.launched)) == ("READY", 1)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["load", "unload"])
@pytest.mark.parametrize(
    "name", ["", "b", "a/", "a/b", "%2E%2E", "a%2F%2E%2E", "%2Fetc%2Fpasswd", "..%2F..%2Fetc%2Fpasswd", "%20", "%0A%09"]
)
async def test_what_is_no_model_is_not_found(name: str, action: str) -> None:
    async with served() as whole:
        assert (await whole.http.post(f"/v2/repository/models/{name}/{action}")).status_code == 404
        assert (await whole.state(), len(whole.launched)) == ("READY", 1)


async def test_an_added_model_comes_and_goes_in_the_index() -> None:
    async with served(allow_load="any") as whole:

        async def names() -> list[str]:
            return [entry["name"] for entry in (await whole.http.get("/v2/repository/index")).json()]

        body = {"parameters": {"config": '{"model": "m:B"}'}}
        answer = await whole.http.post("/v2/repository/models/b/load", json=body)
        assert (answer.status_code, answer.json()["state"]) == (200, "READY"), answer.text
        assert await names() == ["a", "b"]
        assert (await whole.http.get("/v2/models/b/ready")).status_code == 200
        assert (await whole.http.post("/v2/repository/models/b/unload")).status_code == 200
        while await names() != ["a"]:  # noqa: ASYNC110 - the answer may be ahead of the table
            await asyncio.sleep(0)
        assert (await whole.http.get("/v2/models/b/ready")).status_code == 404
