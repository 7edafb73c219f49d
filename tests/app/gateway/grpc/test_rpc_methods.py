"""Methods other than inference, over a stand-in of the application."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from starlette.types import Receive, Scope, Send
from tritonclient.grpc import service_pb2 as pb

from headwater_server.gateway.grpc.rpc_methods import handlers

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]


class Aborted(Exception):
    """The end of a call with an error."""


class Context:
    """A call."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, text: str, metadata: Any) -> None:
        raise Aborted(code)


def answering(status: int) -> Any:
    """An application whose answers all have this status."""

    async def entry(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": "no"}'})

    return entry


async def model_ready(status: int) -> Any:
    method = handlers(answering(status))["ModelReady"].unary_unary
    return await method(pb.ModelReadyRequest(name="m"), Context())


@pytest.mark.parametrize(("status", "ready"), [(200, True), (400, False), (404, False), (503, False)])
async def test_a_model_is_ready_or_not(status: int, ready: bool) -> None:
    """tritonclient raises for an error, and programs that wait for a model ask until it is ready."""
    assert (await model_ready(status)).ready is ready


async def test_who_may_not_ask_gets_an_error() -> None:
    with pytest.raises(Aborted, match="UNAUTHENTICATED"):
        await model_ready(401)
