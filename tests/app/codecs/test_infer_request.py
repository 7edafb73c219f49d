"""What a request to infer may look like, and what is said when it does not."""

from __future__ import annotations

import copy
import json
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.datatypes import DATATYPES, pack_bytes, unpack_bytes
from headwater.model import Parameter
from headwater.signature import REQUEST, HeadSpec, Signature, TensorSpec
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.tensors import InferRequest, OutputWish
from headwater_server.errors import BadRequest

HEADER = "Inference-Header-Content-Length"
JSON_DATATYPES = [name for name, datatype in DATATYPES.items() if datatype.json]

SIGNATURE = Signature(
    name="m",
    inputs=(
        TensorSpec("x", "FP32", (3, -1)),
        TensorSpec("ids", "INT32", (-1,), optional=True),
        TensorSpec("text", "BYTES", (1,), optional=True),
        TensorSpec("mask", "BOOL", (-1,), optional=True),
        TensorSpec("half", "FP16", (2,), optional=True),
        TensorSpec("brain", "BF16", (2,), optional=True),
    ),
    outputs=(TensorSpec("y", "FP32", (-1,)), TensorSpec("label", "BYTES", (1,))),
    parameters=(
        Parameter("temperature", "float", 1.0, "batch", minimum=0.0, maximum=2.0),
        Parameter("top_k", "int", 5, "row"),
        Parameter("mode", "str", "fast", "batch", choices=("fast", "exact")),
        Parameter("verbose", "bool", False, "row"),
    ),
)
DECODER = RequestDecoder(SIGNATURE)


PIPELINE = RequestDecoder(
    Signature(
        name="p",
        inputs=(TensorSpec("x", "FP32", (3, -1)),),
        outputs=(
            TensorSpec("digit", "INT32", (1,)),
            TensorSpec("parity", "BOOL", (1,)),
            TensorSpec("scores", "FP32", (10,)),
            TensorSpec("ink", "FP16", (1,)),
        ),
        parameters=(Parameter("mode", "str", "fast", "batch"),),
        heads=(
            HeadSpec("digits", ("digit", "scores")),
            HeadSpec("even", ("parity",)),
            HeadSpec("dark", ("ink",), on_error="omit"),
        ),
    )
)


def one_input(datatype: str, *shape: int) -> RequestDecoder:
    return RequestDecoder(
        Signature(name="m", inputs=(TensorSpec("x", datatype, shape),), outputs=(TensorSpec("y", "FP32", (1,)),))
    )


