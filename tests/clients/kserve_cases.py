"""KServe's clients of the Open Inference Protocol: health, and every datatype, in JSON, in binary and over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import numpy as np
from cases import GRPC, KEY, KEYED_GRPC, URL, raised, run
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
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


def asked_by_grpc(method: str, *arguments: Any, address: str = GRPC, **options: Any) -> Any:
    """What a method of the client of gRPC answers."""

    async def main() -> Any:
        async with InferenceGRPCClient(address) as client:
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
    check(datatype, asked("infer", URL, request, model_name="mirror"))


def check(datatype: str, answer: Any) -> None:
    """The values that were sent to `mirror` must be the only output."""
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


def grpc_health() -> None:
    assert asked_by_grpc("is_server_live") is True
    assert asked_by_grpc("is_server_ready") is True
    assert asked_by_grpc("is_model_ready", "mirror") is True
    assert asked_by_grpc("is_model_ready", "nope") is False


def grpc_infer() -> None:
    for datatype in VALUES:
        for is_binary in (True, False) if datatype != "FP16" else (True,):
            inputs = [] if datatype == "INT32" else [tensor("INT32", is_binary=is_binary)]
            inputs.append(tensor(datatype, is_binary=is_binary))
            wanted = [RequestedOutput(f"out_{datatype.lower()}")]
            request = InferRequest(
                "mirror", infer_inputs=inputs, request_outputs=wanted, parameters={"priority": 1}, request_id="7"
            )
            answer = asked_by_grpc("infer", request)
            check(datatype, answer)
            assert answer.id == "7"


def grpc_errors() -> None:
    def refused(model: str, **options: Any) -> Any:
        request = InferRequest(model, infer_inputs=[tensor("FP32", is_binary=True)])
        return raised(grpc.RpcError, lambda: asked_by_grpc("infer", request, **options))

    error = refused("mirror")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "in_int32" in error.details()
    assert refused("nope").code() is grpc.StatusCode.NOT_FOUND
    assert refused("doubled", address=KEYED_GRPC).code() is grpc.StatusCode.UNAUTHENTICATED
    headers = (("authorization", f"Bearer {KEY}"),)
    assert refused("doubled", address=KEYED_GRPC, headers=headers).code() is grpc.StatusCode.INVALID_ARGUMENT
    request = InferRequest("slow", infer_inputs=[slow_input()])
    error = raised(grpc.RpcError, lambda: asked_by_grpc("infer", request, timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def slow_input() -> Any:
    made = InferInput("x", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[1000]], np.int32), binary_data=True)
    return made


run(
    server_is_live_and_ready, model_is_ready, infer_json, infer_binary, infer_json_and_binary, errors,
    grpc_health, grpc_infer, grpc_errors,
)  # fmt: skip
