"""KServe's client of the Open Inference Protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from cases import URL, run
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


def asked(ask: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(main())


def request(binary: bool) -> InferRequest:
    tensor = InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2, 3]], np.float32), binary_data=binary)
    return InferRequest("scale", [tensor])


def server_is_live_and_ready() -> None:
    assert asked(lambda client: client.is_server_live(URL))
    assert asked(lambda client: client.is_server_ready(URL))


def model_is_ready() -> None:
    assert asked(lambda client: client.is_model_ready(URL, "scale"))


def infer_json() -> None:
    answer = asked(lambda client: client.infer(URL, request(False), model_name="scale"))
    assert answer.outputs[0].as_numpy().tolist() == [[2, 4, 6]]


def infer_binary() -> None:
    answer = asked(lambda client: client.infer(URL, request(True), model_name="scale"))
    assert answer.outputs[0].as_numpy().tolist() == [[2, 4, 6]]


run(server_is_live_and_ready, model_is_ready, infer_json, infer_binary)
