"""A model that is an ONNX file, run by ONNX Runtime: ``onnx:PATH`` in a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from headwater.environment import install_command
from headwater.errors import BadInput, DeclarationError, LoadError, Problem
from headwater.model import Model, Tensor
from headwater.reference import find_path
from headwater.runtime.tensor_options import (
    BATCH,
    EXAMPLES,
    SHAPES,
    STATES,
    WITHOUT_BATCH,
    check_names,
    corrected_shapes,
    declared_batch,
    named_dimensions,
    new_names,
    served_name,
    set_example,
    set_states,
)
from headwater.runtime.values import joined_runs
from headwater.wire.arrays import Array, as_objects

__all__ = ["OnnxModel", "open_model"]

CUDA: Final = "CUDAExecutionProvider"
CPU: Final = "CPUExecutionProvider"
FATAL: Final = 4
"""ONNX Runtime's log level for fatal messages only: it raises less severe errors as exceptions, too."""

_DATATYPES: Final = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign}INT{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
}
"""Datatypes by ONNX Runtime's name; ONNX Runtime has no numpy form of bfloat16."""

_PREFIX: Final = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : (\w+) : (?:Load model from .*? failed:)?(?:/\S+:\d+ .*?\) (?=[A-Z]))?"
)
"""The prefix of ONNX Runtime's messages: code, file, and sometimes the line and function in its source code."""


_CUSTOM: Final = re.compile(r"([\w.-]+:\w+)\(-?\d+\) is not a registered function/op")
"""ONNX Runtime's message about an operator of another domain than ONNX's."""
_EXPORT: Final = ", or export it with that dimension dynamic: torch.onnx.export's dynamic_shapes or dynamic_axes"


class _Port(NamedTuple):
    """An input or output of the file."""

    onnx_name: str
    tensor: Tensor
    is_flat: bool
    """Whether the file's shape is [n], which is declared as [n, 1]; without a batch axis: whether it is a scalar, which
    is declared as [1]."""
    takes_one_row: bool
    """Whether the file fixes its first dimension to 1."""