def x(**changes: Any) -> dict[str, Any]:
    """A valid input ``x``, with changes; a change to ... takes the field out."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3, 2], "data": [1, 2, 3, 4, 5, 6]} | changes
    return {key: value for key, value in tensor.items() if value is not ...}


def other(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def request(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs) or [x()], **fields}).encode()


def binary(tensor: dict[str, Any], raw: bytes, *, size: Any = None, decoder: RequestDecoder = DECODER) -> InferRequest:
    """Decode a request with one binary input."""
    size = len(raw) if size is None else size
    tensor = {key: value for key, value in tensor.items() if key != "data"} | {"parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [tensor] if tensor["name"] == "x" else [x(), tensor]}).encode()
    return decoder.decode(text + raw, len(text))


def refused(body: bytes, *said: str, header_length: int | None = None, decoder: RequestDecoder = DECODER) -> BadRequest:
    """The error for a body; the message holds all of ``said``."""
    with pytest.raises(BadRequest) as caught:
        decoder.decode(body, header_length)
    error = caught.value
    assert error.status == 400
    for text in said:
        assert text in error.message
    assert error.field
    assert len(error.message) < 1500
    return error


def binary_refused(tensor: dict[str, Any], raw: bytes, *said: str, size: Any = None) -> None:
    with pytest.raises(BadRequest) as caught:
        binary(tensor, raw, size=size)
    for text in said:
        assert text in caught.value.message


class TestAccepted:
    def test_flat_data(self) -> None:
        decoded = DECODER.decode(request(id="7"))
        assert decoded.id == "7"
        assert decoded.rows == 1
        assert decoded.inputs["x"].shape == (1, 3, 2)
        assert decoded.inputs["x"].datatype == "FP32"
        assert decoded.inputs["x"].data == struct.pack("<6f", 1, 2, 3, 4, 5, 6)

    def test_nested_data(self) -> None:
        decoded = DECODER.decode(request(x(data=[[[1, 2], [3, 4], [5, 6]]])))
        assert decoded.inputs["x"].data == struct.pack("<6f", 1, 2, 3, 4, 5, 6)

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("count", [3, 30_000])
    def test_whole_floats_are_integers(self, count: int, nested: bool) -> None:
        numbers: list[float] = [1, 2.0, -3e2] * (count // 3)
        decoded = DECODER.decode(request(x(), other("ids", "INT32", [1, count], [numbers] if nested else numbers)))
        assert decoded.inputs["ids"].data == np.array(numbers, np.int32).tobytes()

    def test_the_largest_exact_float(self) -> None:
        body = request(other("x", "INT64", [1, 2], [2.0**53 - 1, 1 - 2.0**53]))
        assert one_input("INT64", -1).decode(body).inputs["x"].data == struct.pack("<2q", 2**53 - 1, 1 - 2**53)

    @pytest.mark.parametrize("name", ["m", None])
    def test_the_models_name_may_be_repeated(self, name: str | None) -> None:
        assert DECODER.decode(request(model_name=name)).inputs["x"].shape == (1, 3, 2)

    def test_another_models_name(self) -> None:
        refused(request(model_name="n"), "model_name: expected 'm' as in the request's path", "got 'n'")
        refused(request(model_name=1), "model_name", "expected a string", "an integer")
        refused(request(model_name="m")[:-1] + b', "model_name": "m"}', "model_name", "twice")

    @pytest.mark.parametrize("data", [[], [[]], [[[], [], []]]])
    def test_zero_rows_and_zero_dimensions(self, data: Any) -> None:
        shape = [1, 3, 0] if data == [[[], [], []]] else [0, 3, 2]
        if data == [[]]:
            refused(request(x(shape=shape, data=data)), "inputs[0].data", "expected 0 elements", "got 1")
        else:
            decoded = DECODER.decode(request(x(shape=shape, data=data)))
            assert (decoded.rows, decoded.inputs["x"].data) == (shape[0], b"")

    def test_optional_fields_may_be_null(self) -> None:
        decoded = DECODER.decode(request(id=None, parameters=None, outputs=None))
        assert decoded.id == ""

    def test_parameter_defaults(self) -> None:
        decoded = DECODER.decode(request())
        assert decoded.batch_parameters == {"temperature": 1.0, "mode": "fast"}
        assert decoded.row_parameters == {"top_k": 5, "verbose": False}
        assert (decoded.priority, decoded.timeout_us) == (0, 0)

    def test_parameters(self) -> None:
        given = {"temperature": 0, "mode": "exact", "top_k": 2, "verbose": True, "priority": 1, "timeout": 1000}
        decoded = DECODER.decode(request(parameters=given))
        assert decoded.batch_parameters == {"temperature": 0.0, "mode": "exact"}
        assert isinstance(decoded.batch_parameters["temperature"], float)
        assert decoded.row_parameters == {"top_k": 2, "verbose": True}
        assert (decoded.priority, decoded.timeout_us) == (1, 1000)

    def test_whole_floats_are_integers_in_parameters_too(self) -> None:
        decoded = DECODER.decode(request(parameters={"top_k": 2.0, "priority": 1.0, "timeout": 1e3}))
        assert (decoded.row_parameters["top_k"], decoded.priority, decoded.timeout_us) == (2, 1, 1000)
        assert [type(one) for one in (decoded.row_parameters["top_k"], decoded.priority)] == [int, int]

    def test_one_request_leaves_the_defaults_of_the_next(self) -> None:
        DECODER.decode(request(parameters={"top_k": 2}))
        assert DECODER.decode(request()).row_parameters["top_k"] == 5

    @pytest.mark.parametrize("outputs", [{}, {"outputs": []}, {"outputs": None}])
    def test_all_outputs_by_default(self, outputs: dict[str, Any]) -> None:
        assert DECODER.decode(request(**outputs)).outputs == [OutputWish("y", False), OutputWish("label", False)]

    def test_an_output_overrides_the_default_form(self) -> None:
        outputs = [{"name": "label"}, {"name": "y", "parameters": {"binary_data": False}}]
        decoded = DECODER.decode(request(outputs=outputs, parameters={"binary_data_output": True}))
        assert decoded.outputs == [OutputWish("label", True), OutputWish("y", False)]

    def test_binary_data_is_not_copied(self) -> None:
        text = request(x(data=..., parameters={"binary_data_size": 24}))
        body = text + struct.pack("<6f", *range(6))
        data = DECODER.decode(body, len(text)).inputs["x"].data
        assert isinstance(data, memoryview)
        assert data.obj is body
        assert data == body[-24:]

    def test_binary_follows_the_order_of_the_binary_inputs(self) -> None:
        text = request(
            {"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 7}},
            x(),
            {"name": "brain", "datatype": "BF16", "shape": [1, 2], "parameters": {"binary_data_size": 4}},
        )
        decoded = DECODER.decode(text + b"\3\0\0\0abc" + b"wxyz", len(text))
        assert bytes(decoded.inputs["text"].data) == b"\3\0\0\0abc"
        assert bytes(decoded.inputs["brain"].data) == b"wxyz"

    def test_header_length_of_the_whole_body(self) -> None:
        body = request()
        assert DECODER.decode(body, len(body)).rows == 1

    def test_nan_in_binary_data(self) -> None:
        assert bytes(binary(x(), struct.pack("<6f", *[float("nan")] * 6)).inputs["x"].data)

    def test_text_becomes_utf8(self) -> None:
        decoded = DECODER.decode(request(x(), other("text", "BYTES", [1, 1], ["grün\0 \U0001f600"])))
        assert unpack_bytes(decoded.inputs["text"].data) == ["grün\0 \U0001f600".encode()]

    @pytest.mark.parametrize("nested", [False, True])
    def test_long_data_are_read_in_pieces(self, nested: bool) -> None:
        values = np.random.default_rng(0).standard_normal((2, 3, 20_000), dtype=np.float32)
        data = values.tolist() if nested else values.ravel().tolist()
        decoded = DECODER.decode(request(x(shape=list(values.shape), data=data)))
        assert decoded.inputs["x"].data == values.tobytes()


class TestBody:
    @pytest.mark.parametrize("body", [b"", b"  \n"])
    def test_empty(self, body: bytes) -> None:
        refused(body, "body", "expected a JSON object", "empty")

    @pytest.mark.parametrize(
        "body", [b"{", b'{"inputs": [}', b"\x00", b'{"inputs": []} x', b'{"a" 1}', b"\xef\xbb\xbf{}"]
    )
    def test_malformed(self, body: bytes) -> None:
        refused(body, "body", "expected JSON", "got malformed JSON")

    @pytest.mark.parametrize(("body", "got"), [(b"[]", "an array"), (b"3", "an integer"), (b"null", "null")])
    def test_not_an_object(self, body: bytes, got: str) -> None:
        refused(body, "body: expected an object", f"got {got}")

    @pytest.mark.parametrize(
        "opening", [b'{"inputs":[{"data":', b"[", b'{"inputs":', b'{"id":{"a":', b'{"parameters":{"a":']
    )
    def test_nested_too_deeply(self, opening: bytes) -> None:
        is_kept = b"data" in opening or b"parameters" in opening
        refused(opening + b"[" * 200_000, "nested too deeply" if is_kept else "got an ")
        refused(opening * 100_000, "expected")

    def test_deep_data(self) -> None:
        refused(
            b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,3,2],"data":' + b"[" * 500 + b"]" * 500 + b"}]}",
            "inputs[0].data",
        )

    @pytest.mark.parametrize(
        ("fields", "path", "expected", "got"),
        [
            ({"inputs": 3}, "inputs", "an array", "an integer"),
            ({"inputs": ["x"]}, "inputs[0]", "an object", "a string"),
            ({"id": 5}, "id", "a string", "an integer"),
            ({"id": "i" * 1001}, "id", "at most 1000 characters", "1001"),
            ({"parameters": []}, "parameters", "an object", "an array"),
            ({"outputs": {}}, "outputs", "an array", "an object"),
            ({"outputs": ["y"]}, "outputs[0]", "an object", "a string"),
            ({"model": "m"}, "model", "inputs, id, model_name, parameters, outputs", "'model'"),
        ],
    )
    def test_wrong_fields(self, fields: dict[str, Any], path: str, expected: str, got: str) -> None:
        refused(json.dumps({"inputs": [x()]} | fields).encode(), f"{path}: expected", expected, f"got {got}")

    def test_no_inputs_field(self) -> None:
        refused(b"{}", "inputs: expected this field", "got an object without it")

    def test_not_utf8(self) -> None:
        refused(request().replace(b'"x"', b'"\xff"'), "body", "UTF-8", "0xff")

    @pytest.mark.parametrize("length", [-1, 10_000])
    def test_header_length_outside_the_body(self, length: int) -> None:
        refused(request(), HEADER, "expected", f"got {length}", header_length=length)

    def test_header_length_too_short(self) -> None:
        refused(request(), "body", "malformed", HEADER, header_length=5)

    def test_raw_request_without_json(self) -> None:
        refused(b"1234", "body", "empty", HEADER, header_length=0)

    def test_bytes_after_json_without_header(self) -> None:
        refused(request() + b"\1\2\3", "body", "trailing", HEADER)

    def test_bytes_after_the_last_tensor(self) -> None:
        body = request()
        refused(body + b"abc", f"at byte {len(body)}", "got 3 bytes more", HEADER, header_length=len(body))


class TestInputs:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"name": ...}, ("inputs[0].name", "expected this field", "without it")),
            ({"datatype": ...}, ("inputs[0].datatype", "tensor 'x'", "expected this field")),
            ({"shape": ...}, ("inputs[0].shape", "tensor 'x'", "expected this field")),
            ({"name": 3}, ("inputs[0].name", "a string", "an integer")),
            ({"name": "z"}, ("inputs[0].name", "'x', 'ids', 'text'", "got 'z'")),
            ({"name": "z" * 500}, ("inputs[0].name", "(500 characters)")),
            ({"extra": 1}, ("inputs[0].extra", "tensor 'x'", "name, datatype, shape, data, parameters", "'extra'")),
            ({"datatype": "FP64"}, ("inputs[0].datatype", "'x'", "expected FP32", "got 'FP64'")),
            ({"datatype": "float"}, ("inputs[0].datatype", "'x'", "FP32", "'float'", "is not a datatype", "UINT8")),
            ({"datatype": None}, ("inputs[0].datatype", "a string", "null")),
            ({"shape": [3]}, ("inputs[0].shape", "'x'", "expected [rows, 3, -1]", "got [3]")),
            ({"shape": [3, 2]}, ("expected [rows, 3, -1]", "got [3, 2]", "batch axis comes first")),
            ({"shape": [1] * 50}, ("expected [rows, 3, -1]", "(50 dimensions)")),
            ({"shape": []}, ("expected [rows, 3, -1]", "got []")),
            ({"shape": [1, 4, 2]}, ("inputs[0].shape", "expected [rows, 3, -1]", "got [1, 4, 2]")),
            ({"shape": [1, 3, -1]}, ("inputs[0].shape[2]", "'x'", "0 or more", "got -1")),
            ({"shape": [-1, 3, 2]}, ("inputs[0].shape[0]", "got -1")),
            ({"shape": [1, 3, 2**31]}, ("inputs[0].shape[2]", "at most 2147483647", "got 2147483648")),
            ({"shape": [10**300, 3, 1]}, ("inputs[0].shape[0]", "an integer of 997 bits")),
            ({"shape": [1, 3, 2.0]}, ("inputs[0].shape[2]", "'x'", "an integer", "a number")),
            ({"shape": [1, 3, True]}, ("inputs[0].shape[2]", "an integer", "a boolean")),
            ({"shape": "1"}, ("inputs[0].shape", "an array", "a string")),
            (
                {"shape": [2**31 - 1, 3, 2**31 - 1]},
                ("inputs[0].data", "expected 13835058042397261827 elements", "got 6"),
            ),
            ({"shape": [1, 3, 3]}, ("inputs[0].data", "'x'", "expected 9 elements (shape [1, 3, 3])", "got 6")),
            ({"data": ...}, ("inputs[0].data", "'x'", "expected", "binary_data_size", "got neither")),
            ({"data": None}, ("inputs[0].data", "'x'", "an array of numbers", "got null")),
            ({"data": 3}, ("inputs[0].data", "an array of numbers", "got an integer")),
            ({"data": {"a": 1}}, ("inputs[0].data", "an array of numbers", "got an object")),
            ({"data": [1, 2, "3"]}, ("inputs[0].data[2]", "'x'", "a number (FP32)", "got a string")),
            ({"data": [1, True]}, ("inputs[0].data[1]", "a number (FP32)", "got a boolean")),
            ({"data": [1, None]}, ("inputs[0].data[1]", "a number (FP32)", "got null")),
            ({"data": [1, [2]]}, ("inputs[0].data[1]", "a number (FP32) in a flat array", "got an array")),
            (
                {"data": [1, 1e39, 3, 4, 5, 6]},
                ("inputs[0].data[1]", "'x'", "expected FP32", "got 1e+39", "out of range"),
            ),
            ({"data": [[[1, 2], [3], [5, 6]]]}, ("inputs[0].data[0][1]", "'x'", "expected 2 elements", "got 1")),
            ({"data": [[[1, 2], [3, 4]]]}, ("inputs[0].data[0]", "expected 3 elements", "axis 1", "got 2")),
            (
                {"data": [[1, 2], [3, 4], [5, 6]]},
                ("inputs[0].data[0][0]", "nested as shape [1, 3, 2]", "an array", "an integer"),
            ),
            ({"data": [[[1, 2], [3, "4"], [5, 6]]]}, ("inputs[0].data[0][1][1]", "a number", "a string")),
            ({"data": [[[[1]]]]}, ("inputs[0].data[0][0][0]", "a number", "got an array")),
            ({"parameters": {"binary_data_size": 24}}, ("inputs[0].data", "'x'", "either data or", "got both")),
            ({"parameters": {"size": 1}}, ("inputs[0].parameters.size", "'x'", "binary_data_size", "'size'")),
            ({"parameters": {"size": [1]}}, ("inputs[0].parameters.size", "'x'", "binary_data_size", "'size'")),
            ({"parameters": {"binary_data_size": [1]}, "data": ...}, ("binary_data_size", "an integer", "an array")),
            (
                {"parameters": {"shared_memory_region": "r"}, "data": ...},
                ("inputs[0].parameters.shared_memory_region", "not supported by this server"),
            ),
        ],
    )
    def test_wrong(self, changes: dict[str, Any], said: tuple[str, ...]) -> None:
        refused(request(x(**changes)), *said)

    def test_number_beyond_a_double(self) -> None:
        refused(request().replace(b"6]", b"1e400]"), "inputs[0].data[5]", "'x'", "FP32's range")

    @pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity"])
    def test_literals_that_json_lacks(self, literal: bytes) -> None:
        body = request(other("ids", "INT32", [1, 1], [1]), x()).replace(b"6]", literal + b"]")
        refused(body, "inputs[1].data", "'x'", "NaN or Infinity", "binary")

    @pytest.mark.parametrize("value", [None, "null", "nullable", "NaN", "-Infinity"])
    def test_literals_that_json_lacks_after_another_inputs_data(self, value: str | None) -> None:
        body = request(other("text", "BYTES", [1, 1], [value]), x()).replace(b"6]", b"-NaN, Infinity]")
        refused(body, "inputs[1].data", "'x'", "NaN or Infinity", "binary")

    def test_twice(self) -> None:
        refused(request(x(), x()), "inputs[1].name", "'x'", "at most once", "second time")

    def test_missing(self) -> None:
        refused(
            request(other("ids", "INT32", [1, 1], [1])), "inputs", "expected the required inputs 'x'", "got only 'ids'"
        )
        refused(b'{"inputs":[]}', "inputs", "'x'", "got none", "missing: 'x'")

    def test_rows_that_differ(self) -> None:
        refused(
            request(x(), other("ids", "INT32", [2, 1], [1, 2])),
            "inputs[1].shape",
            "'ids'",
            "expected 1 rows",
            "'x'",
            "got 2",
        )

    @pytest.mark.parametrize(
        ("tensor", "said"),
        [
            (other("ids", "INT32", [1, 2], [1, 2.5]), ("inputs[1].data[1]", "an integer (INT32)", "got 2.5")),
            (other("ids", "INT32", [1, 1], [1.5]), ("inputs[1].data[0]", "an integer", "1.5")),
            (other("ids", "INT32", [1, 2], [1.0, 1.5]), ("inputs[1].data[1]", "an integer", "1.5")),
            (other("ids", "INT32", [1, 2], [[1.0, 1.5]]), ("inputs[1].data[0][1]", "an integer", "1.5")),
            (other("ids", "INT32", [1, 2], [1.0, "1"]), ("inputs[1].data[1]", "an integer", "a string")),
            (other("ids", "INT32", [1, 1], [2.0**53]), ("inputs[1].data[0]", "beyond 2^53", "9007199254740992.0")),
            (
                other("ids", "INT32", [1, 1], [2**31]),
                ("inputs[1].data[0]", "'ids'", "-2147483648 to 2147483647", "2147483648"),
            ),
            (other("ids", "INT32", [1, 1], [10**50]), ("inputs[1].data[0]", "INT32", "167 bits")),
            (other("ids", "INT32", [1, 1], ["1"]), ("an integer", "a string")),
            (other("ids", "INT32", [1, 1], [True]), ("an integer", "a boolean")),
            (other("mask", "BOOL", [1, 2], [True, 1]), ("inputs[1].data[1]", "a boolean (BOOL)", "an integer")),
            (other("mask", "BOOL", [1, 1], ["true"]), ("a boolean", "a string")),
            (other("text", "BYTES", [1, 1], [5]), ("inputs[1].data[0]", "'text'", "a string (BYTES)", "an integer")),
            (other("text", "BYTES", [1, 1], [["a", "b"]]), ("inputs[1].data[0]", "expected 1 elements", "got 2")),
            (other("text", "BYTES", [1, 1], "a"), ("inputs[1].data", "an array of strings", "a string")),
            (other("half", "FP16", [1, 2], [1, 2]), ("inputs[1].data", "'half'", "FP16", 'binary_data_size": 4')),
            (other("brain", "BF16", [1, 2], [1, 2]), ("inputs[1].data", "'brain'", "BF16", 'binary_data_size": 4')),
        ],
    )
    def test_wrong_data_by_datatype(self, tensor: dict[str, Any], said: tuple[str, ...]) -> None:
        refused(request(x(), tensor), *said)

    @pytest.mark.parametrize("datatype", [name for name in JSON_DATATYPES if "INT" in name])
    def test_integer_ranges(self, datatype: str) -> None:
        decoder = one_input(datatype, -1)
        info = np.iinfo(DATATYPES[datatype].numpy)
        low, high = int(info.min), int(info.max)
        body = request(other("x", datatype, [1, 2], [low, high]))
        assert decoder.decode(body).inputs["x"].data == np.array([low, high], info.dtype).tobytes()
        for value in (low - 1, high + 1):
            body = request(other("x", datatype, [1, 2], [0, value]))
            refused(body, "inputs[0].data[1]", f"{low} to {high}", f"got {value}", decoder=decoder)

    @pytest.mark.parametrize("escape", [rb"\ud800", rb"\udc00", rb"\ud800x", rb"\ud800A"])
    def test_lone_surrogates(self, escape: bytes) -> None:
        body = request(x(), other("text", "BYTES", [1, 1], ["S"])).replace(b'"S"', b'"%b"' % escape)
        refused(body, "body", "Unicode", "lone surrogate")

    def test_text_that_is_not_utf8(self) -> None:
        body = request(x(), other("text", "BYTES", [1, 1], ["S"])).replace(b'"S"', b'"\xff"')
        refused(body, "inputs[1].data", "'text'", "UTF-8", "0xff", "binary")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda data: data[0].__setitem__(20_000, "a"), ("inputs[0].data[20000]", "a number", "a string")),
            (lambda data: data[0].__setitem__(20_000, 1e39), ("inputs[0].data[20000]", "1e+39")),
            (lambda data: data[0].__setitem__(20_000, [1]), ("inputs[0].data[20000]", "an array")),
            (
                lambda data: data[0].__setitem__(20_000, [1] * 90_000),
                ("inputs[0].data[20000]", "flat array", "an array"),
            ),
            (lambda data: data[0].__setitem__(20_000, "," * 90_000), ("inputs[0].data[", "flat array of numbers")),
            (lambda data: data[0].pop(), ("expected 60000 elements", "got 59999")),
            (lambda data: data.__setitem__(0, "s" * 70_000), ("inputs[0].data", "an array of numbers")),
            (
                lambda data: data.__setitem__(0, [[1.5] * 30_000] * 2),
                ("inputs[0].data", "flat or nested as shape [1, 3, 20000]"),
            ),
        ],
    )
    def test_wrong_long_data(self, change: Any, said: tuple[str, ...]) -> None:
        data: list[Any] = [[1.5] * 60_000]
        change(data)
        refused(request(x(shape=[1, 3, 20_000], data=data[0])), *said)


class TestBinary:
    TEXT = other("text", "BYTES", [1, 1], None)
    MASK = other("mask", "BOOL", [1, 3], None)

    @pytest.mark.parametrize("size", [-1, 24.5, "24", True, None, 2**70])
    def test_size_of_the_wrong_kind(self, size: Any) -> None:
        text = request(x(data=..., parameters={"binary_data_size": size}))
        refused(
            text, "inputs[0].parameters.binary_data_size", "'x'", "expected an integer", "got", header_length=len(text)
        )

    def test_size_that_contradicts_the_shape(self) -> None:
        binary_refused(
            x(),
            bytes(20),
            "inputs[0].parameters.binary_data_size",
            "'x'",
            "expected 24 bytes for FP32 of shape [1, 3, 2]",
            "got 20",
        )

    def test_size_past_the_end(self) -> None:
        binary_refused(
            x(), bytes(20), "inputs[0].parameters.binary_data_size", "expected 24 bytes", "got 20", HEADER, size=24
        )
        binary_refused(self.TEXT, b"\1\0\0\0a", "'text'", "expected 1000 bytes", "got 5", size=1000)

    def test_without_the_header(self) -> None:
        refused(
            request(x(data=..., parameters={"binary_data_size": 24})),
            "expected 24 bytes after the JSON",
            "got 0",
            HEADER,
        )

    def test_huge_shape(self) -> None:
        binary_refused(x(shape=[2**31 - 1, 3, 2**31 - 1]), bytes(24), "expected 55340232169589047308 bytes", "got 24")

    @pytest.mark.parametrize(
        ("raw", "said"),
        [
            (b"\5\0\0\0abc", "expected 5 bytes in element 0 of the binary data, as its length says, got 3"),
            (b"\xff\xff\xff\xffabc", "expected 4294967295 bytes in element 0"),
            (b"\1\0", "expected a 4-byte length before element 0 of the binary data, got 2 bytes"),
            (b"\1\0\0\0a\0\0\0\0", "expected 1 elements (shape [1, 1]) in the binary data, got more: 4 bytes are left"),
            (b"", "expected 1 elements (shape [1, 1]) in the binary data, got 0"),
        ],
    )
    def test_lying_lengths(self, raw: bytes, said: str) -> None:
        binary_refused(self.TEXT, raw, "inputs[1] (tensor 'text')", said)

    def test_bool_bytes(self) -> None:
        assert bytes(binary(self.MASK, b"\0\1\1").inputs["mask"].data) == b"\0\1\1"
        binary_refused(
            self.MASK, b"\0\1\2", "inputs[1] (tensor 'mask')", "expected bytes of 0 or 1", "got 2 as element 2"
        )


class TestOutputs:
    @pytest.mark.parametrize(
        ("outputs", "said"),
        [
            ([{"name": "z"}], ("outputs[0].name", "'y', 'label'", "got 'z'")),
            ([{"name": "y"}, {"name": "y"}], ("outputs[1].name", "'y'", "at most once")),
            ([{}], ("outputs[0].name", "expected this field")),
            ([{"name": "y", "shape": [1]}], ("outputs[0].shape", "'y'", "name, parameters", "'shape'")),
            (
                [{"name": "y", "parameters": {"binary_data": 1}}],
                ("outputs[0].parameters.binary_data", "true or false", "got 1"),
            ),
            ([{"name": "y", "parameters": {"binary_data": None}}], ("outputs[0].parameters.binary_data", "got null")),
            (
                [{"name": "y", "parameters": {"binary": True}}],
                ("outputs[0].parameters.binary", "binary_data", "'binary'"),
            ),
            (
                [{"name": "y", "parameters": {"classification": 2}}],
                ("outputs[0].parameters.classification", "not supported"),
            ),
            ([{"name": "y", "parameters": {"shared_memory_offset": 2}}], ("shared_memory_offset", "not supported")),
        ],
    )
    def test_wrong(self, outputs: list[Any], said: tuple[str, ...]) -> None:
        refused(request(outputs=outputs), *said)

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_datatypes_without_a_json_form(self, datatype: str) -> None:
        outputs = (TensorSpec("y", "FP32", (1,)), TensorSpec("h", datatype, (1,)))
        decoder = RequestDecoder(Signature(name="m", inputs=(TensorSpec("x", "FP32", (3, -1)),), outputs=outputs))
        fix = '"parameters": {"binary_data": true}'
        refused(request(), "outputs", "'h'", f"got {datatype}", fix, decoder=decoder)
        refused(request(outputs=[{"name": "h"}]), "outputs[0]", "'h'", f"got {datatype}", fix, decoder=decoder)
        assert decoder.decode(request(outputs=[{"name": "y"}])).outputs == [OutputWish("y", False)]
        assert decoder.decode(request(parameters={"binary_data_output": True})).outputs[1] == OutputWish("h", True)


class TestParameters:
    @pytest.mark.parametrize(
        ("parameters", "said"),
        [
            ({"temperature": "hot"}, ("parameters.temperature", "expected float", "got 'hot'")),
            ({"temperature": 3}, ("parameters.temperature", "at most 2.0", "got 3")),
            ({"temperature": 10**400}, ("parameters.temperature", "expected float", "1329 bits")),
            ({"temperature": None}, ("parameters.temperature", "expected float", "got null")),
            ({"top_k": 1.5}, ("parameters.top_k", "expected int", "got 1.5")),
            ({"top_k": True}, ("parameters.top_k", "expected int", "got true")),
            ({"top_k": 2**63}, ("parameters.top_k", "64 bits", "got 9223372036854775808")),
            ({"mode": "slow"}, ("parameters.mode", "'fast', 'exact'", "got 'slow'")),
            ({"mode": "s" * 5000}, ("parameters.mode", "'fast', 'exact'", "(5000 characters)")),
            ({"mode": ["fast"]}, ("parameters.mode", "expected", "got an array")),
            ({"verbose": 0}, ("parameters.verbose", "expected bool", "got 0")),
            ({"binary_data_output": 1}, ("parameters.binary_data_output", "true or false", "got 1")),
            ({"priority": -1}, ("parameters.priority", "0 to 4294967295", "got -1")),
            ({"priority": 2**32}, ("parameters.priority", "0 to 4294967295", "got 4294967296")),
            ({"priority": "1"}, ("parameters.priority", "an integer", "got '1'")),
            ({"timeout": 1.5}, ("parameters.timeout", "an integer", "got 1.5")),
            ({"timeout": -1}, ("parameters.timeout", "0 to", "got -1")),
            ({"sequence_id": 5}, ("parameters.sequence_id", "not supported by this server", "'sequence_id'")),
            (
                {"beam": 5},
                ("parameters.beam", "temperature, top_k, mode, verbose, binary_data_output, priority", "'beam'"),
            ),
        ],
    )
    def test_wrong(self, parameters: dict[str, Any], said: tuple[str, ...]) -> None:
        refused(request(parameters=parameters), *said)


class TestHeads:
    @staticmethod
    def chosen(*outputs: str, heads: Any = ..., binary: bool = False) -> tuple[tuple[str, ...], list[str]]:
        """The heads and outputs that a request gets which asks for these."""
        parameters = {"heads": heads} if heads is not ... else {}
        if binary:
            parameters["binary_data_output"] = True
        decoded = PIPELINE.decode(request(outputs=[{"name": name} for name in outputs], parameters=parameters))
        return decoded.heads, [wish.name for wish in decoded.outputs]

    def test_all_by_default(self) -> None:
        everything = (("digits", "even", "dark"), ["digit", "parity", "scores", "ink"])
        assert self.chosen(binary=True) == everything
        assert self.chosen(heads=["dark", "even", "digits"], binary=True) == everything

    @pytest.mark.parametrize("heads", ["even,digits", " even , digits ", ["even", "digits"]])
    def test_by_name(self, heads: Any) -> None:
        assert self.chosen(heads=heads) == (("digits", "even"), ["digit", "parity", "scores"])

    def test_by_outputs(self) -> None:
        assert self.chosen("parity", "digit") == (("digits", "even"), ["parity", "digit"])

    def test_by_both(self) -> None:
        assert self.chosen("scores", heads="digits") == (("digits",), ["scores"])

    def test_a_head_of_which_no_output_is_wanted_is_not_run(self) -> None:
        assert self.chosen("scores", heads="even,digits") == (("digits",), ["scores"])

    def test_an_output_of_another_head(self) -> None:
        body = request(outputs=[{"name": "digit"}, {"name": "parity"}], parameters={"heads": "digits"})
        refused(body, "outputs[1].name", "'parity'", "heads 'digits'", "head 'even'", decoder=PIPELINE)

    def test_only_wanted_outputs_need_a_json_form(self) -> None:
        refused(request(), "outputs", "'ink'", "FP16", decoder=PIPELINE)
        refused(request(parameters={"heads": "dark"}), "outputs", "'ink'", "FP16", decoder=PIPELINE)
        assert self.chosen(heads="dark", binary=True) == (("dark",), ["ink"])

    @pytest.mark.parametrize(
        ("heads", "said"),
        [
            ("digits,odd", ("parameters.heads", "'digits', 'even', 'dark'", "got 'odd'")),
            (["digits", "odd"], ("parameters.heads[1]", "'digits', 'even', 'dark'", "got 'odd'")),
            ("digits,", ("parameters.heads", "'digits', 'even', 'dark'", "got ''")),
            ("even,even", ("parameters.heads", "at most once", "'even' a second time")),
            (["even", "even"], ("parameters.heads[1]", "at most once", "'even' a second time")),
            ("", ("parameters.heads", "at least one of 'digits', 'even', 'dark'", "got no head")),
            ([], ("parameters.heads", "at least one of 'digits', 'even', 'dark'", "got no head")),
            ([1], ("parameters.heads[0]", "'digits', 'even', 'dark'", "got 1")),
            ([["even"]], ("parameters.heads[0]", "got an array")),
            (1, ("parameters.heads", "names of heads", "got 1")),
            (None, ("parameters.heads", "names of heads", "got null")),
            ({"even": True}, ("parameters.heads: expected", "got an object")),
        ],
    )
    def test_wrong(self, heads: Any, said: tuple[str, ...]) -> None:
        refused(request(parameters={"heads": heads}), *said, decoder=PIPELINE)

    @pytest.mark.parametrize("name", ["mode", "timeout", "priority", "binary_data_output", "beam"])
    def test_other_parameters_take_no_list(self, name: str) -> None:
        body = request(parameters={"heads": ["even"], name: ["fast"]})
        refused(body, f"parameters.{name}: expected", decoder=PIPELINE)
        refused(request(parameters={"heads": ["even"], name: {}}), f"parameters.{name}: expected", decoder=PIPELINE)

    def test_a_model_without_heads_has_no_such_parameter(self) -> None:
        refused(request(parameters={"heads": "even"}), "parameters.heads", "temperature", "got 'heads'")
        refused(request(parameters={"heads": ["even"]}), "parameters.heads", "temperature", "got 'heads'")
        assert DECODER.decode(request()).heads == ()


def test_huge_shapes_allocate_nothing() -> None:
    decoder = one_input("FP32", -1, -1)
    shapes = ([2**31 - 1] * 3, [2**31 - 1, 2**31 - 1, 0], [0, 2**31 - 1, 2**31 - 1], [2**31 - 1, 1, 1])
    few: list[Any] = [[], [1.0], [[[1.0]]], [[[]]]]
    bodies = [request(other("x", "FP32", shape, data)) for shape in shapes for data in few]
    bodies += [request(other("x", "FP32", shape, [[[1.0] * 20_000]])) for shape in shapes]
    for body in bodies:
        tracemalloc.start()
        try:
            decoder.decode(body)
        except BadRequest:
            pass
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 100_000 + 12 * len(body)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([40_000, 1, 1], [[[]]] * 40_000),
        ([40_000, 1, 1], [[[1.5]]] * 39_999 + [[[]]]),
        ([40_000, 1, 0], [[[1.5]]] * 40_000),
        ([40_000, 1, 1], [[[1.5]]] * 39_999 + [[["a"]]]),
        ([20_000, 1, 2], [[[1.5, 2]]] * 19_998 + [[[1.5]], [[1.5, 2, 3]]]),
        ([0, 1, 1], [[[]]] * 40_000),
    ],
)
def test_long_data_nested_in_another_way(shape: list[int], data: Any) -> None:
    refused(
        request(other("x", "FP32", shape, data)), "inputs[0].data", "expected", "got", decoder=one_input("FP32", -1, -1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [b"[" + b"1," * 999_999 + b"1]", b"[[[" + b"1," * 999_999 + b"1]]]", b"[" + b"[[]]," * 399_999 + b"[[]]]"]
)
def test_memory_is_a_small_multiple_of_the_body(data: bytes) -> None:
    decoder = one_input("FP32", -1, -1)
    shape = b"[400000,1,0]" if b"[]" in data else b"[1,1,1000000]"
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":%b}]}' % (shape, data)
    tracemalloc.start()
    try:
        decoder.decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(body)


# Round trips, against an encoder that knows nothing of ours.

SHAPES = npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw: st.DrawFn, datatype: str, rows: int, finite: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """An array as the protocol's datatype holds it (BF16 as bits, BYTES as objects), batch axis first."""
    shape = (rows, *draw(SHAPES))
    if datatype == "BYTES":
        text = st.text(st.characters(codec="utf-8"), max_size=6).map(str.encode)
        elements: Any = text if finite else st.binary(max_size=6)
    elif DATATYPES[datatype].numpy.kind == "f":
        width: Any = 8 * DATATYPES[datatype].size_bytes
        elements = st.floats(width=width, allow_nan=not finite, allow_infinity=not finite)
    else:
        elements = npst.from_dtype(DATATYPES[datatype].numpy)
    return draw(npst.arrays(DATATYPES[datatype].numpy, shape, elements=elements, fill=st.nothing()))


