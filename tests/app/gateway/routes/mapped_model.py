"""A model with mappings behind the gateway's application, computed here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import httpx
import numpy as np

from headwater.datatypes import pack_bytes, unpack_bytes
from headwater.signature import Signature
from headwater_server.codecs.tensors import Answer, InferRequest, RawTensor
from headwater_server.config.schema import Server
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.errors import BadRequest, NotFound
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models

Columns = dict[str, list[str]]
Compute = Callable[[Columns], dict[str, Any]]


class MappedModel:
    """A model ``m``, its dispatcher and its route; arrays become tensors of their type, lists of texts BYTES."""

    def __init__(self, signature: Signature, compute: Compute, max_queue_size: int = 1024) -> None:
        self.signature = signature
        self.route = DeploymentRoute("m", State.READY, signature=signature, max_queue_size=max_queue_size)
        self.dispatcher = self
        self.name = "m"
        self.requests: list[InferRequest] = []
        self._compute = compute

    def check_ready(self) -> Signature:
        return self.signature

    async def infer(self, request: InferRequest) -> Answer:
        self.requests.append(request)
        columns = {
            name: [one.decode("latin-1") for one in unpack_bytes(raw.data)] for name, raw in request.inputs.items()
        }
        found = self._compute(columns)
        return Answer({name: _tensor(found[name]) for name in (wish.name for wish in request.outputs)})

    def choose(self, scope: object, name: str) -> MappedModel:
        if name != "m":
            raise NotFound("unknown", field="model")
        return self

    def check_mapped(self, model: MappedModel, mapping: str) -> None:
        if getattr(self.signature, mapping) is None:
            raise BadRequest(f"model: `m` has no {mapping}", field="model")

    def get(self, name: str) -> MappedModel:
        return self.choose(None, name)

    def only(self, mappings: Sequence[str]) -> str:
        return "m"

    def mapping_of(self, name: str, mappings: Sequence[str]) -> str:
        present = (mapping for mapping in mappings if getattr(self.signature, mapping) is not None)
        return next(present, mappings[0])

    def post(self, path: str, **request: Any) -> httpx.Response:
        return self.send("POST", path, **request)

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            app = create_app(cast(Models, self), Server(access_log=False))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
                return await client.request(method, path, **request)

        return asyncio.run(send())


def _tensor(value: Any) -> RawTensor:
    if isinstance(value, list):
        return RawTensor("BYTES", (len(value), 1), pack_bytes([text.encode() for text in value]))
    array = np.asarray(value)
    return RawTensor("INT32" if array.dtype.kind == "i" else "FP32", array.shape, array.tobytes())
