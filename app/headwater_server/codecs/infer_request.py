"""Decodes the body of ``POST /v2/models/{m}/infer`` and checks it against the model's signature.

Sources: the Open Inference Protocol's inference request; Triton's binary tensor data, classification, sequence,
schedule policy and shared memory extensions (classification and shared memory are refused, and sequences of a model
without states).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.signature import Signature
from headwater_server.codecs.faults import (
    MAX_CONTAINERS,
    at,
    check_keys,
    check_size,
    colons,
    key_text,
    no_json_form,
    shown,
    unreadable,
)
from headwater_server.codecs.infer_body import NO_DATA, InferBody, InputEntry, OutputEntry
from headwater_server.codecs.inputs import declared_input, element_count, take_binary
from headwater_server.codecs.parameters import MAX_UINT64, RequestParameters, boolean, integer, unsupported
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.codecs.wording import PARSE_ERRORS, parsed
from headwater_server.errors import BadRequest

__all__ = ["SEQUENCE_EXAMPLE", "RequestDecoder", "example_body", "json_example"]

_SIZE: Final = "binary_data_size"
_SHAPE: Final = msgspec.json.Decoder(list[int])
_VALUE: Final = msgspec.json.Decoder()
LIGHT_BYTES: Final = 64 * 1024
"""JSON of fewer bytes is decoded fast enough for the event loop's thread."""
SEQUENCE_EXAMPLE: Final = {"sequence_id": 1, "sequence_start": True}
"""The parameters of an example request to a model with states."""
LARGEST_EXAMPLE: Final = 1000
"""For an input with more elements, no example is generated."""