def expected_bytes(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(element)) + element for element in array.ravel().tolist())
    return array.tobytes()


def as_json(array: np.ndarray[Any, np.dtype[Any]], nested: bool) -> Any:
    if array.dtype == object:
        array = np.frompyfunc(lambda element: element.decode(), 1, 1)(array) if array.size else array
    # The shortest decimal of a float32, not that of the double it widens to.
    if array.dtype == np.float32:
        array = np.array([float(str(value)) for value in array.ravel()], np.float64).reshape(array.shape)
    return array.tolist() if nested else array.ravel().tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 3))
    inputs: list[dict[str, Any]] = []
    specs: list[TensorSpec] = []
    tail = b""
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for index in range(data.draw(st.integers(1, 3))):
        name = f"t{index}"
        datatype = data.draw(st.sampled_from(list(DATATYPES)))
        form = data.draw(st.sampled_from(["flat", "nested", "binary"])) if DATATYPES[datatype].json else "binary"
        array = arrays[name] = data.draw(tensors(datatype, rows, form != "binary"))
        tensor: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": datatype}
        if form == "binary":
            tail += expected_bytes(array)
            tensor["parameters"] = {"binary_data_size": len(expected_bytes(array))}
        else:
            tensor["data"] = as_json(array, form == "nested")
        inputs.append(tensor)
        specs.append(
            TensorSpec(
                name, datatype, tuple(data.draw(st.sampled_from([-1, max(d, -1) or -1])) for d in array.shape[1:])
            )
        )
    decoder = RequestDecoder(Signature(name="m", inputs=tuple(specs), outputs=(TensorSpec("y", "FP32", (1,)),)))
    text = json.dumps(
        {"inputs": inputs}, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    ).encode()
    decoded = decoder.decode(text + tail, len(text) if tail or data.draw(st.booleans()) else None)
    assert decoded.rows == rows
    assert list(decoded.inputs) == list(arrays)
    for name, array in arrays.items():
        assert decoded.inputs[name].shape == array.shape
        got = bytes(decoded.inputs[name].data)
        if array.dtype.kind == "f":  # JSON's -0 is an integer, and integers have one zero
            assert np.array_equal(np.frombuffer(got, array.dtype), array.ravel(), equal_nan=True)
        else:
            assert got == expected_bytes(array)


