"""Targets: requests with tensors in JSON and in binary form, and the answers to them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES, pack_bytes, unpack_bytes
from headwater.model import Parameter
from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater_server.codecs import json_data
from headwater_server.codecs.generate_body import GenerateDecoder, GenerateEncoder
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.infer_response import ResponseEncoder
from headwater_server.codecs.json_data import JsonData
from headwater_server.codecs.tensors import Answer, InferRequest, OutputWish, RawTensor
from headwater_server.errors import CallableFailed, HeadwaterError
from tests.fuzz.draw import Draw, body_of
from tests.fuzz.promises import check_refusal

__all__ = ["binary", "generate", "infer", "pieces", "response"]

NAMES: Final = tuple(DATATYPES)
PLAIN: Final = Signature(
    name="m",
    inputs=(
        TensorSpec("x", "FP32", (3, -1)),
        TensorSpec("ids", "INT32", (-1,), optional=True),
        TensorSpec("text", "BYTES", (1,), optional=True),
        TensorSpec("mask", "BOOL", (-1,), optional=True),
    ),
    outputs=(TensorSpec("y", "FP32", (-1,)), TensorSpec("label", "BYTES", (1,))),
    parameters=(
        Parameter("temperature", "float", 1.0, "batch", minimum=0.0, maximum=2.0),
        Parameter("top_k", "int", 5, "row"),
        Parameter("mode", "str", "fast", "batch", choices=("fast", "exact")),
        Parameter("verbose", "bool", False, "row"),
    ),
)
PIPELINE: Final = Signature(
    name="p",
    inputs=(TensorSpec("x", "FP32", (3, -1)),),
    outputs=(TensorSpec("digit", "INT32", (1,)), TensorSpec("parity", "BOOL", (1,)), TensorSpec("ink", "FP16", (1,))),
    heads=(HeadSpec("digits", ("digit",)), HeadSpec("even", ("parity",)), HeadSpec("dark", ("ink",), on_error="omit")),
)
ALL: Final = Signature(
    name="all",
    inputs=tuple(TensorSpec(name.lower(), name, (-1,) * (n % 3), optional=n > 0) for n, name in enumerate(NAMES)),
    outputs=tuple(TensorSpec(name, name, (-1,)) for name in NAMES),
)
SIGNATURES: Final = {signature.name: signature for signature in (PLAIN, PIPELINE, ALL)}
INFER: Final = {name: RequestDecoder(signature) for name, signature in SIGNATURES.items()}
GENERATE: Final = {
    **{name: GenerateDecoder(signature) for name, signature in SIGNATURES.items()},
    "all": GenerateDecoder(msgspec.structs.replace(ALL, outputs=ALL.outputs[:1])),  # some have no JSON form
}
ENCODERS: Final = {name: ResponseEncoder(signature) for name, signature in SIGNATURES.items()}
ALL_ENCODER: Final = GenerateEncoder(ALL)
SEEDS: Final = Path(__file__).parent / "seeds"
INFER_EXAMPLES: Final = [path.read_bytes() for path in sorted((SEEDS / "infer").glob("*.json"))]
GENERATE_EXAMPLES: Final = [path.read_bytes() for path in sorted((SEEDS / "generate").glob("*.json"))]


def infer(data: bytes) -> bool:
    """``POST /v2/models/{m}/infer`` in JSON: refused, or the same tensors that Python's own parser and numpy make."""
    body = body_of(data, INFER_EXAMPLES)
    accepted = False
    for name, decoder in INFER.items():
        try:
            request = decoder.decode(body)
        except HeadwaterError as error:
            check_refusal(error)
            continue
        given = {tensor["name"]: tensor["data"] for tensor in json.loads(body)["inputs"]}
        for tensor_name, tensor in request.inputs.items():
            _check_tensor(tensor, given[tensor_name])
            assert tensor.shape[0] == request.rows
        _check_binary_form(decoder, request)
        _check_answerable(name, request)
        accepted = True
    return accepted


def generate(data: bytes) -> bool:
    """``POST /v2/models/{m}/generate``: refused, or one row with the elements that Python's own parser sees."""
    body = body_of(data, GENERATE_EXAMPLES)
    accepted = False
    for name, decoder in GENERATE.items():
        try:
            request = decoder.decode(body)
        except HeadwaterError as error:
            check_refusal(error)
            continue
        given = json.loads(body)
        assert request.rows == 1
        for tensor_name, tensor in request.inputs.items():
            assert tensor.shape[0] == 1
            _check_tensor(tensor, given[tensor_name])
        _check_answerable(name, request)
        accepted = True
    return accepted


