"""Requests and answers of Triton's generate extension: a request is a single row; inputs and outputs are JSON fields.

In addition to the extension, rows may have any shape, and requests can choose a pipeline's heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

from headwater.datatypes import DATATYPES
from headwater.signature import Signature
from headwater_server.codecs.faults import (
    at,
    check_keys,
    check_size,
    colons,
    key_text,
    read_json,
    shape_text,
    shown,
    unreadable,
)
from headwater_server.codecs.infer_response import checked_size, flat_json, omission_parameters
from headwater_server.codecs.inputs import DeclaredInput, declared_input, element_count
from headwater_server.codecs.parameters import RequestId, RequestParameters
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, OutputWish, RawTensor
from headwater_server.codecs.wording import PARSE_ERRORS
from headwater_server.errors import BadRequest, CallableFailed, HeadwaterError

__all__ = ["GenerateDecoder", "GenerateEncoder"]

_Fields = dict[str, msgspec.Raw]
_BODY: Final = msgspec.json.Decoder(_Fields)
_NULL: Final = msgspec.Raw(b"null")
_REQUEST_FIELDS: Final = ("id", "parameters")
_ANSWER_FIELDS: Final = (
    "id", "model_name", "model_version", "parameters", "head", "status", "time_ms", "error", "final", "heads",
)  # fmt: skip
_NO_ELEMENT_TEXT: Final = b" \t\r\n"
_NUMBER_TEXT: Final = b" \t\r\n0123456789+-.eEtruefals"
_MAX_NESTING: Final = 64


class GenerateDecoder:
    """Decodes requests to a model. Stateless, so any number of tasks may share it.

    Args:
        signature: the model's inputs, outputs, parameters and heads.
    """

    def __init__(self, signature: Signature) -> None:
        self._inputs = {spec.name: declared_input(spec, rows=True) for spec in signature.inputs}
        self._required = tuple(spec.name for spec in signature.inputs if not spec.optional)
        self._outputs = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
        self._parameters = RequestParameters(signature, binary=False)

    def decode(self, body: bytes) -> InferRequest:
        """Decode a request.

        Args:
            body: the whole body, decompressed, within the size limit: a JSON object with the inputs by name, and
                optionally ``id`` and ``parameters``. An input's value is a row: nested as its shape, flat, or, for a
                single element, a scalar. The value determines the dimensions that vary. Parameters may also be fields
                of the object, next to the inputs.

        Returns:
            The request, with a single row and with all outputs (of a pipeline: of the wanted heads) in JSON.

        Raises:
            BadRequest: the request is invalid; the message names the field, the expected value and the sent value.
        """
        check_size(body, tensors=True)
        try:
            fields = _BODY.decode(body)
            # Without duplicate keys, the body's colons are a colon for each key, and the colons in the values.
            if colons(body, len(body)) != sum(1 + colons(bytes(raw), len(raw)) for raw in fields.values()):
                check_keys(body)
        except PARSE_ERRORS as error:
            raise unreadable(error, body, _Fields, binary="binary data, to /infer") from None
        request = self._parameters.request(read_json(fields.get("id", _NULL), RequestId | None, "id"))
        parameters: dict[str, Any] = (
            read_json(fields.get("parameters", _NULL), dict[str, Any] | None, "parameters") or {}
        )
        self._parameters.take(parameters, request)
        beside: dict[str, Any] = {}
        values: dict[str, msgspec.Raw] = {}
        for name, raw in fields.items():
            if name in _REQUEST_FIELDS:
                continue
            if name in self._inputs:
                values[name] = raw
            elif name not in self._parameters.known and not self._parameters.takes_any:
                choices = ", ".join((*self._inputs, *_REQUEST_FIELDS))
                choices += f", or of the parameters {', '.join(self._parameters.known)}"
                raise at(key_text(name), None, f"expected one of the fields {choices}, got {shown(name)}")
            elif name in parameters:
                raise at(key_text(name), None, f"expected it once, got parameters.{key_text(name)} as well")
            else:
                beside[name] = read_json(raw, Any, key_text(name))
        self._parameters.take(beside, request, "")
        self._take_outputs(request)
        for name, raw in values.items():
            request.inputs[name] = _row(raw, self._inputs[name])
        missing = [name for name in self._required if name not in request.inputs]
        if missing:
            required, lacking = ", ".join(map(repr, self._required)), ", ".join(map(repr, missing))
            message = f"expected the required inputs {required}, got an object without {lacking}"
            raise at(key_text(missing[0]), None, message)
        request.rows = 1
        return request

    def _take_outputs(self, request: InferRequest) -> None:
        names = list(self._outputs)
        heads = self._parameters.heads
        if heads is not None:
            request.heads = request.heads or heads.names
            names = heads.outputs_of(request.heads, names)
        for name in names:
            datatype = self._outputs[name]
            if not datatype.json:
                fix = "use /infer and binary data"
                fix += "; or leave its head out of parameters.heads" if heads is not None else ""
                raise at("outputs", name, f"expected a datatype that has a JSON form, got {datatype.name}; {fix}")
            if name in _ANSWER_FIELDS:
                raise at("outputs", name, "expected a name that is not a field of the answer; use /infer")
        request.outputs = [OutputWish(name, binary=False) for name in names]


def _row(raw: msgspec.Raw, declared: DeclaredInput) -> RawTensor:
    """The tensor, of a single row, that an input's JSON stands for.

    Raises:
        BadRequest: the JSON doesn't fit the input's datatype or shape.
    """
    spec = declared.spec
    text = bytes(raw).strip()
    path = key_text(spec.name)
    if not text.startswith(b"["):
        return _single(text, declared)
    nesting = _nesting(text, spec.datatype, path)
    rank = len(spec.shape)
    if len(nesting) == 1:
        dims = _dims_of_flat(nesting[0], declared)
    elif len(nesting) == rank or (len(nesting) < rank and nesting[-1] == 0):
        # An empty array doesn't show its inner dimensions: the declared sizes are used.
        dims = [*nesting, *(max(dim, 0) for dim in spec.shape[len(nesting) :])]
    else:
        expected = f"expected a flat array, or one nested as a row of shape {shape_text(spec.shape)}"
        raise at(path, None, f"{expected}, got {len(nesting)} levels of nesting")
    shape = [1, *dims]
    count = element_count(shape, declared, None)
    return RawTensor(spec.datatype, tuple(shape), declared.data.pack(text, dims, count, None))


def _single(text: bytes, declared: DeclaredInput) -> RawTensor:
    """The tensor of a row with a single element, which the client sent as a scalar.

    Raises:
        BadRequest: the input's shape needs an array, or the scalar doesn't fit the datatype.
    """
    spec = declared.spec
    path = key_text(spec.name)
    if any(dim not in (1, -1) for dim in spec.shape):
        kind = {ord('"'): "a string", ord("{"): "an object", ord("n"): "null"}.get(text[0], "a single value")
        expected = f"expected an array of {spec.datatype} for a row of shape {shape_text(spec.shape)}"
        raise at(path, None, f"{expected}, got {kind}")
    shape = [1] * (len(spec.shape) + 1)
    try:
        data = declared.data.pack(b"[%b]" % text, shape[1:], 1, None)
    except BadRequest as error:  # the message names the scalar as an array's first element
        raise error.moved(path) from None
    return RawTensor(spec.datatype, tuple(shape), data)


def _nesting(text: bytes, datatype: str, path: str) -> list[int]:
    """The length of an array, the length of its first element if that is an array, and so on to the innermost array.

    The lengths of the other elements are not checked.

    Raises:
        BadRequest: the nesting is deeper than `_MAX_NESTING`; or ``BYTES`` elements can't be decoded.
    """
    lengths = []
    if datatype == "BYTES":
        value: Any = read_json(text, Any, path)
        while isinstance(value, list):
            lengths.append(len(value))
            value = value[0] if value else None
        return lengths
    # Brackets and commas are counted in the text without its numbers, so that no object is allocated per number.
    skeleton = text.translate(None, _NUMBER_TEXT)
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    if depth > _MAX_NESTING:
        raise at(path, None, f"expected an array, got {depth} levels of nesting")
    for level in range(1, depth + 1):
        end = skeleton.find(b"]" * level)
        if level > 1:
            lengths.append(skeleton.count(b"]" * (level - 1), 0, end + level - 1))
        elif text[: text.find(b"]")].rstrip(_NO_ELEMENT_TEXT).endswith(b"["):
            lengths.append(0)
        else:
            lengths.append(skeleton.count(b",", 0, end) + 1)
    return lengths[::-1]


def _dims_of_flat(length: int, declared: DeclaredInput) -> list[int]:
    """A row's dimensions, computed from the number of elements in a flat array.

    Raises:
        BadRequest: the number doesn't fit the declared shape, or several dimensions vary.
    """
    shape = declared.spec.shape
    path = key_text(declared.spec.name)
    fixed = math.prod(dim for dim in shape if dim >= 0)
    varying = sum(dim < 0 for dim in shape)
    if varying > 1:
        expected = f"expected arrays nested as a row of shape {shape_text(shape)}, several dimensions of which vary"
        raise at(path, None, f"{expected}, got a flat array")
    if varying and (fixed == 0 or length % fixed):
        raise at(path, None, f"expected a multiple of {fixed} elements, for shape {shape_text(shape)}, got {length}")
    if not varying and length != fixed:
        raise at(path, None, f"expected {fixed} elements, for shape {shape_text(shape)}, got {length}")
    return [length // fixed if dim < 0 else dim for dim in shape]


class GenerateEncoder:
    """Encodes the answers of a model, whole or piece by piece. Stateless, so any number of tasks may share it.

    Args:
        signature: the model's name, outputs and heads.
        version: the model's version in answers.
    """

    def __init__(self, signature: Signature, version: str = "1") -> None:
        self._model = b'{"model_name":%b,"model_version":%b' % (orjson.dumps(signature.name), orjson.dumps(version))
        self._outputs = {
            spec.name: (DATATYPES[spec.datatype], b",%b:" % orjson.dumps(spec.name)) for spec in signature.outputs
        }
        self._heads = {head.name: head.outputs for head in signature.heads}
        self._gives_text = any((spec.name, spec.datatype) == ("text_output", "BYTES") for spec in signature.outputs)

    def whole(self, request: InferRequest, answer: Answer) -> bytes:
        """The JSON of a whole answer. An output with a single element is a scalar, any other output a flat array.

        Raises:
            BadRequest: an output isn't UTF-8 text.
            CallableFailed: a requested output is missing, or its bytes contradict its declaration.
        """
        gone = {name for head in answer.omitted for name in self._heads[head.head]}
        names = [output.name for output in request.outputs if output.name not in gone]
        parameters = b""
        if answer.omitted:
            parameters = b',"parameters":%b' % orjson.dumps(omission_parameters(answer.omitted))
        return b"%b%b%b}" % (self._begin(request), parameters, self._values(names, answer.outputs))

    def piece(self, request: InferRequest, answer: HeadAnswer) -> bytes:
        """The JSON of a piece of an answer: the result of a head, or an element of a stream.

        Raises:
            BadRequest: an output isn't UTF-8 text.
            CallableFailed: a requested output is missing, or its bytes contradict its declaration.
        """
        begin = self._begin(request)
        if not self._heads:
            return b"%b%b}" % (begin, self._values([output.name for output in request.outputs], answer.outputs))
        fields: dict[str, object] = {"head": answer.head, "status": answer.status, "time_ms": round(answer.took_ms, 3)}
        names: Sequence[str] = ()
        if answer.error is not None:
            fields["error"] = answer.error.message
        else:
            head_outputs = self._heads[answer.head]
            names = [output.name for output in request.outputs if output.name in head_outputs]
        return b"%b,%b%b}" % (begin, orjson.dumps(fields)[1:-1], self._values(names, answer.outputs))

    def failure(self, error: HeadwaterError) -> bytes:
        """The JSON of an error that ends a started answer."""
        return orjson.dumps({"error": error.message, "status": error.status})

    def end(self, request: InferRequest, statuses: Mapping[str, str]) -> bytes:
        """The JSON that ends an answer in pieces.

        Args:
            request: the request.
            statuses: the heads' statuses (`HeadAnswer.status`), by head; ignored for a model without heads.
        """
        heads = b',"heads":%b' % orjson.dumps(dict(statuses)) if self._heads else b""
        # The Open Inference Protocol (`generate_rest.yaml`) requires ``text_output`` in every event.
        text = b',"text_output":""' if self._gives_text else b""
        return b'%b%b,"final":true%b}' % (self._begin(request), text, heads)

    def _begin(self, request: InferRequest) -> bytes:
        return b'%b,"id":%b' % (self._model, orjson.dumps(request.id)) if request.id else self._model

    def _values(self, names: Sequence[str], outputs: Mapping[str, RawTensor]) -> bytes:
        parts: list[bytes] = []
        for name in names:
            datatype, key = self._outputs[name]
            tensor = outputs.get(name)
            if tensor is None:
                raise CallableFailed(f"output {name!r}: expected {datatype.name}, got no such output")
            checked_size(name, tensor, datatype)
            text = flat_json(name, tensor, datatype)
            parts += (key, text[1:-1] if math.prod(tensor.shape) == 1 else text)
        return b"".join(parts)
