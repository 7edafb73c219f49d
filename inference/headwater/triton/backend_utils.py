"""The interface that a ``model.py`` of Triton's Python backend imports as ``triton_python_backend_utils``.

Source: the documentation of Triton's python_backend, and what Triton 2.51 answers. The classes hold data; what needs
Triton goes through `link`, which `headwater.triton.model_host` sets.
"""

from __future__ import annotations

import contextlib
import enum
import json
import struct
import sys
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import numpy as np

from headwater.triton.call_codec import CODES
from headwater.triton.dlpack_capsule import capsule_of_tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2
TRITONSERVER_MEMORY_CPU: Final = 0
TRITONSERVER_MEMORY_GPU: Final = 2

TRITON_STRING_TO_NUMPY: Final[Mapping[str, Any]] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
"""numpy's types, by the names of the types in ``config.pbtxt``; in the order of Triton's numbers, which start at 1."""
_NUMBERED: Final = [np.dtype(kind) for kind in TRITON_STRING_TO_NUMPY.values()]
_BFLOAT16_NUMBER: Final = 14
_CPU: Final = (1, 0)
"""DLPack's numbers of the CPU."""

Array = np.ndarray[Any, np.dtype[Any]]


class TritonModelException(Exception):
    """The error of a call of this interface; raised by ``execute``, it fails all of the call's requests."""


class TritonLink(Protocol):
    """What the interface needs of Triton; `headwater.triton.model_host` implements it."""

    def log(self, level: str, message: str) -> None:
        """Write a line to the replica's log."""

    def infer(self, request: InferenceRequest, *, decoupled: bool) -> Any:
        """Compute a request by another model: the response, or an iterator over responses if ``decoupled``."""

    def infer_later(self, request: InferenceRequest, *, decoupled: bool) -> Awaitable[Any]:
        """The same as `infer`, to be awaited."""

    def call(self, function: str, *arguments: Any) -> Any:
        """Have Triton's own interface compute a function. Raises `TritonModelException`."""


class _NoLink:
    """In place of a connection, where this module is imported without the model's host."""

    def __getattr__(self, name: str) -> Any:
        raise TritonModelException(f"{name}: Triton is not connected; the model's host in a replica connects it")


link: TritonLink = cast(TritonLink, _NoLink())
"""The connection to Triton. The model's host sets it before it imports the model."""
model_folder = ""
"""The folder of the model's version. The model's host sets it."""


def _code_type() -> Any:
    return enum.Enum("TritonErrorCode", list(CODES), start=0, module=__name__)


TritonErrorCode: Final = _code_type()


class TritonError:
    """An error of a single request.

    Args:
        message: its text, which the client gets.
        code: one of this class's codes, which decides the status of the answer.
    """

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = TritonErrorCode

    def __init__(self, message: str = "", code: Any = INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"TritonError, message: expected a str, got {type(message).__name__}")
        if not isinstance(code, TritonErrorCode):
            raise TypeError(f"TritonError, code: expected one of TritonError.{', '.join(CODES)}, got {code!r}")
        self._message = message
        self._code = code

    def message(self) -> str:
        """The text."""
        return self._message

    def code(self) -> Any:
        """The code."""
        return self._code


def _text(value: str | bytes) -> str:
    """A text; like Triton's interface, the functions here take bytes, too, such as elements of BYTES tensors."""
    return value.decode() if isinstance(value, bytes) else str(value)