def pieces(data: bytes) -> bool:
    """A large ``data`` is parsed in pieces, which must give what parsing it at once does; here pieces are small."""
    draw = Draw(data)
    datatype = draw.choice([name for name in NAMES if name != "BYTES" and DATATYPES[name].json])
    shape = [draw.below(5) for _ in range(1 + draw.below(3))]
    size = 1 + draw.below(12)
    count = math.prod(shape)
    if draw.flag():
        text = json.dumps(_nested(draw, shape, datatype)).encode()
        place = draw.below(len(text) + 1)
        text = text[:place] + draw.raw(draw.below(4)) + text[place + draw.below(3) :]
    else:
        text = draw.rest()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False  # it never comes so far: the parser of the request sees it first
    reader = JsonData(TensorSpec("x", datatype, (-1,) * (len(shape) - 1)))
    whole = _packed(reader, text, shape, count)
    with mock.patch.object(json_data, "_PIECE_BYTES", size):
        assert _packed(reader, text, shape, count) == whole
    return whole is not None


def binary(data: bytes) -> bool:
    """The binary tensor extension: a body, where its JSON ends, and what follows. What has a JSON form gives the same
    tensor in that form."""
    draw = Draw(data)
    if draw.flag():
        header_length = int.from_bytes(draw.raw(2), "little", signed=True)
        body = draw.rest()
    else:
        inputs = []
        for _ in range(1 + draw.below(3)):
            spec = draw.choice(ALL.inputs)
            shape: list[Any] = [draw.below(4) for _ in range(len(spec.shape) + 1)]
            size = math.prod(shape) * DATATYPES[spec.datatype].size_bytes + draw.choice((0, 0, 0, 1, 255))
            if not DATATYPES[spec.datatype].size_bytes:
                size = draw.below(64)
            if draw.below(8) == 7:
                shape[draw.below(len(shape))] = draw.value()
            entry = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
            inputs.append({**entry, "parameters": {"binary_data_size": draw.value() if draw.below(16) == 15 else size}})
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        header_length, body = len(text), text + draw.rest()
    accepted = False
    for name, decoder in INFER.items():
        try:
            request = decoder.decode(body, header_length)
        except HeadwaterError as error:
            check_refusal(error)
            continue
        for tensor in request.inputs.values():
            _check_size(tensor)
        _check_binary_form(decoder, request)
        _check_json_form(decoder, request)
        _check_answerable(name, request)
        accepted = True
    return accepted


def response(data: bytes) -> bool:
    """An output says the same in JSON and in binary form; bytes that contradict its declaration are refused."""
    draw = Draw(data)
    spec = draw.choice(ALL.outputs)
    datatype = DATATYPES[spec.datatype]
    shape = tuple(draw.below(4) for _ in range(2))
    count = math.prod(shape)
    if datatype.size_bytes:
        raw = draw.raw(count * datatype.size_bytes + draw.choice((0, 0, 0, 1)))
        raw = raw.ljust(count * datatype.size_bytes - draw.choice((0, 0, 0, 1)), b"\0")
        if spec.datatype == "BOOL":
            raw = bytes(byte & 1 for byte in raw)
        is_right = len(raw) == count * datatype.size_bytes
    elif draw.flag():
        raw = pack_bytes([draw.raw(draw.below(6)) for _ in range(count)])
        is_right = True
    else:
        raw = draw.rest()
        is_right = _holds(raw, count)
    outputs = {spec.name: RawTensor(draw.choice((spec.datatype,) * 7 + NAMES[:1]), shape, raw)}
    is_right = is_right and outputs[spec.name].datatype == spec.datatype
    for is_binary in (True, False):
        wanted = InferRequest("id\n\u2028", {}, 1, [OutputWish(spec.name, is_binary)], {}, {})
        try:
            chunks, header_length = ENCODERS["all"].encode(wanted, outputs)
        except CallableFailed:
            assert not is_right
            continue
        except HeadwaterError as error:
            check_refusal(error)
            assert not is_binary
            assert not datatype.json or spec.datatype == "BYTES"
            continue
        body = b"".join(chunks)
        answer = json.loads(body[:header_length])
        assert answer["id"] == wanted.id
        (told,) = answer["outputs"]
        assert tuple(told["shape"]) == shape
        if header_length is not None:
            assert is_binary
            assert told["parameters"]["binary_data_size"] == len(body) - header_length
            assert body[header_length:] == raw
            continue
        assert is_right
        _check_elements(raw, spec.datatype, told["data"])
        row = json.loads(ALL_ENCODER.whole(wanted, Answer(outputs)))[spec.name]
        _check_elements(raw, spec.datatype, [row] if count == 1 else row)
    return is_right


