"""KServe's client of the Open Inference Protocol: health, and every datatype, in JSON and in binary."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
from cases import URL, raised, run
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

VALUES: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
    "BOOL": np.array([[True, False]]),
    "FP16": np.array([[1.5, -2]], np.float16),
    "FP32": np.array([[1.5, 1e38]], np.float32),
    "FP64": np.array([[1.5, 1e300]], np.float64),
    "BYTES": np.array([["hä", ""]], np.object_),
    **{
        f"{sign}INT{bits}": np.array([[np.iinfo(kind).min, np.iinfo(kind).max]], kind)
        for bits in (8, 16, 32, 64)
        for sign in ("", "U")
        for kind in [np.dtype(f"{sign}int{bits}".lower())]
    },
}


def asked(method: str, *arguments: Any, **options: Any) -> Any:
    """What a method of the client answers."""

    async def main() -> Any:
        async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as client:
            return await getattr(client, method)(*arguments, **options)

    return asyncio.run(main())


def tensor(datatype: str, *, is_binary: bool) -> Any:
    """One input of `mirror`."""
    values = VALUES[datatype]
    made = InferInput(f"in_{datatype.lower()}", list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=is_binary)
    return made


def infer(datatype: str, *, is_binary: bool, has_binary_output: bool) -> None:
    """Send values to `mirror`, which must come back."""
    wanted = RequestedOutput(f"out_{datatype.lower()}", {"binary_data": has_binary_output})
    needed = [] if datatype == "INT32" else [tensor("INT32", is_binary=False)]
    inputs = [*needed, tensor(datatype, is_binary=is_binary)]
    request = InferRequest("mirror", infer_inputs=inputs, request_outputs=[wanted], parameters={"priority": 1})
    answer = asked("infer", URL, request, model_name="mirror")
    (output,) = answer.outputs
    found = output.as_numpy()
    if datatype == "BYTES":
        found = [[one.decode() if isinstance(one, bytes) else one for one in found.ravel()]]
    assert np.array_equal(found, VALUES[datatype]), found
    assert (answer.model_name, output.datatype) == ("mirror", datatype)


def server_is_live_and_ready() -> None:
    for base in (URL, f"{URL}/"):
        assert asked("is_server_live", base) is True
        assert asked("is_server_ready", base) is True


def model_is_ready() -> None:
    for base in (URL, f"{URL}/"):
        assert asked("is_model_ready", base, "mirror") is True
        assert asked("is_model_ready", base, "nope") is False


def infer_json() -> None:
    for datatype in VALUES.keys() - {"FP16"}:  # has no JSON form
        infer(datatype, is_binary=False, has_binary_output=False)


def infer_binary() -> None:
    for datatype in VALUES:
        infer(datatype, is_binary=True, has_binary_output=True)


def infer_json_and_binary() -> None:
    for datatype in VALUES.keys() - {"FP16"}:
        infer(datatype, is_binary=True, has_binary_output=False)
        infer(datatype, is_binary=False, has_binary_output=True)


def errors() -> None:
    request = InferRequest("other", infer_inputs=[tensor("INT32", is_binary=False)])
    error = raised(httpx.HTTPStatusError, lambda: asked("infer", URL, request, model_name="mirror"))
    assert "model_name: expected 'mirror'" in str(error)
    assert "400 Bad Request" in str(error)


run(server_is_live_and_ready, model_is_ready, infer_json, infer_binary, infer_json_and_binary, errors)