class OnnxModel(Model):
    """An ONNX file as a model, with the file's inputs and outputs.

    The first dimension of each input and output is the batch axis. If it is fixed to 1 in all inputs, the file is run
    once per row. Other dimensions without a fixed size vary between requests. A tensor of one dimension, [n], is
    declared as [1]. Strings travel as UTF-8. In names, each run of characters that the protocol doesn't allow becomes
    ``_``: ``input:0`` becomes ``input_0``, and ``/a/b`` becomes ``_a_b``.

    Args:
        path: the file.
        rename: maps names of inputs and outputs in the file to names in requests.
        shapes: the shapes of rows of inputs and outputs that the file declares wrongly, by name in the file.
        batch: see `Model.batch`; without a batch axis a scalar is declared as [1].

    Raises:
        LoadError: ONNX Runtime can't read the file, or an input or output can't be served; the message names it.
    """

    _session: Any

    def __init__(
        self,
        path: Path,
        *,
        rename: Mapping[str, str] | None = None,
        shapes: Mapping[str, Sequence[int | str]] | None = None,
        batch: Literal["rows"] | None = "rows",
    ) -> None:
        self._path = path
        self.batch = batch  # type: ignore[misc]
        self._title = f"model onnx:{path}"
        # Opened without optimization, only to read its declarations; `load` opens it again for the device.
        session = self._open([CPU], optimize=False)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        names = [node.name for node in (*inputs, *outputs)]
        named = new_names(self._title, rename, names)
        self._shapes = corrected_shapes(self._title, shapes, names)
        first_dims = {node.shape[0] if node.shape else None for node in inputs}
        self._has_fixed_batch = len(first_dims) == 1
        """Whether all inputs have the same first dimension, which may then be a batch of a fixed size."""
        faults: list[Problem] = []
        self._inputs = self._ports("input", inputs, named, faults)
        self._outputs = self._ports("output", outputs, named, faults)
        if faults:
            reasons, fixes = "; ".join(fault.reason for fault in faults), dict.fromkeys(fault.fix for fault in faults)
            raise self._error(reasons, "; ".join(fixes))
        if batch is not None:
            self._check_batch_axis()
        ports = (*self._inputs, *self._outputs)
        self._row_by_row = batch is not None and any(port.takes_one_row for port in ports)
        # The file declares them, not the class.
        self.inputs = tuple(port.tensor for port in self._inputs)  # type: ignore[misc]
        self.outputs = tuple(port.tensor for port in self._outputs)  # type: ignore[misc]
        self.__doc__ = _description(path, session.get_modelmeta())

    def load(self, device: str) -> None:
        """Open the file on a device. ``OMP_NUM_THREADS``, if set, is the number of compute threads.

        Raises:
            LoadError: this ONNX Runtime can't use the requested GPU.
        """
        if not device.startswith("cuda"):
            self._session = self._open([CPU])
            return
        import onnxruntime

        wrong = f"device {device!r} needs ONNX Runtime's {CUDA}, but "
        if CUDA not in onnxruntime.get_available_providers():
            raise self._error(
                f"{wrong}onnxruntime {onnxruntime.__version__} is a build without it",
                "install onnxruntime-gpu in place of onnxruntime, or set `device: cpu`",
            )
        onnxruntime.preload_dlls()  # finds the CUDA libraries that are installed as Python packages
        index = int(device.partition(":")[2] or 0)
        # By default ONNX Runtime times every algorithm for each new shape of a convolution's input.
        session = self._open([(CUDA, {"device_id": index, "cudnn_conv_algo_search": "HEURISTIC"}), CPU])
        if CUDA not in session.get_providers():  # ONNX Runtime only logs the failure and falls back to the CPU
            raise self._error(
                f"{wrong}onnxruntime {onnxruntime.__version__} can't start it: its CUDA or cuDNN libraries are missing",
                "install the versions that this onnxruntime-gpu was built for, or set `device: cpu`",
            )
        self._session = session

    def __call__(self, /, **inputs: Array) -> dict[str, Array]:
        """Compute all outputs.

        Raises:
            BadInput: a string is not UTF-8.
            BadOutput: in a file that is run once per row, an output does not have exactly one row, or rows differ in
                shape.
        """
        feed = {port.onnx_name: _fed(port, inputs[port.tensor.name]) for port in self._inputs}
        names = [port.onnx_name for port in self._outputs]
        if not self._row_by_row:
            results = [np.asarray(result) for result in self._session.run(names, feed)]  # scalars are arrays, too
        else:
            rows = len(next(iter(feed.values())))
            singles = [
                self._session.run(names, {name: array[row : row + 1] for name, array in feed.items()})
                for row in range(rows)
            ]
            results = [
                joined_runs(port.tensor.name, pieces, [1] * rows)
                for port, pieces in zip(self._outputs, zip(*singles, strict=True), strict=True)
            ]
        return {port.tensor.name: _taken(port, array) for port, array in zip(self._outputs, results, strict=True)}

    def unload(self) -> None:
        """Free the session."""
        del self._session

    def _check_batch_axis(self) -> None:
        """Check that no input or output has the first dimension 1 if an input has a dynamic first dimension. Otherwise
        the dynamic dimension, along which rows would be joined, may be the steps of a sequence instead of the batch
        axis.

        Raises:
            LoadError: there is such an input or output.
        """
        dynamic = [port.onnx_name for port in self._inputs if not port.takes_one_row]
        ports = [("input", port) for port in self._inputs] + [("output", port) for port in self._outputs]
        fixed = [f"{kind} {port.onnx_name!r}" for kind, port in ports if port.takes_one_row]
        if dynamic and fixed:
            raise self._error(
                f"{', '.join(fixed)}, shape: expected a batch axis as first dimension, dynamic as that of input "
                f"{dynamic[0]!r}, got 1: the file does not say which dimension, if any, is the batch axis",
                f"{WITHOUT_BATCH}, or export it with the batch axis dynamic in all inputs and outputs",
            )

    def _error(self, reason: str, fix: str) -> LoadError:
        return LoadError(Problem(self._title, reason, fix))

    def _open(self, providers: Sequence[object], *, optimize: bool = True) -> Any:
        try:
            import onnxruntime
        except ImportError as error:
            raise self._error(f"it needs onnxruntime: {error}", install_command("onnx", "onnxruntime")) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = FATAL
        options.inter_op_num_threads = 1
        options.intra_op_num_threads = _threads() if optimize else 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return onnxruntime.InferenceSession(str(self._path), options, providers=providers)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise self._error(*_unreadable(str(error), onnxruntime.__version__)) from error

    def _ports(self, kind: str, nodes: Sequence[Any], named: Mapping[str, str], faults: list[Problem]) -> list[_Port]:
        """The inputs or outputs that can be served; for each of the others a problem is added to ``faults``."""
        if not nodes:
            raise self._error(f"it has no {kind}s, expected at least one", f"export it with the {kind}s as arguments")
        ports: dict[str, _Port] = {}
        for node in nodes:
            try:
                port = self._port(kind, node, named)
                first_port = ports.setdefault(port.tensor.name, port)
                if first_port is not port:
                    raise self._error(
                        f"{kind}s {first_port.onnx_name!r} and {node.name!r} would both be named {port.tensor.name!r}",
                        f"name one of them in options: `rename: {{{node.name!r}: ...}}`",
                    )
            except LoadError as error:
                faults.append(error.problem)
        return list(ports.values())

    def _port(self, kind: str, node: Any, named: Mapping[str, str]) -> _Port:
        where = f"{kind} {node.name!r}"
        match = re.fullmatch(r"tensor\((\w+)\)", node.type)
        datatype = _DATATYPES.get(match[1]) if match is not None else None
        if datatype is None:
            raise self._error(
                f"{where}, type: expected a tensor of {', '.join(_DATATYPES)}, got {node.type}",
                "export it with one of these types, if necessary with a cast in the model",
            )
        first, *row_shape = node.shape or (None,)
        if self.batch is None:
            row_shape = node.shape
        elif not node.shape:
            raise self._error(
                f"{where}, shape: expected the batch axis as first dimension, got none: it is a scalar, or the file "
                "does not say",
                f"{WITHOUT_BATCH}; onnx.shape_inference.infer_shapes finds shapes that are only missing",
            )
        elif isinstance(first, int) and first not in (-1, 1):
            raise self._error(
                f"{where}, shape: expected a batch axis of any size, or 1, as first dimension, got {first}",
                f"{WITHOUT_BATCH}{_EXPORT if self._has_fixed_batch else ''}",
            )
        dims = [dim if isinstance(dim, int) else -1 for dim in row_shape]
        dimensions = named_dimensions(row_shape)
        if node.name in self._shapes:
            dims, dimensions = self._shapes[node.name]
        name = named.get(node.name, served_name(node.name))
        try:
            tensor = Tensor(name, datatype, dims or [1], dimensions=dimensions)
        except DeclarationError as error:
            raise self._error(
                f"{where}: {error}", f"export it otherwise, or name it in options: `rename: {{{node.name!r}: ...}}`"
            ) from error
        return _Port(node.name, tensor, is_flat=not dims, takes_one_row=first == 1)


