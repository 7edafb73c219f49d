"""One connection to an inference server, tensors in binary both ways: what every layout of `benchmarks.fanout` is asked
through, Headwater and bare Triton alike."""

from __future__ import annotations

import http.client
import json
import select
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Connection", "RequestFailed", "TensorBytes"]

_LENGTH_HEADER = "Inference-Header-Content-Length"


class TensorBytes(NamedTuple):
    """A tensor as it travels."""

    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview

    def floats(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The elements of an FP32 tensor, in its shape."""
        return np.frombuffer(self.data, np.float32).reshape(self.shape)


class RequestFailed(RuntimeError):
    """The server answered with an error."""

    def __init__(self, model: str, status: int, text: str) -> None:
        super().__init__(f"{model}: expected an answer of status 200, got {status}: {text[:500]}")


class Connection:
    """Kept alive; not for use by two threads at once.

    Args:
        url: the server's, such as ``http://127.0.0.1:8000``.
        timeout_s: how long to wait for an answer.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        self._http = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def infer(
        self, model: str, inputs: Mapping[str, TensorBytes], outputs: Sequence[str]
    ) -> dict[str, TensorBytes]:  # fmt: skip
        """One request.

        Args:
            model: the model's name.
            inputs: by name.
            outputs: the ones to answer; of a pipeline they pick the heads.

        Returns:
            The outputs that came, as views of the answer.

        Raises:
            RequestFailed: the status isn't 200.
            OSError, http.client.HTTPException: the connection failed.
        """
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": name,
                        "datatype": tensor.datatype,
                        "shape": tensor.shape,
                        "parameters": {"binary_data_size": len(tensor.data)},
                    }
                    for name, tensor in inputs.items()
                ],
                "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
            }
        ).encode()
        self._close_if_ended()
        body = b"".join((head, *(tensor.data for tensor in inputs.values())))
        self._http.request("POST", f"/v2/models/{model}/infer", body, {_LENGTH_HEADER: str(len(head))})
        response = self._http.getresponse()
        content = memoryview(response.read())
        if response.status != 200:
            raise RequestFailed(model, response.status, bytes(content).decode(errors="replace"))
        start = int(response.headers[_LENGTH_HEADER])
        answer: dict[str, TensorBytes] = {}
        for output in json.loads(bytes(content[:start]))["outputs"]:
            end = start + int(output["parameters"]["binary_data_size"])
            answer[output["name"]] = TensorBytes(output["datatype"], output["shape"], content[start:end])
            start = end
        return answer

    def _close_if_ended(self) -> None:
        """Servers end a connection that was idle for some seconds; the next request then makes a new one."""
        if self._http.sock is not None and select.select([self._http.sock], [], [], 0)[0]:
            self._http.close()
