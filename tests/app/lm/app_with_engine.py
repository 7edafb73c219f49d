"""The application with a language model whose engine runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.engine import Engine, Sampling
from headwater.lm.engine_host import EngineHost
from headwater.signature import LanguageModelSpec
from headwater.wire.frame import FRAME
from headwater.wire.report import HEADWATER, CallNote
from headwater_server.config.schema import Server
from headwater_server.control.routing import RoutingTable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.entry import RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.models import Models
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegment
from tests.app.lm.scripted import FOLDER
from tests.app.lm.stand_in import SIGNATURE, route_of

__all__ = ["Ask", "app_with_engine"]


class Ask:
    """Asks the application. httpx gives an answer when it is complete; `sent` has its bytes before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.sent = bytearray()
        self.key = ""
        """The name of the key that the requests show."""

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            self.sent += message.get("body", b"")
            await send(message)

        if self.key:
            scope["state"] = {"key": self.key}
        await self._app(scope, receive, noting)

    async def __call__(self, path: str, request_id: str = "", **body: Any) -> httpx.Response:
        headers = {"x-request-id": request_id} if request_id else {}
        transport = httpx.ASGITransport(self._watched)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, json=body, headers=headers)


@contextlib.asynccontextmanager
async def app_with_engine(
    engine: Engine,
    folder: Path = FOLDER,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
) -> AsyncIterator[tuple[Ask, LmDispatcher]]:
    host = EngineHost(engine)
    models = Models(lambda name, route: HostClient(host))
    specification = LanguageModelSpec(str(folder), engine.limits, sampling=sampling)
    signature = msgspec.structs.replace(SIGNATURE, language_model=specification)
    models.update(RoutingTable((msgspec.structs.replace(route_of("a", timeout_s=20), signature=signature),)))
    records = RequestRecords(None, StreamLimits(ping_s=0.02))
    ask = Ask(create_app(models, Server(), records=records))
    try:
        yield ask, models.language_model(models.get("lm"))
    finally:
        models.close()
        await asyncio.to_thread(host.close)


class HostClient:
    """A `FrameReplicaClient` that hands messages to a host in the same loop."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._cancels: set[asyncio.Task[None]] = set()

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        self._nothing = nothing

    def placed(self, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        raise NotImplementedError  # it is on this machine

    def cancel(self, name: str) -> None:
        asked = asyncio.create_task(self._whole(FrameRequest(self._nothing.inputs, CallNote(cancel=name))))
        self._cancels.add(asked)
        asked.add_done_callback(self._cancels.discard)

    def close(self) -> None: ...

    async def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        ((input, _, shape, (raw,)),) = request.inputs
        note = {HEADWATER: msgspec.json.encode(request.note).decode()}
        asked = SimpleNamespace(data={input: np.frombuffer(raw, np.uint8).reshape(shape)}, parameters=note)
        async with contextlib.aclosing(self._host.handle([asked])) as answers:  # type: ignore[type-var]
            async for (answer,) in answers:
                yield answer[FRAME].tobytes()

    async def _whole(self, request: FrameRequest) -> None:
        assert [frame async for frame in self.frames("", request)] == []