class RequestDecoder:
    """Decodes requests to a model. Stateless, so any number of tasks may share it.

    Args:
        signature: the model's inputs, outputs, parameters and heads.
    """

    def __init__(self, signature: Signature) -> None:
        self._name = signature.name
        self._bare_rows = signature.bare_rows
        self._inputs = {spec.name: declared_input(spec, rows=False) for spec in signature.inputs}
        self._required = tuple(spec.name for spec in signature.inputs if not spec.optional)
        self._outputs = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
        self._counts = {spec.counts: spec.name for spec in signature.outputs if spec.counts}
        """The outputs with counts, by ragged output; who asks for the latter gets both."""
        self._wishes = {binary: [OutputWish(name, binary) for name in self._outputs] for binary in (False, True)}
        """All outputs as JSON (False), and all outputs as binary data (True)."""
        self._binary_only = next((name for name, datatype in self._outputs.items() if not datatype.json), None)
        self._parameters = RequestParameters(signature, binary=True)
        self._heads = self._parameters.heads
        self._has_texts = any(spec.datatype == "BYTES" for spec in signature.inputs)  # each text's length is checked
        self._parse: Callable[[bytes | memoryview], InferBody] = msgspec.json.Decoder(InferBody).decode

    def is_light(self, header_length: int) -> bool:
        """Whether decoding is fast, regardless of the size of the binary tensors after the ``header_length`` bytes of
        JSON. False for a model with ``BYTES`` inputs, since the length of each element is checked."""
        return header_length < LIGHT_BYTES and not self._has_texts

    def decode(self, body: bytes, header_length: int | None = None) -> InferRequest:
        """Decode a request.

        Args:
            body: the whole body, decompressed, within the size limit.
            header_length: the value of ``Inference-Header-Content-Length``: the number of bytes of JSON at the start of
                the body. The binary tensors follow, in the order of the inputs that have
                ``parameters.binary_data_size``. None: the whole body is JSON.

        Returns:
            The request; binary tensors are views of ``body``.

        Raises:
            BadRequest: the request is invalid; the message names the field, the expected value and the sent value.
        """
        text: bytes | memoryview = body
        if header_length is not None:
            if not 0 <= header_length <= len(body):
                expected = f"expected the length of the JSON in bytes, 0 to the body's {len(body)}"
                raise at("Inference-Header-Content-Length", None, f"{expected}, got {shown(header_length)}")
            text = memoryview(body)[:header_length]
        is_long = len(text) > MAX_CONTAINERS
        if is_long:
            check_size(body, len(text), tensors=True)
        try:
            infer_body = self._parse(text)
            if is_long:
                check_size(_without_data(infer_body, text))
            if colons(body, len(text)) != _keys(infer_body):
                _check_keys(infer_body, text)
        except PARSE_ERRORS as error:
            raise self._unreadable(error, text, body, header_length) from None
        if infer_body.model_name is not None and infer_body.model_name != self._name:
            expected = f"expected {self._name!r} as in the request's path"
            raise at("model_name", None, f"{expected}, got {shown(infer_body.model_name)}; leave it out")
        request = self._parameters.request(infer_body.id)
        # The cheap checks come first, so that no data are decoded for an invalid request.
        parameters = infer_body.parameters
        binary_output = self._parameters.take(_values(parameters, "parameters"), request) if parameters else False
        if infer_body.outputs:
            request.outputs = self._take_outputs(infer_body.outputs, binary_output)
            if self._heads is not None:
                request.heads = self._heads.heads_of([output.name for output in request.outputs], request.heads)
        else:
            outputs, binary_only = self._wishes[binary_output], self._binary_only
            if self._heads is not None:
                request.heads = request.heads or self._heads.names
                names = self._heads.outputs_of(request.heads, list(self._outputs))
                binary_only = next((name for name in names if not self._outputs[name].json), None)
                outputs = [output for output in outputs if output.name in names]
            if binary_only is not None and not binary_output:
                raise no_json_form("outputs", binary_only, self._outputs[binary_only].name)
            request.outputs = outputs
        offset = len(body) if header_length is None else header_length
        end = self._take_inputs(infer_body.inputs, body, offset, request)
        if end != len(body):
            expected = f"expected the end after the last binary tensor, at byte {end}, got {len(body) - end} bytes more"
            fix = f"compare Inference-Header-Content-Length ({header_length}) and the inputs' {_SIZE}"
            raise at("body", None, f"{expected}; {fix}")
        return request

    def _unreadable(
        self, error: Exception, text: bytes | memoryview, body: bytes, header_length: int | None
    ) -> BadRequest:
        fault = unreadable(error, text, InferBody, binary=f"binary data (parameters.{_SIZE})")
        if fault.field != "body":
            return fault
        hint = ""
        if header_length is None and parsed(error).is_followed:
            hint = "; if binary tensors follow, the header Inference-Header-Content-Length must say where"
        elif header_length is not None and header_length < len(body):
            hint = f" (in the first {header_length} bytes, as Inference-Header-Content-Length says)"
        return BadRequest(fault.message + hint, field="body")

    def _take_outputs(self, entries: list[OutputEntry], binary_output: bool) -> list[OutputWish]:
        wishes: list[OutputWish] = []
        names: set[str] = set()
        for index, output in enumerate(entries):
            name = output.name
            datatype = self._outputs.get(name)
            if datatype is None:
                raise _unknown(f"outputs[{index}].name", "outputs", name, self._outputs)
            if name in names:
                raise at(f"outputs[{index}].name", name, "expected every output at most once, got it a second time")
            names.add(name)
            binary = binary_output
            if output.parameters:
                where = f"outputs[{index}].parameters"
                for key, value in _values(output.parameters, where, name).items():
                    if key != "binary_data":
                        raise unsupported(where, name, key, ("binary_data",))
                    binary = boolean(f"{where}.binary_data", name, value)
            if not binary and not datatype.json:
                raise no_json_form(f"outputs[{index}]", name, datatype.name)
            wishes.append(OutputWish(name, binary))
        for name, binary in list(wishes) if self._counts else ():
            if (count := self._counts.get(name)) is not None and count not in names:
                wishes.append(OutputWish(count, binary))
        return wishes

    def _take_inputs(self, entries: list[InputEntry], body: bytes, offset: int, request: InferRequest) -> int:
        """Check the inputs and set them, the number of rows and ``is_bare`` in the request. ``offset`` is where the
        first binary tensor begins in the body. Returns the offset at which the last binary tensor ends.

        Raises:
            BadRequest: an input is unknown, given twice, missing or wrong, or the numbers of rows differ.
        """
        inputs = request.inputs
        for index, tensor in enumerate(entries):
            name = tensor.name
            declared = self._inputs.get(name)
            if declared is None:
                raise _unknown(f"inputs[{index}].name", "inputs", name, self._inputs)
            if name in inputs:
                raise at(f"inputs[{index}].name", name, "expected every input at most once, got it a second time")
            if tensor.datatype != declared.spec.datatype:
                raise _wrong_datatype(index, name, declared.spec.datatype, tensor.datatype)
            try:
                shape: list[int] = _SHAPE.decode(tensor.shape)
            except PARSE_ERRORS as error:
                raise unreadable(error, tensor.shape, list[int], f"inputs[{index}].shape", tensor=name) from None
            values = tensor.data
            if self._bare_rows and not shape and declared.spec.shape == (1,):  # a scalar
                shape = [1]
            if self._bare_rows and len(shape) == len(declared.spec.shape):
                request.is_bare, shape = True, [1, *shape]
                if (text := bytes(values))[1:].lstrip().startswith(b"["):  # the data are nested as the shape says
                    values = msgspec.Raw(b"[%b]" % text)
            count = element_count(shape, declared, index)
            if not inputs:
                request.rows = shape[0]
            elif shape[0] != request.rows:
                first = next(iter(inputs))
                expected = f"{request.rows} rows as in input {first!r}"
                raise at(f"inputs[{index}].shape", name, f"expected {expected}, got {shape[0]}")
            size = _binary_size(tensor, index) if tensor.parameters else None
            data: bytes | memoryview
            if size is not None:
                data = take_binary(body, offset, size, declared.spec, shape, count, index)
                offset += size
            elif tensor.data is NO_DATA:
                expected = f"expected an array, or binary data and parameters.{_SIZE}"
                raise at(f"inputs[{index}].data", name, f"{expected}, got neither")
            else:
                data = declared.data.pack(values, shape, count, index)
            inputs[name] = RawTensor(tensor.datatype, tuple(shape), data)
        if len(inputs) < len(self._inputs) and (missing := [name for name in self._required if name not in inputs]):
            required, lacking = ", ".join(map(repr, self._required)), ", ".join(map(repr, missing))
            got = f"only {', '.join(map(repr, inputs))}" if inputs else "none"
            raise at("inputs", None, f"expected the required inputs {required}, got {got}; missing: {lacking}")
        return offset


