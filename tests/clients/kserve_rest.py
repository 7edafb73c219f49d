"""KServe's REST client, unmodified, against the models of `tests.conftest`: every datatype, in JSON and in binary.

Runs where `kserve` is installed, which needs another numpy than this project: ``python kserve_rest.py URL``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import numpy as np
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


def tensor(datatype: str, values: np.ndarray[Any, np.dtype[Any]], *, binary: bool) -> Any:
    """One input of `mirror`."""
    made = InferInput(f"in_{datatype.lower()}", list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


async def main(url: str) -> int:
    """Returns the number of cases."""
    cases = 0
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        for base in (url, f"{url}/"):
            assert await client.is_server_live(base) is True
            assert await client.is_server_ready(base) is True
            assert await client.is_model_ready(base, "mirror") is True
            assert await client.is_model_ready(base, "nope") is False
            cases += 4

        async def infer(name: str, *inputs: Any, **wanted: Any) -> Any:
            return await client.infer(url, InferRequest(name, infer_inputs=list(inputs), **wanted), model_name="mirror")

        row = tensor("INT32", np.array([[1]], np.int32), binary=False)
        for datatype, values in VALUES.items():
            for binary in (False, True):
                for binary_output in (False, True):
                    if datatype == "FP16" and not (binary and binary_output):
                        continue  # has no JSON form
                    wanted = RequestedOutput(f"out_{datatype.lower()}", {"binary_data": binary_output})
                    own = tensor(datatype, values, binary=binary)
                    inputs = [own] if datatype == "INT32" else [row, own]
                    answer = await infer("mirror", *inputs, request_outputs=[wanted], parameters={"priority": 1})
                    (output,) = answer.outputs
                    found = output.as_numpy()
                    if datatype == "BYTES":
                        found = [[one.decode() if isinstance(one, bytes) else one for one in found.ravel()]]
                    assert np.array_equal(found, values), (datatype, binary, binary_output, found)
                    assert (answer.model_name, output.datatype) == ("mirror", datatype)
                    cases += 1
        said = ""
        try:
            await infer("other", row)
        except httpx.HTTPStatusError as error:
            said = str(error)
        assert "model_name: expected 'mirror'" in said
        assert "400 Bad Request" in said
        cases += 1
    return cases


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1])), "cases")
