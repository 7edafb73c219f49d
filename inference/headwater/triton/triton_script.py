"""A ``model.py`` of Triton's Python backend as a model of Headwater's: it runs in the deployment's host process.

``headwater import triton:PATH`` writes a subclass for each model, in which the script and its configuration are named.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from headwater.errors import BadInput, BadOutput
from headwater.model import Model, Parameter, Tensor
from headwater.signature import REQUEST
from headwater.triton import backend_utils
from headwater.triton.backend_utils import InferenceRequest, InferenceResponse, TritonError, TritonModelException
from headwater.triton.execute_answers import SingleAnswer, checked_answers
from headwater.triton.user_script import forget_script, script_class

__all__ = ["TritonScript", "passed"]

Array = np.ndarray[Any, np.dtype[Any]]
_STATUSES: Final = {
    TritonError.INVALID_ARG: 400, TritonError.UNKNOWN: 400, TritonError.ALREADY_EXISTS: 400,
    TritonError.CANCELLED: 400, TritonError.NOT_FOUND: 404,
}  # fmt: skip
"""The statuses of errors that are the client's; further errors are the server's."""


class _ScriptLink:
    """What the interface finds in place of Triton: a log, and nothing else."""

    def __init__(self, title: str) -> None:
        self._title = title

    def log(self, level: str, message: str) -> None:
        """Write a line to the replica's log."""
        if level != "VERBOSE":
            print(f"{level} model {self._title}: {message}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        where = "this model is a deployment of its own; serve it by triton:PATH, where Triton answers such calls"
        raise TritonModelException(f"{name}: there is no Triton to ask, since {where}")


class TritonScript(Model):
    """A ``model.py`` as a model.

    Each request of a client becomes an ``InferenceRequest``, with its parameters. If ``config`` has
    ``dynamic_batching``, requests that share a call are a call of ``execute``, otherwise each request is. An error of a
    response fails its request, with the status of its code: 400 or 404 if the fault is the client's, else 500.

    Args:
        rename: maps names of inputs and outputs in the configuration to names in requests.
        batch: ``none``: a request is one call, with all its rows and no others, and its tensors have the batch axis in
            their shapes. So outputs may have other shapes in each request.
    """

    path: ClassVar[str]
    """The script."""
    config: ClassVar[Mapping[str, Any]]
    """The model's configuration, as the JSON that Triton passes to ``initialize``."""
    labels: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The labels of outputs that have some."""
    parameters = (Parameter(REQUEST, "str", "", per="row"),)
    mutates_features = True

    def __init__(self, rename: Mapping[str, str] | None = None, batch: str | None = None) -> None:
        names = rename or {}
        self._is_batched = self.config["max_batch_size"] > 0
        self.batch = "rows" if self._is_batched and batch is None else None  # type: ignore[misc]
        self._given, self._made = (
            {names.get(entry["name"], entry["name"]): entry for entry in self.config[side]}
            for side in ("input", "output")
        )
        # The configuration declares them, not the class.
        self.inputs = [self._tensor(name, entry) for name, entry in self._given.items()]  # type: ignore[misc]
        self.outputs = [self._tensor(name, entry) for name, entry in self._made.items()]  # type: ignore[misc]
        self._link = _ScriptLink(self.config["name"])
        self._model: Any = None

    def _tensor(self, name: str, entry: Mapping[str, Any]) -> Tensor:
        axis = [-1] if self._is_batched and self.batch is None else []
        datatype = entry["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        return Tensor(
            name, datatype, [*axis, *entry["dims"]], entry.get("optional", False), self.labels.get(entry["name"], ())
        )

    def load(self, device: str) -> None:
        """Run the script, and its ``initialize``."""
        self._enter()
        kind, _, number = device.partition(":")
        model = script_class(self.path)()
        version = os.path.dirname(self.path)
        arguments = {
            "model_config": json.dumps(self.config),
            "model_instance_kind": "GPU" if kind == "cuda" else "CPU",
            "model_instance_name": f"{self.config['name']}_0",
            "model_instance_device_id": number or "0",
            "model_repository": os.path.dirname(version),
            "model_version": os.path.basename(version),
            "model_name": self.config["name"],
        }
        if hasattr(model, "initialize"):
            model.initialize(arguments)
        self._model = model

    def __call__(self, /, parameters: Mapping[str, Any], **inputs: Array | None) -> dict[str, Array]:
        """Compute the requests.

        Raises:
            BadInput: the response to a request is an error that is the client's.
            BadOutput: a response lacks an output, or an output has another number of rows than its request.
            TritonModelException: a response is another error, or not all requests have a response.
        """
        self._enter()
        arrays = {name: array for name, array in inputs.items() if array is not None}
        if self.batch is None:
            rows = len(next(iter(arrays.values())))
            if self._is_batched and rows > self.config["max_batch_size"]:
                raise BadInput(f"expected at most {self.config['max_batch_size']} rows in a request, got {rows}")
            return self._execute([self._request(parameters[REQUEST], arrays)], [rows])[0]
        requests, counts, end = [], [], 0
        for about, members in itertools.groupby(parameters[REQUEST]):
            start, end = end, end + len(list(members))
            requests.append(self._request(about, {name: array[start:end] for name, array in arrays.items()}))
            counts.append(end - start)
        if "dynamic_batching" in self.config:
            pieces = self._execute(requests, counts)
        else:
            pieces = [self._execute([one], [rows])[0] for one, rows in zip(requests, counts, strict=True)]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in self._made}

    def unload(self) -> None:
        """Run the script's ``finalize``."""
        self._enter()
        if hasattr(self._model, "finalize"):
            self._model.finalize()
        self._model = None
        forget_script(self.path)

    def _enter(self) -> None:
        """Have the interface speak for this script: the steps of a pipeline share a process, and compute in turn."""
        backend_utils.link = self._link
        backend_utils.model_folder = os.path.dirname(self.path)

    def _request(self, about: str, arrays: Mapping[str, Array]) -> InferenceRequest:
        tensors = []
        for name, array in arrays.items():
            entry = self._given[name]
            shaped = array.reshape(self._shape(array, entry["reshape"]["shape"])) if "reshape" in entry else array
            tensors.append(backend_utils.Tensor(entry["name"], shaped))
        request = InferenceRequest(
            inputs=tensors,
            requested_output_names=[entry["name"] for entry in self._made.values()],
            model_name=self.config["name"],
            parameters=about.partition(" ")[2] or "{}",
        )
        request.sender = SingleAnswer()
        return request

    def _execute(self, requests: Sequence[InferenceRequest], counts: Sequence[int]) -> list[dict[str, Array]]:
        """The outputs of each request, by their names in requests."""
        answers = checked_answers(self._model.execute(list(requests)), requests)
        return [self._outputs(answer, rows) for answer, rows in zip(answers, counts, strict=True)]

    def _outputs(self, answer: InferenceResponse | str, rows: int) -> dict[str, Array]:
        if isinstance(answer, str):
            raise TritonModelException(answer)
        if (error := answer.error()) is not None:
            if (status := _STATUSES.get(error.code())) is not None:
                raise BadInput(error.message(), status=status)
            raise TritonModelException(error.message())
        found = {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
        outputs = {}
        for name, entry in self._made.items():
            if entry["name"] not in found:
                raise BadOutput(f"execute returned no output {entry['name']!r}, expected {', '.join(self._made)}")
            array = found[entry["name"]]
            if "reshape" in entry:
                array = array.reshape(self._shape(array, entry["dims"]))
            if self.batch is not None and array.shape[:1] != (rows,):
                raise BadOutput(f"output {entry['name']!r}: expected {rows} rows, got shape {list(array.shape)}")
            outputs[name] = array
        return outputs

    def _shape(self, array: Array, dims: Sequence[int]) -> list[int]:
        return [*array.shape[: int(self._is_batched)], *dims]


def passed(**tensors: Array) -> dict[str, Array]:
    """A step of a pipeline that gives its inputs: outputs of another step, under the names that clients know."""
    return tensors