# Whatever comes, the answer is a request or a BadRequest.

VALID: list[tuple[bytes, int | None]] = [
    (
        request(
            x(data=[[[1, 2.5], [3e3, -4], [5, 6]]]),
            other("ids", "INT32", [1, 2], [1, -2]),
            id="a",
            parameters={"top_k": 3},
        ),
        None,
    ),
    (request(x(), other("text", "BYTES", [1, 1], ["gr\u00fcn"]), other("mask", "BOOL", [1, 2], [True, False])), None),
    (
        request(outputs=[{"name": "y", "parameters": {"binary_data": True}}], parameters={"priority": 3, "timeout": 5}),
        None,
    ),
]
_text = request(
    x(data=..., parameters={"binary_data_size": 24}),
    {"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 7}},
    {"name": "mask", "datatype": "BOOL", "shape": [1, 3], "parameters": {"binary_data_size": 3}},
)
VALID.append((_text + struct.pack("<6f", *range(6)) + pack_bytes([b"abc"]) + b"\0\1\1", len(_text)))

FRAGMENTS = st.sampled_from(
    [
        b"null",
        b"NaN",
        b"-Infinity",
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b'"',
        b"\\ud800",
        b"\\",
        b"1e999",
        b"-",
        b"9" * 4400,
        b"\xff",
        b"\0",
        b"true",
        b"[" * 3000,
        b'"data":',
        b"1.5",
    ]
) | st.binary(min_size=1, max_size=8)


def survives(body: bytes, header_length: int | None) -> None:
    said = ""
    try:
        decoded = DECODER.decode(body, header_length)
    except BadRequest as error:
        said = error.message
    else:
        for tensor in decoded.inputs.values():
            size = DATATYPES[tensor.datatype].size_bytes
            if size:
                assert len(tensor.data) == size * int(np.prod(tensor.shape, dtype=object))
    said.encode()  # no surrogates: it goes out as JSON
    assert len(said) < 2000


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.none() | st.integers(-2, 210))
def test_arbitrary_bytes(body: bytes, header_length: int | None) -> None:
    survives(body, header_length)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(st.data())