class PreferredMemory:
    """Where the outputs of a request should be. Without effect: tensors are in the memory of the CPU."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class Tensor:
    """A named tensor in the memory of the CPU. It shares the memory of its array.

    Raises:
        TypeError: the array is not numpy's.
        TritonModelException: Triton has no datatype for the array's.
    """

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor {name!r}: expected a numpy array, got {type(array).__name__}")
        if array.dtype.kind == "S":
            array = array.astype(object)
        if array.dtype not in _NUMBERED:
            raise TritonModelException(f"Tensor {name!r}: Triton has no datatype for numpy's {array.dtype}")
        if not array.dtype.hasobject and not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        self._name = _text(name)
        self._array = array
        self._is_bfloat16 = False

    @classmethod
    def from_dlpack(cls, tensor_name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of another library's tensor, or of a DLPack capsule.

        Raises:
            TritonModelException: its memory is not on the CPU, or not in C order.
        """
        if isinstance(tensor, (_Bfloat16, Tensor)):
            return cls.of_bfloat16(tensor_name, tensor.bits) if tensor.is_bfloat16 else cls(tensor_name, tensor.bits)
        if type(tensor).__name__ == "PyCapsule":
            with contextlib.suppress(ValueError):  # it is of another datatype
                return cls.of_bfloat16(tensor_name, capsule_of_tensor(tensor))
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        try:
            array = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            found = _bfloat16_bits(tensor)
            if found is None:
                raise TritonModelException(f"Tensor {tensor_name!r}, from_dlpack: {error}") from error
            return cls.of_bfloat16(tensor_name, found)
        if not array.flags.c_contiguous:
            raise TritonModelException(f"Tensor {tensor_name!r}, from_dlpack: expected memory in C order")
        return cls(tensor_name, array)

    @classmethod
    def of_bfloat16(cls, name: str, bits: Array) -> Tensor:
        """A tensor of BF16, for which numpy has no datatype, from its bits as UINT16."""
        tensor = cls(name, bits)
        tensor._is_bfloat16 = True
        return tensor

    def name(self) -> str:
        """The name."""
        return self._name

    def as_numpy(self) -> Array:
        """The array.

        Raises:
            TritonModelException: the tensor is BF16, for which numpy has no datatype.
        """
        if self._is_bfloat16:
            text = "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            raise TritonModelException(text)
        return self._array

    def shape(self) -> list[int]:
        """The sizes of the dimensions."""
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        """The number of the datatype (`triton_to_numpy_type`)."""
        return _BFLOAT16_NUMBER if self._is_bfloat16 else _NUMBERED.index(self._array.dtype) + 1

    def is_cpu(self) -> bool:
        """Whether it is in the memory of the CPU."""
        return True

    def to_dlpack(self) -> Any:
        """The tensor as a DLPack capsule."""
        return _Bfloat16(self._array) if self._is_bfloat16 else self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._is_bfloat16:
            return _Bfloat16(self._array).__dlpack__(**options)
        array = self._array
        return (array if array.flags.writeable else array.copy()).__dlpack__(**options)  # numpy < 2.1 exports no other

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    @property
    def bits(self) -> Array:
        """The array; of BF16, its bits as UINT16."""
        return self._array

    @property
    def is_bfloat16(self) -> bool:
        """Whether the tensor is BF16."""
        return self._is_bfloat16


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class _Bfloat16:
    """The bits of a tensor of BF16, which torch can take (``torch.from_dlpack``)."""

    is_bfloat16 = True

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    def __dlpack__(self, **options: Any) -> Any:
        import torch

        return torch.from_numpy(self.bits.view(np.int16)).view(torch.bfloat16).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


def _bfloat16_bits(tensor: Any) -> Array | None:
    """The bits of torch's tensor of BF16; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.bfloat16:
        return None
    return cast(Array, tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16))


class InferenceResponse:
    """The answer to a request: outputs, or an error, which goes before the outputs.

    Raises:
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse, error: expected a TritonError, got {type(error).__name__}")
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceResponse, output_tensors: expected Tensors, got {type(tensor).__name__}")
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """The outputs."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error; None without an error."""
        return self._error


