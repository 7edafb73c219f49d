"""The body of ``POST /v2/models/{m}/infer``, decoded and checked against the model's signature.

Sources: the Open Inference Protocol's inference request; Triton's binary tensor data, classification, sequence,
schedule policy and shared memory extensions (of which the last, classification and sequences are refused).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from app.binary_data import take_binary
from app.errors import BadRequest
from app.json_data import JsonData
from app.json_faults import PARSE_ERRORS, at, key_text, no_json_form, shape_text, shown, unreadable
from app.tensors import InferRequest, OutputWish, RawTensor, Scalar
from inference.datatypes import DATATYPES
from inference.errors import DeclarationError
from inference.model import Parameter
from inference.signature import Signature, TensorSpec

__all__ = ["RequestDecoder"]

_Parameters = dict[str, str | int | float | bool | None] | None
_NO_DATA: Final = msgspec.Raw(b"")
_MAX_DIM: Final = 2**31 - 1
_MAX_HOLLOW: Final = 2**24
_MAX_BYTES_ELEMENTS: Final = 10**6
_MAX_ID_CHARACTERS: Final = 1000
_MAX_PRIORITY: Final = 2**32 - 1
_MAX_TIMEOUT_US: Final = 2**64 - 1
_INT64: Final = range(-(2**63), 2**63)
_PROTOCOL_PARAMETERS: Final = ("binary_data_output", "priority", "timeout")
_SIZE: Final = "binary_data_size"


class _Input(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = _NO_DATA
    parameters: _Parameters = None


class _Output(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    parameters: _Parameters = None


class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    inputs: list[_Input]
    id: str | None = None
    parameters: _Parameters = None
    outputs: list[_Output] | None = None


_REQUEST: Final = msgspec.json.Decoder(_Request)
_FIELDS: Final = {
    "": _Request.__struct_fields__,
    "inputs": _Input.__struct_fields__,
    "outputs": _Output.__struct_fields__,
}


class _Declared(NamedTuple):
    """What is known of an input before any request."""

    spec: TensorSpec
    dims: tuple[int | None, ...]
    """Batch axis first; None varies."""
    size_bytes: int
    data: JsonData


class RequestDecoder:
    """Decodes requests to one model. Holds tables only, so any number of tasks may share it.

    Args:
        signature: the model's inputs, outputs and parameters.
    """

    def __init__(self, signature: Signature) -> None:
        self._inputs = {
            spec.name: _Declared(
                spec,
                (None, *(None if dim < 0 else dim for dim in spec.shape)),
                DATATYPES[spec.datatype].size_bytes,
                JsonData(spec),
            )
            for spec in signature.inputs
        }
        self._required = tuple(spec.name for spec in signature.inputs if not spec.optional)
        self._outputs = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
        self._binary_only = next((name for name, datatype in self._outputs.items() if not datatype.json), None)
        # `declared` checks the declaration each time it is called: once is enough.
        self._parameters: dict[str, Parameter] = {spec.name: spec.declared() for spec in signature.parameters}
        self._defaults: dict[str, dict[str, Scalar]] = {"batch": {}, "row": {}}
        for name, parameter in self._parameters.items():
            self._defaults[parameter.per][name] = parameter.default

    def decode(self, body: bytes, header_length: int | None = None) -> InferRequest:
        """Decode one request.

        Args:
            body: the whole body, decompressed, within the size limit.
            header_length: the value of ``Inference-Header-Content-Length``: how many bytes of the body are JSON. The
                binary tensors follow, in the order of the inputs that have ``parameters.binary_data_size``. None: the
                whole body is JSON.

        Returns:
            The request; binary tensors are views of ``body``.

        Raises:
            BadRequest: whatever is wrong; the message names the field, what was expected and what came.
        """
        text: bytes | memoryview = body
        if header_length is not None:
            if not 0 <= header_length <= len(body):
                raise BadRequest(
                    "Inference-Header-Content-Length: expected the length of the JSON in bytes, 0 to the body's "
                    f"{len(body)}, got {shown(header_length)}",
                    field="Inference-Header-Content-Length",
                )
            text = memoryview(body)[:header_length]
        try:
            asked = _REQUEST.decode(text)
        except PARSE_ERRORS as error:
            raise self._unreadable(error, text, body, header_length) from None
        if asked.id is not None and len(asked.id) > _MAX_ID_CHARACTERS:
            raise at("id", None, f"expected at most {_MAX_ID_CHARACTERS} characters, got {len(asked.id)}")
        request = InferRequest(
            id=asked.id or "",
            inputs={},
            rows=0,
            outputs=[],
            batch_parameters=self._defaults["batch"].copy(),
            row_parameters=self._defaults["row"].copy(),
        )
        # The cheap checks first, so that a wrong request costs no work on its data.
        binary_output = self._take_parameters(asked.parameters, request) if asked.parameters else False
        if asked.outputs:
            self._take_outputs(asked.outputs, binary_output, request.outputs)
        else:
            if self._binary_only is not None and not binary_output:
                raise no_json_form("outputs", self._binary_only, self._outputs[self._binary_only].name)
            request.outputs = [OutputWish(name, binary_output) for name in self._outputs]
        offset = len(body) if header_length is None else header_length
        end = self._take_inputs(asked.inputs, body, offset, request)
        if end != len(body):
            raise BadRequest(
                f"body: expected the end after the last binary tensor, at byte {end}, got {len(body) - end} bytes "
                f"more; compare Inference-Header-Content-Length ({header_length}) and the inputs' {_SIZE}",
                field="body",
            )
        return request

    def _unreadable(
        self, error: Exception, text: bytes | memoryview, body: bytes, header_length: int | None
    ) -> BadRequest:
        fault = unreadable(error, text, _FIELDS)
        if fault.field != "body":
            return fault
        hint = ""
        if header_length is None and "trailing characters" in fault.message:
            hint = "; if binary tensors follow, the header Inference-Header-Content-Length must say where"
        elif header_length is not None and header_length < len(body):
            hint = f" (in the first {header_length} bytes, as Inference-Header-Content-Length says)"
        return BadRequest(fault.message + hint, field="body")

    def _take_parameters(self, given: dict[str, Any], request: InferRequest) -> bool:
        """Check the request's parameters and note them; returns ``binary_data_output``."""
        binary_output = False
        for name, value in given.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                values = request.batch_parameters if parameter.per == "batch" else request.row_parameters
                values[name] = _checked(parameter, value)
            elif name == "binary_data_output":
                binary_output = _boolean("parameters.binary_data_output", None, value)
            elif name == "priority":
                request.priority = _integer("parameters.priority", None, value, _MAX_PRIORITY)
            elif name == "timeout":
                request.timeout_us = _integer("parameters.timeout", None, value, _MAX_TIMEOUT_US)
            else:
                raise _unsupported("parameters", None, name, (*self._parameters, *_PROTOCOL_PARAMETERS))
        return binary_output

    def _take_outputs(self, asked: list[_Output], binary_output: bool, wishes: list[OutputWish]) -> None:
        seen: set[str] = set()
        for index, output in enumerate(asked):
            name = output.name
            datatype = self._outputs.get(name)
            if datatype is None:
                raise _unknown(f"outputs[{index}].name", "outputs", name, self._outputs)
            if name in seen:
                raise at(f"outputs[{index}].name", name, "expected every output at most once, got it a second time")
            seen.add(name)
            binary = binary_output
            if output.parameters:
                where = f"outputs[{index}].parameters"
                for key, value in output.parameters.items():
                    if key != "binary_data":
                        raise _unsupported(where, name, key, ("binary_data",))
                    binary = _boolean(f"{where}.binary_data", name, value)
            if not binary and not datatype.json:
                raise no_json_form(f"outputs[{index}]", name, datatype.name)
            wishes.append(OutputWish(name, binary))

    def _take_inputs(self, asked: list[_Input], body: bytes, offset: int, request: InferRequest) -> int:
        """Check and read the inputs; returns where the last binary tensor ends in the body."""
        inputs = request.inputs
        for index, tensor in enumerate(asked):
            name = tensor.name
            declared = self._inputs.get(name)
            if declared is None:
                raise _unknown(f"inputs[{index}].name", "inputs", name, self._inputs)
            if name in inputs:
                raise at(f"inputs[{index}].name", name, "expected every input at most once, got it a second time")
            if tensor.datatype != declared.spec.datatype:
                raise _wrong_datatype(index, name, declared.spec.datatype, tensor.datatype)
            shape = tensor.shape
            count = _count(shape, declared, index)
            if not inputs:
                request.rows = shape[0]
            elif shape[0] != request.rows:
                first = next(iter(inputs))
                raise at(
                    f"inputs[{index}].shape",
                    name,
                    f"expected {request.rows} rows as in input {first!r}, got {shape[0]}",
                )
            size = _binary_size(tensor, index) if tensor.parameters else None
            data: bytes | memoryview
            if size is not None:
                data = take_binary(body, offset, size, declared.spec, shape, count, index)
                offset += size
            elif tensor.data is _NO_DATA:
                raise at(
                    f"inputs[{index}].data",
                    name,
                    f"expected an array, or binary data and parameters.{_SIZE}, got neither",
                )
            else:
                data = declared.data.pack(tensor.data, shape, count, index)
            inputs[name] = RawTensor(tensor.datatype, tuple(shape), data)
        missing = [name for name in self._required if name not in inputs]
        if missing:
            got = f"only {', '.join(map(repr, inputs))}" if inputs else "none"
            raise BadRequest(
                f"inputs: expected the required inputs {', '.join(map(repr, self._required))}, got {got}; "
                f"missing: {', '.join(map(repr, missing))}",
                field="inputs",
            )
        return offset


