"""Models of Triton's onnxruntime and pytorch backends, as models of the Python backend: `model_host` runs them.

A generated ``model.py`` subclasses `OnnxFile` or `TorchScriptFile`. Requests that Triton has joined are computed
together if they can be; if that fails, each is computed alone, so that one request's fault is its own. Everything is
computed on the CPU.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from headwater.triton.backend_utils import (
    InferenceRequest,
    InferenceResponse,
    ModelConfig,
    Tensor,
    TritonError,
    TritonModelException,
)

__all__ = ["OnnxFile", "TorchScriptFile"]

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
_ONNX_TYPES: Final[Mapping[str, str]] = {
    "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32", "int64": "TYPE_INT64",
    "float16": "TYPE_FP16", "float": "TYPE_FP32", "double": "TYPE_FP64", "string": "TYPE_STRING",
}  # fmt: skip
_THREADS: Final = {"intra_op_thread_count": "intra_op_num_threads", "inter_op_thread_count": "inter_op_num_threads"}
"""Parameters of Triton's onnxruntime backend, and the options of a session that they set."""
_POSITION: Final = re.compile(r".*__(\d+)\Z")


class FileModel(ABC):
    """A model in a file."""

    path: ClassVar[str]
    """The file."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the file."""
        config = json.loads(args["model_config"])
        self._is_batched = config.get("max_batch_size", 0) > 0
        self._outputs = [tensor["name"] for tensor in config["output"]]
        self.load(config)

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Compute the requests."""
        inputs = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        if len(requests) > 1 and self._is_batched:
            try:
                return self._together(inputs)
            except Exception:  # perhaps the fault of a single request
                pass
        return [self._alone(arrays) for arrays in inputs]

    def _alone(self, arrays: Arrays) -> InferenceResponse:
        try:
            return _response(self.compute(arrays))
        except Exception as error:
            return InferenceResponse(error=TritonError(f"{type(error).__name__}: {error}"))

    def _together(self, inputs: Sequence[Arrays]) -> list[InferenceResponse]:
        """Compute requests in one run: joined along the first axis, and divided again."""
        rows = [len(next(iter(arrays.values()))) for arrays in inputs]
        joined = {name: np.concatenate([arrays[name] for arrays in inputs]) for name in inputs[0]}
        outputs = self.compute(joined)
        ends = np.cumsum(rows)
        if any(not array.ndim or len(array) != ends[-1] for array in outputs.values()):
            raise ValueError("an output doesn't have a row for each row of the inputs")
        return [
            _response({name: array[end - count : end] for name, array in outputs.items()})
            for count, end in zip(rows, ends, strict=True)
        ]

    @abstractmethod
    def load(self, config: Mapping[str, Any]) -> None:
        """Load the file. Raises `TritonModelException` if the configuration doesn't fit."""

    @abstractmethod
    def compute(self, inputs: Arrays) -> Arrays:
        """The outputs by name. Raises any exception."""


class OnnxFile(FileModel):
    """An ONNX file, computed by onnxruntime."""

    @classmethod
    def auto_complete_config(cls, config: ModelConfig) -> ModelConfig:
        """Take the inputs and outputs from the file, where ``config.pbtxt`` names none."""
        content = config.as_dict()
        if content.get("input") and content.get("output"):
            return config
        session = _session(cls.path, {})
        skipped = 1 if content.get("max_batch_size", 0) > 0 else 0
        for kind, found in (("input", session.get_inputs()), ("output", session.get_outputs())):
            if content.get(kind):
                continue
            for tensor in found:
                dims = [dim if isinstance(dim, int) else -1 for dim in tensor.shape[skipped:]]
                datatype = _ONNX_TYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"))
                if datatype is None:
                    raise ValueError(f"{kind} {tensor.name!r}: not supported with the type {tensor.type}")
                described = {"name": tensor.name, "data_type": datatype, "dims": dims}
                (config.add_input if kind == "input" else config.add_output)(described)
        return config

    def load(self, config: Mapping[str, Any]) -> None:
        self._session = _session(self.path, config.get("parameters", {}))
        self._texts = {tensor.name for tensor in self._session.get_inputs() if tensor.type == "tensor(string)"}
        _check_names("input", config["input"], [tensor.name for tensor in self._session.get_inputs()])
        _check_names("output", config["output"], [tensor.name for tensor in self._session.get_outputs()])

    def compute(self, inputs: Arrays) -> Arrays:
        given = {name: _decoded(array) if name in self._texts else array for name, array in inputs.items()}
        return dict(zip(self._outputs, self._session.run(self._outputs, given), strict=True))


class TorchScriptFile(FileModel):
    """A TorchScript file. Inputs are named by an argument of ``forward``, or end in ``__`` and a position; outputs end
    in ``__`` and a position."""

    def load(self, config: Mapping[str, Any]) -> None:
        import torch

        self._torch = torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch prefers its newer format
            self._module = torch.jit.load(self.path, map_location="cpu").eval()  # type: ignore[no-untyped-call]
        arguments = [argument.name for argument in self._module.forward.schema.arguments[1:]]
        self._inputs = {one["name"]: _place("input", one["name"], arguments) for one in config["input"]}
        self._places = [_place("output", name, []) for name in self._outputs]

    def compute(self, inputs: Arrays) -> Arrays:
        torch = self._torch
        ordered = sorted((self._inputs[name], array) for name, array in inputs.items())
        with torch.inference_mode():
            found = self._module(*(torch.from_numpy(array) for _, array in ordered))
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(results) <= max(self._places):
            raise ValueError(f"the module returned {len(results)} tensors, expected one for each of {self._outputs}")
        return {name: results[place].numpy() for name, place in zip(self._outputs, self._places, strict=True)}


def _session(path: str, parameters: Mapping[str, Any]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, option in _THREADS.items():
        if name in parameters:
            setattr(options, option, int(parameters[name]["string_value"]))
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _check_names(kind: str, configured: Sequence[Mapping[str, Any]], found: Sequence[str]) -> None:
    for tensor in configured:
        if tensor["name"] not in found:
            raise TritonModelException(f"{kind} {tensor['name']!r}: the file has only {', '.join(map(repr, found))}")


def _place(kind: str, name: str, arguments: Sequence[str]) -> int:
    """The position of a tensor. Raises `TritonModelException` if the name doesn't tell it."""
    if name in arguments:
        return arguments.index(name)
    match = _POSITION.match(name)
    if match is None:
        expected = "a name that ends in __ and its position, such as OUTPUT__0"
        raise TritonModelException(f"{kind} {name!r}: expected {expected}")
    return int(match[1])


def _decoded(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    texts = [value.decode() if isinstance(value, bytes) else str(value) for value in array.flat]
    return np.array(texts, object).reshape(array.shape)


def _response(outputs: Arrays) -> InferenceResponse:
    return InferenceResponse([Tensor(name, array) for name, array in outputs.items()])