class InferenceResponseSender:
    """Sends the answers of a request. The model's host subclasses it."""

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send an answer, or the end of the answers (``flags`` is ``TRITONSERVER_RESPONSE_COMPLETE_FINAL``), or both.

        Raises:
            TritonModelException: the answers have ended, or there is neither an answer nor the end.
        """
        raise NotImplementedError

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        raise NotImplementedError


class InferenceRequest:
    """A request: of a client to this model, or of this model to another model.

    Raises:
        TypeError: ``inputs``, ``requested_output_names`` or ``model_name`` is missing, or an input is no `Tensor`.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: Any = None,
        parameters: Mapping[str, Any] | str | None = None,
    ) -> None:
        for name, value in (
            ("inputs", inputs),
            ("requested_output_names", requested_output_names),
            ("model_name", model_name),
        ):
            if value is None:
                raise TypeError(f"InferenceRequest, {name}: required, but missing")
        self._inputs = list(inputs or ())
        for tensor in self._inputs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceRequest, inputs: expected Tensors, got {type(tensor).__name__}")
        self.model_name = _text(model_name or "")
        self.model_version = int(model_version)
        self._wanted = [_text(name) for name in requested_output_names or ()]
        self._id = _text(request_id)
        self._correlation_id = correlation_id if isinstance(correlation_id, int) else _text(correlation_id)
        self._flags = int(flags)
        self._timeout = int(timeout)
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(dict(parameters or {}))
        self.sender: InferenceResponseSender | None = None
        """Sends the answers; None: this model made the request."""
        self.is_sender_taken = False
        """Whether the model has asked for `sender`."""

    def inputs(self) -> list[Tensor]:
        """The inputs."""
        return self._inputs

    def requested_output_names(self) -> list[str]:
        """The names of the outputs that the client wants."""
        return self._wanted

    def request_id(self) -> str:
        """The client's id of the request."""
        return self._id

    def correlation_id(self) -> int | str:
        """The id of the request's sequence; 0 or empty without a sequence."""
        return self._correlation_id

    def flags(self) -> int:
        """Flags of the sequence: ``TRITONSERVER_REQUEST_FLAG_...``."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags of a request that this model sends."""
        self._flags = int(flags)

    def set_release_flags(self, flags: int) -> None:
        """Have Triton call ``execute`` with the request again.

        Raises:
            TritonModelException: always, except for ``TRITONSERVER_REQUEST_RELEASE_ALL``, which is the default.
        """
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise TritonModelException(
                "set_release_flags: rescheduling requests (iterative sequences) is not supported; answer with a "
                "decoupled model in a loop"
            )

    def timeout(self) -> int:
        """The client's timeout in microseconds; 0 without a timeout."""
        return self._timeout

    def parameters(self) -> str:
        """The parameters as JSON."""
        return self._parameters

    def trace(self) -> Any:
        """The trace of the request: None, since Headwater traces requests itself."""
        return None

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self.sender is not None and self.sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of the answers to this request.

        Raises:
            TritonModelException: this model made the request.
        """
        if self.sender is None:
            raise TritonModelException("get_response_sender: the request is not a client's")
        self.is_sender_taken = True
        return self.sender

    def exec(self, decoupled: bool = False) -> Any:
        """Have another model compute the request, and wait. A failure is a response with an error.

        Returns:
            The `InferenceResponse`; if ``decoupled``, an iterator over responses, the last of which may be empty.

        Raises:
            TritonModelException: outside of ``execute`` and of what it started.
        """
        self._check()
        return link.infer(self, decoupled=decoupled)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """The same as `exec`, to be awaited."""
        self._check()
        return link.infer_later(self, decoupled=decoupled)

    def _check(self) -> None:
        if self.sender is not None:
            raise TritonModelException("exec: expected a request that this model made, got a client's")


class Logger:
    """Writes to the replica's log."""

    class LogLevel(enum.Enum):
        """Levels of the log."""

        INFO = "INFO"
        WARNING = "WARNING"
        ERROR = "ERROR"
        VERBOSE = "VERBOSE"

    INFO, WARNING, ERROR, VERBOSE = LogLevel

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Write a line."""
        link.log(level.value, str(message))

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line of the level INFO."""
        link.log("INFO", str(message))

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a line of the level WARNING."""
        link.log("WARNING", str(message))

    @staticmethod
    def log_error(message: str) -> None:
        """Write a line of the level ERROR."""
        link.log("ERROR", str(message))

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line of the level VERBOSE."""
        link.log("VERBOSE", str(message))