def _keys(infer_body: InferBody) -> int:
    """The number of keys in a request's JSON, if it has no duplicate keys, no keys with null, and no objects as
    parameters' values."""
    count = 1 + (infer_body.id is not None) + (infer_body.model_name is not None)
    if infer_body.parameters is not None:
        count += 1 + len(infer_body.parameters)
    for tensor in infer_body.inputs:
        count += 3 + (tensor.data is not NO_DATA)
        if tensor.parameters is not None:
            count += 1 + len(tensor.parameters)
    if infer_body.outputs is not None:
        count += 1
        for output in infer_body.outputs:
            count += 1 if output.parameters is None else 2 + len(output.parameters)
    return count


def _check_keys(infer_body: InferBody, text: bytes | memoryview) -> None:
    """Check a request that has more colons than `_keys`. The surplus may be colons in strings, keys with null, or keys
    in parameters' values; if it is duplicate keys, the request is refused.

    Raises:
        BadRequest: an object has a key twice.
        RecursionError: arrays are nested too deeply.
    """
    light = _without_data(infer_body, text)
    if light.count(b":") != _keys(infer_body):
        check_keys(light)


def _without_data(infer_body: InferBody, text: bytes | memoryview) -> bytes:
    """The JSON that a request was parsed from, with each tensor's data, if they are an array, replaced by an empty
    array."""
    whole = memoryview(text)
    pieces: list[bytes | memoryview] = []
    begin, end = _address(whole), 0
    for tensor in infer_body.inputs:
        data = memoryview(tensor.data)  # a view of the text: to search or copy it would block other threads
        if data and data[0] == ord("["):
            start = _address(data) - begin
            pieces += (whole[end:start], b"[]")
            end = start + len(data)
    return b"".join((*pieces, whole[end:]))


