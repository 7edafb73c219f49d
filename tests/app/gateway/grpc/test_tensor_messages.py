"""Messages of the Open Inference Protocol's gRPC service, and what is said of wrong ones."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tritonclient.grpc import service_pb2 as pb

from headwater.datatypes import DATATYPES, pack_bytes
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.tensors import InferRequest, RawTensor
from headwater_server.errors import BadRequest, CallableFailed
from headwater_server.gateway.grpc.tensor_messages import binary_body, generate_fields, infer_response, text_response

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
SIGNATURE = Signature(
    name="m",
    inputs=tuple(TensorSpec(name, name, (-1,), optional=True) for name in DATATYPES),
    outputs=(TensorSpec("y", "FP32", (-1,)), TensorSpec("label", "BYTES", (1,))),
)
DECODER = RequestDecoder(SIGNATURE)


def decoded(message: Any) -> InferRequest:
    body, length = binary_body(message)
    return DECODER.decode(body, length)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from(sorted(CONTENTS)))
    return name, draw(npst.arrays(DATATYPES[name].numpy, (draw(st.integers(1, 3)), draw(st.integers(1, 4)))))


@given(arrays())
def test_contents_and_raw_data_are_the_same_request(given_array: tuple[str, Any]) -> None:
    name, array = given_array
    typed, raw = (pb.ModelInferRequest(model_name="m", id="7") for _ in range(2))
    for message in (typed, raw):
        message.inputs.add(name=name, datatype=name, shape=array.shape)
    getattr(typed.inputs[0].contents, CONTENTS[name]).extend(array.ravel().tolist())
    raw.raw_input_contents.append(array.tobytes())
    for message in (typed, raw):
        request = decoded(message)
        assert bytes(request.inputs[name].data) == array.tobytes()
        assert (request.id, request.inputs[name].shape) == ("7", array.shape)
        assert [(wish.name, wish.binary) for wish in request.outputs] == [("y", True), ("label", True)]


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=5))
def test_elements_of_bytes(elements: list[bytes]) -> None:
    message = pb.ModelInferRequest()
    message.inputs.add(name="BYTES", datatype="BYTES", shape=[1, len(elements)]).contents.bytes_contents.extend(
        elements
    )
    assert bytes(decoded(message).inputs["BYTES"].data) == pack_bytes(elements)


@given(st.binary(max_size=64))
def test_bytes_are_a_request_or_refused(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        message = pb.ModelInferRequest.FromString(raw)
        for read in (decoded, generate_fields):
            with contextlib.suppress(BadRequest):
                read(message)


def input_of(datatype: str, shape: list[int], **contents: list[Any]) -> Any:
    message = pb.ModelInferRequest()
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape)
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    return message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (input_of("FP32", [1, 1]), "`x`: expected data in raw_input_contents or contents.fp32_contents, got none"),
        (input_of("FP32", [1, 1], int_contents=[1]), "`x`: expected FP32 in contents.fp32_contents, got int_contents"),
        (input_of("INT8", [1, 1], int_contents=[128]), "`x`: expected -128 to 127 for INT8, got 128"),
        (input_of("UINT16", [1, 1], uint_contents=[65536]), "`x`: expected 0 to 65535 for UINT16, got 65536"),
        (input_of("FP16", [1, 1], fp32_contents=[1]), "`x`: expected FP16 in raw_input_contents, got none"),
        (input_of("FLOAT", [1, 1]), "`x`, datatype: expected one of BOOL, .*, got 'FLOAT'"),
    ],
    ids=["no data", "other contents", "too large", "too large, unsigned", "FP16", "datatype"],
)
def test_wrong_messages(message: Any, expected: str) -> None:
    with pytest.raises(BadRequest, match=f"^inputs, {expected}$"):
        binary_body(message)


def test_raw_data_for_each_input_and_nothing_else() -> None:
    message = input_of("FP32", [1, 1], fp32_contents=[1])
    message.raw_input_contents.append(b"\0" * 4)
    with pytest.raises(BadRequest, match=r"`x`: expected raw_input_contents or contents, got both$"):
        binary_body(message)
    message.raw_input_contents.append(b"\0" * 4)
    for read in (binary_body, generate_fields):
        with pytest.raises(BadRequest, match=r"^raw_input_contents: expected 1, one for each input, got 2$"):
            read(message)


REQUEST = DECODER.decode(b'{"id":"7","inputs":[{"name":"BOOL","datatype":"BOOL","shape":[1,1],"data":[true]}]}')
OUTPUTS = {
    "y": RawTensor("FP32", (1, 2), np.array([1, 2], np.float32).tobytes()),
    "label": RawTensor("BYTES", (1, 1), pack_bytes([b"a"])),
}


class TestResponses:
    def test_outputs(self) -> None:
        message = infer_response("m", "3", SIGNATURE, REQUEST, OUTPUTS, {"n": 1, "s": "a", "b": True})
        assert (message.model_name, message.model_version, message.id) == ("m", "3", "7")
        assert [(one.name, one.datatype, list(one.shape)) for one in message.outputs] == [
            ("y", "FP32", [1, 2]), ("label", "BYTES", [1, 1]),
        ]  # fmt: skip
        assert list(message.raw_output_contents) == [tensor.data for tensor in OUTPUTS.values()]
        parameters = message.parameters
        assert (parameters["n"].int64_param, parameters["s"].string_param, parameters["b"].bool_param) == (1, "a", True)

    def test_a_missing_output(self) -> None:
        some = {"y": OUTPUTS["y"]}
        with pytest.raises(CallableFailed, match="output 'label': expected BYTES, got no such output"):
            infer_response("m", "1", SIGNATURE, REQUEST, some, {})
        assert len(infer_response("m", "1", SIGNATURE, REQUEST, some, {}, is_partial=True).outputs) == 1

    def test_a_text(self) -> None:
        message = text_response("m", "1", "7", "grün", {"finish_reason": "stop"})
        assert message.raw_output_contents[0] == pack_bytes(["grün".encode()])


class TestGenerateFields:
    def test_inputs_and_parameters(self) -> None:
        message = pb.ModelInferRequest(id="7")
        message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
        message.inputs.add(name="max_tokens", datatype="INT32", shape=[1]).contents.int_contents.append(5)
        message.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        message.inputs.add(name="stop_words", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a", b"b"])
        message.parameters["temperature"].double_param = 0.5
        fields, streams = generate_fields(message)
        assert streams
        assert fields == {
            "text_input": "a", "max_tokens": 5, "stop_words": ["a", "b"], "parameters": {"temperature": 0.5}, "id": "7",
        }  # fmt: skip

    def test_wrong_ones(self) -> None:
        message = input_of("BYTES", [1], bytes_contents=[b"\xff"])
        with pytest.raises(BadRequest, match="`x`: expected UTF-8 text, got other bytes"):
            generate_fields(message)
        message = input_of("INT32", [2], int_contents=[1])
        with pytest.raises(BadRequest, match=r"`x`: expected 2 elements for shape \[2\], got 1"):
            generate_fields(message)
        message = pb.ModelInferRequest()
        message.outputs.add(name="y")
        with pytest.raises(BadRequest, match="outputs: expected text_output, got 'y'"):
            generate_fields(message)