class MetricKind(enum.Enum):
    """Kinds of metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """A family of Triton's metrics: a name, and a value for each combination of labels.

    Raises:
        TritonModelException: Triton refuses the family.
    """

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    def __init__(self, name: str, description: str, kind: Any) -> None:
        self._number = -1
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily {name!r}, kind: expected one of MetricFamily.COUNTER, GAUGE and HISTOGRAM")
        self._number = link.call("metric_family", str(name), str(description), kind.name)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """The metric of these labels.

        Args:
            labels: values by name.
            buckets: the upper bounds of a histogram's buckets.

        Raises:
            TritonModelException: Triton refuses the metric.
        """
        return Metric(link.call("metric", self._number, dict(labels or {}), buckets and list(buckets)), self)

    def __del__(self) -> None:
        if self._number >= 0:
            _forget(self._number)


class Metric:
    """A value of a `MetricFamily`. Made by `MetricFamily.Metric`."""

    def __init__(self, number: int, family: MetricFamily) -> None:
        self._number = number
        self._family = family

    def increment(self, value: float) -> None:
        """Add to the value. Raises `TritonModelException`."""
        link.call("metric_do", self._number, "increment", float(value))

    def set(self, value: float) -> None:
        """Set the value of a gauge. Raises `TritonModelException`."""
        link.call("metric_do", self._number, "set", float(value))

    def observe(self, value: float) -> None:
        """Add a value to a histogram. Raises `TritonModelException`."""
        link.call("metric_do", self._number, "observe", float(value))

    def value(self) -> float:
        """The value. Raises `TritonModelException`."""
        return cast(float, link.call("metric_do", self._number, "value"))

    def __del__(self) -> None:
        _forget(self._number)


def _forget(number: int) -> None:
    with contextlib.suppress(Exception):  # the interpreter, or the connection to Triton, has ended
        link.call("metric_forget", number)


class ModelConfig:
    """The configuration that ``auto_complete_config`` completes.

    Args:
        model_config: the configuration, as a dictionary.
    """

    def __init__(self, model_config: dict[str, Any]) -> None:
        self._model_config = model_config

    def as_dict(self) -> dict[str, Any]:
        """The configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set ``max_batch_size``.

        Raises:
            ValueError: ``config.pbtxt`` has a greater number.
        """
        present = self._model_config.get("max_batch_size", 0)
        if present > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {present}, but in auto-complete-config function it is set "
                f"to {max_batch_size}, which is smaller"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have Triton join requests.

        Raises:
            ValueError: ``config.pbtxt`` has a sequence batcher or is an ensemble.
        """
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(f"dynamic_batching: config.pbtxt has {other}, which excludes it")
        batch = self._model_config.get("max_batch_size", 0)
        self._model_config.setdefault("dynamic_batching", {"preferred_batch_size": [batch]} if batch else {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set ``model_transaction_policy``.

        Raises:
            ValueError: there is another field than ``decoupled``, or ``config.pbtxt`` has another value.
        """
        unknown = transaction_policy_dict.keys() - {"decoupled"}
        if unknown:
            raise ValueError(f"model transaction policy property {sorted(unknown)[0]!r}: unknown; expected 'decoupled'")
        decoupled = bool(transaction_policy_dict.get("decoupled", False))
        present = self._model_config.get("model_transaction_policy", {}).get("decoupled")
        if present is not None and present != decoupled and "model_transaction_policy" in self._model_config:
            raise ValueError(
                f"trying to change decoupled property in auto-complete to {decoupled}, which is already set to "
                f"{present} in config.pbtxt"
            )
        self._model_config["model_transaction_policy"] = {"decoupled": decoupled}

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input, or complete an input of ``config.pbtxt``. Raises `ValueError`."""
        self._add("input", input, {"name", "data_type", "dims", "optional"})

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output, or complete an output of ``config.pbtxt``. Raises `ValueError`."""
        self._add("output", output, {"name", "data_type", "dims"})

    def _add(self, kind: str, tensor: Mapping[str, Any], expected: set[str]) -> None:
        for name in ("name", "data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{kind} of auto_complete_config: expected {name}, got {dict(tensor)}")
        if unknown := tensor.keys() - expected:
            raise ValueError(
                f"{kind} {tensor['name']!r} of auto_complete_config: unknown property {sorted(unknown)[0]}"
            )
        for present in self._model_config.setdefault(kind, []):
            if present.get("name") != tensor["name"]:
                continue
            for name in tensor.keys() - {"name"}:
                old = present.get(name)
                if old not in (None, [], "TYPE_INVALID", False) and old != tensor[name]:
                    raise ValueError(
                        f"{kind} {tensor['name']!r}, {name}: config.pbtxt has {old}, but auto_complete_config sets "
                        f"{tensor[name]}"
                    )
                present[name] = tensor[name]
            return
        self._model_config[kind].append(dict(tensor))


def get_model_dir() -> str:
    """The folder of the model's version."""
    return model_folder


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """An input of a request; None if it isn't there."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """An output of a response; None if it isn't there.

    Raises:
        TritonModelException: the response is an error.
    """
    if inference_response.has_error():
        error = inference_response.error()
        assert error is not None
        raise TritonModelException(error.message())
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """An input's entry in a configuration; None if it isn't there."""
    return next((tensor for tensor in model_config.get("input", []) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """An output's entry in a configuration; None if it isn't there."""
    return next((tensor for tensor in model_config.get("output", []) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled"))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """numpy's type for a type of ``config.pbtxt``, such as ``TYPE_FP32``."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """numpy's type for a datatype's number."""
    return list(TRITON_STRING_TO_NUMPY.values())[data_type - 1]


def numpy_to_triton_type(data_type: Any) -> int:
    """The number of the datatype of numpy's type."""
    return _NUMBERED.index(np.dtype(data_type)) + 1


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model is ready. Raises `TritonModelException`."""
    return bool(link.call("is_model_ready", _text(model_name), _text(model_version)))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model of the repository.

    Args:
        model_name: its name.
        config: JSON in place of its ``config.pbtxt``.
        files: not supported: models are read from the repository only.

    Raises:
        TritonModelException: it can't be loaded.
    """
    if files:
        raise TritonModelException("load_model, files: not supported; models are read from the repository only")
    link.call("load_model", _text(model_name), _text(config))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model. Raises `TritonModelException`."""
    link.call("unload_model", _text(model_name), bool(unload_dependents))


def serialize_byte_tensor(input_tensor: Array) -> Array | None:
    """The elements of a BYTES tensor in one, each after its length. None without elements.

    Raises:
        TritonModelException: the array is neither of objects nor of bytes.
    """
    if not input_tensor.size:
        return None
    if input_tensor.dtype != object and input_tensor.dtype.type is not np.bytes_:
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    pieces = []
    for item in input_tensor.flat:
        data = item if isinstance(item, bytes) else str(item).encode()
        pieces.append(struct.pack("<I", len(data)) + data)
    whole = np.empty(1, object)
    whole[0] = b"".join(pieces)
    return whole


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The elements in what `serialize_byte_tensor` made."""
    return np.array(list(_elements(encoded_tensor)), dtype=np.object_)


def _elements(encoded: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(encoded):
        (length,) = struct.unpack_from("<I", encoded, at)
        at += 4 + length
        yield encoded[at - length : at]