def open_model(path: str, options: Mapping[str, Any], search: Sequence[str] = ()) -> OnnxModel:
    """Find an ONNX file, as `find_path` does, and make a model of it, not yet loaded.

    The options are ``rename`` and ``shapes`` (see `OnnxModel`), ``batch: none`` for a file without a batch axis,
    ``states`` (see `set_states`), and ``example`` and ``sizes`` (see `set_example`).

    Raises:
        LoadError: there is no such file, or no such option, or the file can't be served.
    """
    title = f"model onnx:{path}"
    check_names(title, options, ["rename", SHAPES, BATCH, STATES, *EXAMPLES])
    file = find_path(title, path, search, "file")
    rename, shapes = options.get("rename"), options.get(SHAPES)
    model = OnnxModel(file, rename=rename, shapes=shapes, batch=declared_batch(title, options))
    set_states(title, model, options)
    set_example(title, model, options, search)
    return model


def _unreadable(message: str, version: str) -> tuple[str, str]:
    """The reason for an error that ONNX Runtime raised on opening a file, and how to fix it."""
    code = prefix[1] if (prefix := _PREFIX.match(message)) else ""
    text = " ".join(_PREFIX.sub("", message).split())
    if code == "INVALID_PROTOBUF" or re.search("No graph was found|not have a graph", text):
        return f"it is not an ONNX file, or is incomplete: {text[:300]}", "export or copy it again"
    if re.search("[Ee]xternal data|cannot get file size", text):
        return (
            f"its external data can't be read: {text[-300:]}",
            "put the data file beside the ONNX file, under the name that it had when it was exported",
        )
    if (operator := _CUSTOM.search(text)) is not None:
        return (
            f"it has the custom operator {operator[1]}, which ONNX Runtime {version} lacks: {text[:300]}",
            "export it with operators of ONNX only, or write a class that registers the operator's library and runs it",
        )
    return (
        f"ONNX Runtime {version} can't run it: {text[:300]}",
        "correct the model, export it with an opset and operators that this version has, or update onnxruntime",
    )


def _threads() -> int:
    """The value of ``OMP_NUM_THREADS``. If it isn't set: 0, which means one thread per core."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _description(path: Path, meta: Any) -> str:
    text = str(meta.description or meta.graph_description).strip()
    return text or f"The ONNX file {path.name}" + (f", made by {meta.producer_name}." if meta.producer_name else ".")


def _fed(port: _Port, array: Array) -> Array:
    """An input in the file's shape and type."""
    if port.tensor.datatype == "BYTES":
        array = _decoded(port.tensor.name, array)
    return array.reshape(array.shape[:-1]) if port.is_flat else array


def _decoded(name: str, array: Array) -> Array:
    texts = np.empty(array.size, object)
    for index, element in enumerate(array.ravel().tolist()):
        try:
            texts[index] = element.decode()
        except UnicodeDecodeError as error:
            # Isolation retries the failing row alone; its index is then 0, which means nothing to the client.
            row = f", row {index * len(array) // array.size}" if len(array) > 1 else ""
            raise BadInput(
                f"input {name!r}{row}: expected UTF-8, got byte 0x{element[error.start]:02x} at position {error.start}"
            ) from error
    return texts.reshape(array.shape)


def _taken(port: _Port, array: Array) -> Array:
    """An output in its declared shape and type."""
    if port.tensor.datatype == "BYTES":
        array = as_objects(array, f"output {port.tensor.name!r}")
    return array.reshape(-1, 1) if port.is_flat and array.ndim == 1 else array
