"""A gateway worker's application, and a replica that does what its input says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Scope

from headwater.signature import Signature, TensorSpec
from headwater.wire.report import RowReport, Status
from headwater_server.codecs.tensors import RawTensor
from headwater_server.config.schema import Server
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.transport.segments import RemoteSegment
from tests.app.dispatch.stand_in import NUMBERS, Call

REPORTS = {0: Status.OK, 1: Status.RAISED, 2: Status.BAD_INPUT, 3: Status.BAD_OUTPUT}
HANG = 9
OF_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "completions": ("/v1/completions", {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "tokenize": ("/tokenize", {"prompt": "x"}),
    "detokenize": ("/detokenize", {"tokens": [1]}),
}
"""Paths and bodies of requests of text, by route."""
NOT_ACCEPTED = {
    "unknown model": ("/v2/models/nobody/infer", b"{}"),
    "unknown model in a body": ("/v1/embeddings", b'{"model": "nobody", "input": "x"}'),
    "unknown route": ("/v2/nothing", b""),
    "wrong method": ("/v2/models/m/infer", b""),
    "no JSON before a model": ("/v1/completions", b"{"),
}
"""Paths and bodies of requests that are refused before their deployment is known."""


class Replica:
    """A `ReplicaClient` that does what the first element of its input says."""

    def __init__(self) -> None:
        self.hanging: list[Call] = []

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        call = Call(head, data)
        value = int(call.values[0])
        if value == HANG:
            self.hanging.append(call)
        else:
            call.answer([RowReport(REPORTS[value], "as told" if value else "")])
        return await call.answered

    def close(self) -> None: ...


class Gateway:
    """A worker's application, asked without a server."""

    def __init__(self, **route: Any) -> None:
        self.replica = Replica()
        self.models = Models(lambda name, route: self.replica)
        row = (TensorSpec("x", "FP32", (1,)),)
        signature = Signature("m", row, NUMBERS.outputs, max_batch_size=1)
        replicas = (ReplicaRoute("m-1", "unix:", ""),)
        fields: dict[str, Any] = {"max_in_flight": 1000, **route}
        routes = (
            DeploymentRoute("m", State.READY, signature=signature, replicas=replicas, **fields),
            DeploymentRoute("away", State.FAILED, "it has failed"),
        )
        self.models.update(RoutingTable(routes))
        self.app = create_app(self.models, Server(access_log=False))

    @property
    def queued_rows(self) -> int:
        """Rows that wait for the replica."""
        dispatcher = self.models.get("m").dispatcher
        assert isinstance(dispatcher, ModelDispatcher)
        return dispatcher.queued_rows

    async def ask(self, path: str, body: bytes, gone: asyncio.Event | None = None, method: str = "POST") -> int:
        """Send a request; returns the status, 0 if there was none."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status = 0

        async def receive() -> Message:
            if messages:
                return messages.pop()
            if gone is not None:
                await gone.wait()
                return {"type": "http.disconnect"}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "state": {},
            "headers": [
                (b"host", b"here"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
            ],
        }  # fmt: skip
        await self.app(scope, receive, send)
        return status

    async def do(self, route: str, action: str, gone: asyncio.Event) -> int:
        """Have something happen to a request over a route."""
        if route in OF_TEXT:
            path, fields = OF_TEXT[route]
            return await self.ask(path, json.dumps({"model": "m", **fields}).encode())
        model = "away" if action == "not loaded" else "m"
        values = {"raised": 1, "bad row": 2, "bad output": 3, "too late": HANG, "client gone": HANG, "under way": HANG}
        parameters = {"timeout": 20_000} if action == "too late" else {}
        body: dict[str, Any] = {"x": values.get(action, 0), "parameters": parameters}
        if route == "infer":
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [body["x"]]}
            body = {"inputs": [tensor], "parameters": parameters}
        raw = b"{" if action == "no JSON" else json.dumps(body).encode()
        return await self.ask(f"/v2/models/{model}/{route}", raw, gone if "gone" in action else None)

    async def refuse(self, action: str) -> int:
        """Have a request refused before its deployment is known."""
        path, body = NOT_ACCEPTED[action]
        return await self.ask(path, body, method="PUT" if action == "wrong method" else "POST")