def test_mutated_requests(data: st.DataObject) -> None:
    body, header_length = data.draw(st.sampled_from(VALID))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body)))
        kind = data.draw(st.sampled_from(["flip", "truncate", "insert", "replace", "delete"]))
        if kind == "flip" and place < len(body):
            body = body[:place] + bytes([body[place] ^ (1 << data.draw(st.integers(0, 7)))]) + body[place + 1 :]
        elif kind == "truncate":
            body = body[:place]
        elif kind == "insert":
            body = body[:place] + data.draw(FRAGMENTS) + body[place:]
        else:
            until = data.draw(st.integers(place, min(len(body), place + 12)))
            body = body[:place] + (data.draw(FRAGMENTS) if kind == "replace" else b"") + body[until:]
    if header_length is not None and data.draw(st.booleans()):
        header_length += data.draw(st.integers(-3, 3))
    survives(body, header_length)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["x", "ids", "FP32", "INT32", "binary_data_size"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(st.data())
def test_mutated_values(data: st.DataObject) -> None:
    document: Any = copy.deepcopy(json.loads(VALID[data.draw(st.integers(0, 2))][0]))
    node, value = document, document
    path: list[Any] = []
    while isinstance(value, (dict, list)) and value and (not path or data.draw(st.integers(0, 3))):
        node = value
        path.append(data.draw(st.sampled_from(list(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1)))
        value = node[path[-1]]
    node[path[-1]] = data.draw(JSON_VALUES)
    survives(json.dumps(document).encode(), None)


# The real client.

SAMPLES: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
    "BYTES": np.array([[b"abc", "grün".encode()], [b"", b"x"]], object),
    "BF16": np.array([[1.5, -2.0], [float("inf"), 0.0]], ml_dtypes.bfloat16),
    "BOOL": np.array([[True, False], [False, True]]),
} | {
    name: np.array([[1, 0], [2, 100]], DATATYPES[name].numpy)
    for name in DATATYPES
    if name not in ("BYTES", "BF16", "BOOL")
}


@pytest.mark.parametrize("binary_data", [True, False])
@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_tritonclient_requests(datatype: str, binary_data: bool) -> None:
    if datatype == "BF16" and not binary_data:
        pytest.skip("the client itself refuses BF16 in JSON")
    array = SAMPLES[datatype]
    tensor = tritonclient.http.InferInput("x", list(array.shape), datatype).set_data_from_numpy(
        array, binary_data=binary_data
    )
    output = tritonclient.http.InferRequestedOutput("y", binary_data=False)
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(
        [tensor], outputs=[output], request_id="9", priority=2, timeout=100
    )
    decoder = one_input(datatype, -1)
    if datatype == "FP16" and not binary_data:
        refused(body, "inputs[0].data", "'x'", "FP16", "binary", decoder=decoder)
        return
    decoded = decoder.decode(body, length)
    assert (length is not None) == binary_data
    assert bytes(decoded.inputs["x"].data) == expected_bytes(array)
    assert decoded.outputs == [OutputWish("y", False)]
    assert (decoded.id, decoded.priority, decoded.timeout_us) == ("9", 2, 100)


def test_tritonclient_default_is_binary_outputs() -> None:
    tensor = tritonclient.http.InferInput("x", [2, 2], "FP32").set_data_from_numpy(SAMPLES["FP32"])
    body, length = tritonclient.http.InferenceServerClient.generate_request_body([tensor])
    assert one_input("FP32", 2).decode(body, length).outputs == [OutputWish("y", True)]


def test_the_elements_of_a_bytes_tensor_are_bounded() -> None:
    signature = Signature(
        name="m", inputs=(TensorSpec("t", "BYTES", (-1,)),), outputs=(TensorSpec("y", "FP32", (1,)),), max_batch_size=4
    )
    head = b'{"inputs":[{"name":"t","datatype":"BYTES","shape":[1,1000001],"parameters":{"binary_data_size":4000004}}]}'
    with pytest.raises(BadRequest, match=r"inputs\[0\]\.shape .*at most 1000000 BYTES elements in a request"):
        RequestDecoder(signature).decode(head + bytes(4_000_004), len(head))


ANY = Signature(
    name="any",
    inputs=(TensorSpec("x", "FP32", (-1,)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    parameters=(Parameter("known", "int", 1), Parameter(REQUEST, "str", "", per="row")),
)


def _decoded(signature: Signature, *, parameters: dict[str, Any] | None = None, **tensor: Any) -> InferRequest:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1], **tensor}
    body = {"inputs": [x], **({} if parameters is None else {"parameters": parameters})}
    return RequestDecoder(signature).decode(json.dumps(body).encode())


def test_a_model_may_take_any_parameter() -> None:
    given = {"text": "a", "number": 1.5, "whole": 2, "flag": True}
    request = _decoded(ANY, parameters={**given, "known": 3, "priority": 2})
    assert json.loads(str(request.row_parameters[REQUEST])) == given
    assert request.batch_parameters == {"known": 3}
    assert request.priority == 2
    assert _decoded(ANY).row_parameters == {REQUEST: ""}


@pytest.mark.parametrize(
    ("name", "value"),
    [("list", [1]), ("null", None), ("large", 2**64), (REQUEST, "1 {}"), ("sequence_id", 1), ("known", "one")],
)
def test_any_parameter_is_a_scalar_that_the_protocol_leaves_free(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"parameters.{name}: ") as raised:
        _decoded(ANY, parameters={name: value})
    assert REQUEST not in raised.value.message.removeprefix(f"parameters.{REQUEST}").partition(", got ")[0]


BARE = Signature(
    name="bare",
    inputs=(TensorSpec("x", "FP32", (-1, 2)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    bare_rows=True,
)


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_one_row_may_come_without_the_batch_axis(data: list[Any]) -> None:
    bare = _decoded(BARE, shape=[2, 2], data=data)
    whole = _decoded(BARE, shape=[1, 2, 2], data=[1, 2, 3, 4])
    assert bare.is_bare
    assert not whole.is_bare
    assert (bare.rows, bare.inputs) == (whole.rows, whole.inputs)


def test_a_scalar_may_come_without_any_axis() -> None:
    scalar = msgspec.structs.replace(BARE, inputs=(TensorSpec("x", "FP32", (1,)),))
    bare = _decoded(scalar, shape=[], data=[7])
    assert bare.is_bare
    assert (bare.rows, bare.inputs) == (1, _decoded(scalar, shape=[1, 1], data=[7]).inputs)


def test_without_being_declared_the_batch_axis_is_needed() -> None:
    with pytest.raises(BadRequest, match=r"expected \[rows, -1, 2\], got \[2, 2\]"):
        _decoded(msgspec.structs.replace(BARE, bare_rows=False), shape=[2, 2], data=[1, 2, 3, 4])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("number", ["1e-320", "1e-400", "-1e-400", "0.001e-400", "12.5E-500"])
def test_a_number_too_small_for_a_float_is_no_integer(number: str, nested: bool) -> None:
    decoder = RequestDecoder(
        Signature("m", (TensorSpec("ids", "INT32", (-1,)),), (TensorSpec("y", "FP32", (1,)),), max_batch_size=8)
    )

    def body(last: str) -> bytes:
        data = f"[[0.0, {last}], [0e5, -0.0]]" if nested else f"[0.0, {last}, 0e5, -0.0]"
        return b'{"inputs": [{"name": "ids", "datatype": "INT32", "shape": [2, 2], "data": %b}]}' % data.encode()

    decoder.decode(body("0"))
    decoder.decode(body("2.0"))
    with pytest.raises(BadRequest, match=r"inputs\[0\]\.data.*expected an integer \(INT32\), got"):
        decoder.decode(body(number))