def _checked(parameter: Parameter, value: object) -> Scalar:
    path = f"parameters.{parameter.name}"
    if type(value) is int and parameter.type != "float" and value not in _INT64:
        raise at(path, None, f"expected {parameter.type} of at most 64 bits, got {shown(value)}")
    try:
        return parameter.check(value)
    except OverflowError:
        raise at(path, None, f"expected float, got {shown(value)}, which is beyond a float") from None
    except DeclarationError as error:
        # Its own wording quotes the value whole, and as Python writes it.
        message = str(error).removeprefix(f"parameter {parameter.name!r}: ").rpartition(", got ")[0]
        raise at(path, None, f"{message}, got {shown(value)}") from None


def _boolean(path: str, tensor: str | None, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise at(path, tensor, f"expected true or false, got {shown(value)}")


def _integer(path: str, tensor: str | None, value: object, maximum: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum:
        return value
    raise at(path, tensor, f"expected an integer, 0 to {maximum}, got {shown(value)}")


def _unsupported(where: str, tensor: str | None, name: str, known: Sequence[str]) -> BadRequest:
    path = f"{where}.{key_text(name)}"
    if name.startswith(("shared_memory_", "sequence_")) or name == "classification":
        return at(path, tensor, f"not supported by this server; expected one of {', '.join(known)}, got {shown(name)}")
    return at(path, tensor, f"expected one of the parameters {', '.join(known)}, got {shown(name)}")


def _unknown(path: str, kind: str, name: str, known: dict[str, Any]) -> BadRequest:
    return at(path, None, f"expected one of the model's {kind} {', '.join(map(repr, known))}, got {shown(name)}")


def _wrong_datatype(index: int, name: str, declared: str, got: str) -> BadRequest:
    known = "" if got in DATATYPES else f", which is no datatype; the datatypes are {', '.join(DATATYPES)}"
    return at(f"inputs[{index}].datatype", name, f"expected {declared} as the model declares, got {shown(got)}{known}")


def _count(shape: list[int], declared: _Declared, index: int) -> int:
    """The number of elements, once the shape is known to fit the declared one."""
    dims = declared.dims
    if len(shape) == len(dims):
        count = 1
        for dim, fixed in zip(shape, dims, strict=True):
            if dim != fixed and (fixed is not None or not 0 <= dim <= _MAX_DIM):
                break
            count *= dim
        else:
            if count == 0:
                _check_hollow(shape, declared, index)
            elif count > _MAX_BYTES_ELEMENTS and not declared.size_bytes:
                raise at(
                    f"inputs[{index}].shape",
                    declared.spec.name,
                    f"expected at most {_MAX_BYTES_ELEMENTS} BYTES elements in a request, got {count}",
                )
            return count
    expected = ", ".join(["rows", *map(str, declared.spec.shape)])
    path, name = f"inputs[{index}].shape", declared.spec.name
    for axis, dim in enumerate(shape):
        if dim < 0:
            raise at(f"{path}[{axis}]", name, f"expected [{expected}] with dimensions of 0 or more, got {shown(dim)}")
        if dim > _MAX_DIM:
            raise at(f"{path}[{axis}]", name, f"expected a dimension of at most {_MAX_DIM}, got {shown(dim)}")
    hint = "; the batch axis comes first" if len(shape) == len(dims) - 1 else ""
    raise at(path, name, f"expected [{expected}], got {shape_text(shape)}{hint}")


def _check_hollow(shape: list[int], declared: _Declared, index: int) -> None:
    """A tensor without elements costs no bytes, and yet its other dimensions may make a callable allocate."""
    if math.prod(dim for dim in shape if dim) > _MAX_HOLLOW:
        raise at(
            f"inputs[{index}].shape",
            declared.spec.name,
            f"expected dimensions whose product, zeros left out, is at most {_MAX_HOLLOW}, got {shape_text(shape)}",
        )


def _binary_size(tensor: _Input, index: int) -> int | None:
    """The input's ``binary_data_size``, once its parameters are known to hold nothing else."""
    where = f"inputs[{index}].parameters"
    for key in tensor.parameters or ():
        if key != _SIZE:
            raise _unsupported(where, tensor.name, key, (_SIZE,))
    assert tensor.parameters is not None
    if tensor.data is not _NO_DATA:
        raise at(
            f"inputs[{index}].data", tensor.name, f"expected either data or parameters.{_SIZE}, got both; leave one out"
        )
    return _integer(f"{where}.{_SIZE}", tensor.name, tensor.parameters[_SIZE], _MAX_TIMEOUT_US)