def _address(data: memoryview) -> int:
    """The address in memory at which the data begin."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _values(parameters: dict[str, msgspec.Raw], where: str, tensor: str | None = None) -> dict[str, Any]:
    """The values of parameters, decoded.

    Raises:
        BadRequest: a value has a string that isn't UTF-8 text, or is nested too deeply.
    """
    values = {}
    for name, raw in parameters.items():
        try:
            values[name] = _VALUE.decode(raw)
        except PARSE_ERRORS as error:
            raise unreadable(error, raw, Any, f"{where}.{key_text(name)}", tensor=tensor) from None
    return values


def _unknown(path: str, kind: str, name: str, tensors: dict[str, Any]) -> BadRequest:
    return at(path, None, f"expected one of the model's {kind} {', '.join(map(repr, tensors))}, got {shown(name)}")


def _wrong_datatype(index: int, name: str, declared: str, got: str) -> BadRequest:
    hint = "" if got in DATATYPES else f", which is not a datatype; the datatypes are {', '.join(DATATYPES)}"
    return at(f"inputs[{index}].datatype", name, f"expected {declared} as the model declares, got {shown(got)}{hint}")


def _binary_size(tensor: InputEntry, index: int) -> int | None:
    """The ``binary_data_size`` of an input that has at least a single parameter.

    Raises:
        BadRequest: the input has another parameter, or also data; or the size is no integer of 0 or more.
    """
    where = f"inputs[{index}].parameters"
    assert tensor.parameters is not None
    for key in tensor.parameters:
        if key != _SIZE:
            raise unsupported(where, tensor.name, key, (_SIZE,))
    if tensor.data is not NO_DATA:
        expected = f"expected either data or parameters.{_SIZE}"
        raise at(f"inputs[{index}].data", tensor.name, f"{expected}, got both; leave one out")
    size = _values(tensor.parameters, where, tensor.name)[_SIZE]
    return integer(f"{where}.{_SIZE}", tensor.name, size, MAX_UINT64)


def example_body(signature: Signature) -> dict[str, Any] | None:
    """An example of a JSON request to the model; None if an input has no JSON form, or has over `LARGEST_EXAMPLE`
    elements and the model declares no example."""
    row = json_example(signature, LARGEST_EXAMPLE)
    if row is None:
        return None
    inputs = []
    for spec in signature.inputs:
        if spec.name in row:
            value = np.array(row[spec.name], object)
            entry = {"name": spec.name, "datatype": spec.datatype, "shape": [1, *value.shape]}
            inputs.append({**entry, "data": value.ravel().tolist()})
    body: dict[str, Any] = {"inputs": inputs}
    if signature.states:
        body["parameters"] = SEQUENCE_EXAMPLE
    if not all(DATATYPES[spec.datatype].json for spec in signature.outputs):
        body["outputs"] = [
            {"name": spec.name, "parameters": {"binary_data": not DATATYPES[spec.datatype].json}}
            for spec in signature.outputs
        ]
    return body


def json_example(signature: Signature, max_elements: int) -> dict[str, Any] | None:
    """An example row, by input name. None if an input has no JSON form, or if the model declares no example and an
    input has over ``max_elements`` elements."""
    if signature.example is None and any(math.prod(spec.shape) > max_elements for spec in signature.inputs):
        return None
    row = signature.example_row()
    return row if all(DATATYPES[spec.datatype].json for spec in signature.inputs if spec.name in row) else None