def _check_size(tensor: RawTensor) -> None:
    size = DATATYPES[tensor.datatype].size_bytes
    count = math.prod(tensor.shape)
    assert all(dim >= 0 for dim in tensor.shape)
    assert len(tensor.data) == count * size if size else _holds(tensor.data, count)


def _holds(raw: bytes | memoryview, count: int) -> bool:
    try:
        return len(unpack_bytes(raw)) == count
    except ValueError:
        return False


def _flat(value: Any) -> list[Any]:
    return [element for part in value for element in _flat(part)] if isinstance(value, list) else [value]


def _check_tensor(tensor: RawTensor, given: Any) -> None:
    _check_size(tensor)
    _check_elements(tensor.data, tensor.datatype, _flat(given))


def _check_elements(raw: bytes | memoryview, datatype: str, elements: list[Any]) -> None:
    """See that bytes and JSON have the same elements."""
    if datatype == "BYTES":
        assert unpack_bytes(raw) == [element.encode() for element in elements]
        return
    dtype = DATATYPES[datatype].numpy
    got = np.frombuffer(raw, dtype)
    if dtype.kind == "f":
        expected = np.array([float(element) for element in elements], np.float64)
        assert np.array_equal(got, expected.astype(dtype), equal_nan=True)
    else:
        assert got.tolist() == elements


def _check_binary_form(decoder: RequestDecoder, request: InferRequest) -> None:
    """The same tensors, sent as binary data."""
    inputs = [
        {
            **{"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape)},
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for name, tensor in request.inputs.items()
    ]
    outputs = [{"name": wish.name, "parameters": {"binary_data": wish.binary}} for wish in request.outputs]
    text = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    body = text + b"".join(bytes(tensor.data) for tensor in request.inputs.values())
    again = decoder.decode(body, len(text))
    assert _bytes_of(again.inputs) == _bytes_of(request.inputs)
    assert again.rows == request.rows
    assert again.outputs == request.outputs


def _check_json_form(decoder: RequestDecoder, request: InferRequest) -> None:
    """The same tensors in JSON, as far as that has them."""
    inputs = []
    for name, tensor in request.inputs.items():
        datatype = DATATYPES[tensor.datatype]
        if not datatype.json:
            return
        elements: list[Any]
        if tensor.datatype == "BYTES":
            try:
                elements = [element.decode() for element in unpack_bytes(tensor.data)]
            except UnicodeDecodeError:
                return
        else:
            values = np.frombuffer(tensor.data, datatype.numpy)
            if not np.isfinite(values).all():
                return
            elements = values.tolist()
        inputs.append({"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": elements})
    outputs = [{"name": wish.name, "parameters": {"binary_data": wish.binary}} for wish in request.outputs]
    again = decoder.decode(json.dumps({"inputs": inputs, "outputs": outputs}).encode())
    assert _bytes_of(again.inputs) == _bytes_of(request.inputs)


def _bytes_of(tensors: Mapping[str, RawTensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (tensor.datatype, tensor.shape, bytes(tensor.data)) for name, tensor in tensors.items()}


def _check_answerable(name: str, request: InferRequest) -> None:
    """An answer without elements can be written to it."""
    shapes = {spec.name: spec.datatype for spec in SIGNATURES[name].outputs}
    outputs = {wish.name: RawTensor(shapes[wish.name], (0, 1), b"") for wish in request.outputs}
    chunks, header_length = ENCODERS[name].encode(request, outputs)
    assert len(json.loads(b"".join(chunks)[:header_length])["outputs"]) == len(request.outputs)


def _nested(draw: Draw, shape: list[int], datatype: str) -> Any:
    if shape:
        return [_nested(draw, shape[1:], datatype) for _ in range(shape[0])]
    if datatype == "BOOL":
        return draw.flag()
    number = draw.below(256)
    return number / 4 if datatype.startswith("FP") else number


def _packed(reader: JsonData, text: bytes, shape: list[int], count: int) -> bytes | None:
    try:
        return reader.pack(text, shape, count, 0)
    except HeadwaterError as error:
        check_refusal(error)
        return None
