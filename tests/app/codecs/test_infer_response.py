"""What an answer looks like on the wire."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.datatypes import DATATYPES, bf16_to_float32, pack_bytes
from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater_server.codecs.infer_response import ResponseEncoder
from headwater_server.codecs.tensors import HeadAnswer, InferRequest, OutputWish, RawTensor
from headwater_server.errors import BadRequest, CallableFailed, DeadlineExceeded, Unavailable

OUTPUTS = {name.lower(): name for name in DATATYPES}
SIGNATURE = Signature(
    name="m",
    inputs=(TensorSpec("x", "FP32", (1,)),),
    outputs=tuple(TensorSpec(name, datatype, (-1,)) for name, datatype in OUTPUTS.items()),
)
ENCODER = ResponseEncoder(SIGNATURE)


def asked(*wishes: OutputWish, id: str = "") -> InferRequest:
    return InferRequest(id, {}, 1, list(wishes), {}, {})


def fp32(*values: float) -> RawTensor:
    return RawTensor("FP32", (1, len(values)), np.array(values, "<f4").tobytes())


def text(request: InferRequest, **outputs: RawTensor) -> bytes:
    """The body of an answer that is JSON only."""
    chunks, length = ENCODER.encode(request, outputs)
    assert length is None
    return b"".join(chunks)


def in_json(name: str) -> InferRequest:
    return asked(OutputWish(name, False))


def raw(array: np.ndarray[Any, np.dtype[Any]], datatype: str) -> RawTensor:
    data = pack_bytes(array.ravel().tolist()) if datatype == "BYTES" else array.tobytes()
    return RawTensor(datatype, array.shape, data)


def test_layout() -> None:
    body = text(
        asked(OutputWish("fp32", False), OutputWish("int8", False), id='7"'),
        fp32=fp32(1, 2.5),
        int8=raw(np.array([[-1]], "i1"), "INT8"),
    )
    assert body == (
        b'{"id":"7\\"","model_name":"m","model_version":"1","outputs":['
        b'{"name":"fp32","datatype":"FP32","shape":[1,2],"data":[1.0,2.5]},'
        b'{"name":"int8","datatype":"INT8","shape":[1,1],"data":[-1]}]}'
    )


def test_no_id_no_outputs() -> None:
    assert text(asked()) == b'{"model_name":"m","model_version":"1","outputs":[]}'


def test_omitted_heads() -> None:
    encoder = ResponseEncoder(
        Signature(
            name="m",
            inputs=(TensorSpec("x", "FP32", (1,)),),
            outputs=tuple(TensorSpec(name, "FP32", (-1,)) for name in "abc"),
            heads=(HeadSpec("one", ("a",)), HeadSpec("two", ("b",), on_error="omit"), HeadSpec("three", ("c",))),
        )
    )
    omitted = [HeadAnswer("two", error=DeadlineExceeded("late")), HeadAnswer("three", error=Unavailable("gone"))]
    wishes = asked(*(OutputWish(name, False) for name in "abc"))
    chunks, _ = encoder.encode(wishes, {"a": fp32(1)}, omitted=omitted)
    answer = json.loads(b"".join(chunks))
    assert [output["name"] for output in answer["outputs"]] == ["a"]
    assert answer["parameters"] == {
        "omitted_heads": "two,three",
        "head.two.status": "timeout",
        "head.two.reason": "late",
        "head.three.status": "unavailable",
        "head.three.reason": "gone",
    }
    with pytest.raises(CallableFailed, match="'a'"):  # only an omitted head's outputs may be missing
        encoder.encode(wishes, {}, omitted=omitted)


def test_binary_layout() -> None:
    data = memoryview(struct.pack("<2f", 1, 2))
    wishes = asked(OutputWish("bytes", True), OutputWish("int8", False), OutputWish("fp32", True))
    outputs = {
        "fp32": RawTensor("FP32", (1, 2), data),
        "bytes": RawTensor("BYTES", (1, 1), b"\2\0\0\0\xff\xfe"),
        "int8": raw(np.array([[3]], "i1"), "INT8"),
    }
    chunks, length = ENCODER.encode(wishes, outputs)
    head = (
        b'{"model_name":"m","model_version":"1","outputs":['
        b'{"name":"bytes","datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":6}},'
        b'{"name":"int8","datatype":"INT8","shape":[1,1],"data":[3]},'
        b'{"name":"fp32","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}]}'
    )
    assert chunks == [head, b"\2\0\0\0\xff\xfe", data]
    assert chunks[2] is data
    assert length == len(head)


def test_only_wanted_outputs_in_the_order_asked() -> None:
    outputs = {"fp32": fp32(1), "int8": raw(np.array([[3]], "i1"), "INT8"), "bool": raw(np.array([[True]]), "BOOL")}
    body = json.loads(text(asked(OutputWish("bool", False), OutputWish("fp32", False)), **outputs))
    assert [output["name"] for output in body["outputs"]] == ["bool", "fp32"]
    assert body["outputs"][0]["data"] == [True]


def test_shortest_floats() -> None:
    assert b'"data":[0.1,16777216.0,1e-45,3.4028235e38,-0.0]' in text(
        in_json("fp32"), fp32=fp32(0.1, 16777216, 1e-45, 3.4028235e38, -0.0)
    ).replace(b"e+", b"e")


def test_values_that_json_lacks_are_written_as_triton_does() -> None:
    body = text(in_json("fp32"), fp32=fp32(float("nan"), 1, float("inf"), -float("inf"), 2.5))
    assert b'"data":[NaN,1.0,Infinity,-Infinity,2.5]' in body


def test_text() -> None:
    body = text(in_json("bytes"), bytes=RawTensor("BYTES", (1, 2), pack_bytes(['grün"\n'.encode(), b""])))
    assert json.loads(body)["outputs"][0]["data"] == ['grün"\n', ""]


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(BadRequest) as caught:
        text(in_json("bytes"), bytes=RawTensor("BYTES", (1, 1), pack_bytes([b"a\xff"])))
    for said in ("outputs (tensor 'bytes')", "expected UTF-8", "got byte 0xff", '"binary_data": true'):
        assert said in caught.value.message


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_datatypes_without_a_json_form(datatype: str) -> None:
    with pytest.raises(BadRequest) as caught:
        text(in_json(datatype.lower()), **{datatype.lower(): RawTensor(datatype, (1, 1), b"ab")})
    for said in (f"'{datatype.lower()}'", f"got {datatype}", '"binary_data": true'):
        assert said in caught.value.message


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, "output 'fp32': expected FP32, got no such output"),
        (RawTensor("FP64", (1, 1), bytes(8)), "output 'fp32', datatype: expected FP32, got FP64"),
        (RawTensor("FP32", (1, 2), bytes(4)), "output 'fp32': expected 8 bytes for FP32 of shape [1, 2], got 4"),
    ],
)
def test_outputs_that_break_their_declaration(tensor: RawTensor | None, said: str, binary: bool) -> None:
    with pytest.raises(CallableFailed) as caught:
        ENCODER.encode(asked(OutputWish("fp32", binary)), {} if tensor is None else {"fp32": tensor})
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"\5\0\0\0a", "element 0: its length says 5 bytes"), (b"", "expected 1 elements for shape [1, 1], got 0")],
)
def test_bytes_whose_lengths_lie(data: bytes, said: str) -> None:
    with pytest.raises(CallableFailed) as caught:
        text(in_json("bytes"), bytes=RawTensor("BYTES", (1, 1), data))
    assert said in caught.value.message


# Round trips, against a decoder that knows nothing of ours.


def decoded(chunks: list[bytes | memoryview], length: int | None) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    body = b"".join(chunks)
    document = json.loads(body[:length])
    offset = len(body) if length is None else length
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for output in document["outputs"]:
        dtype = DATATYPES[output["datatype"]].numpy
        if "data" in output:
            values = [v.encode() for v in output["data"]] if dtype.hasobject else output["data"]
            array = np.array(values, dtype)
        else:
            data = body[offset : offset + output["parameters"]["binary_data_size"]]
            offset += len(data)
            if dtype.hasobject:
                elements = []
                while data:
                    end = 4 + int.from_bytes(data[:4], "little")
                    elements.append(data[4:end])
                    data = data[end:]
                array = np.array(elements, dtype)
            else:
                array = np.frombuffer(data, dtype)
        arrays[output["name"]] = array.reshape(output["shape"])
    assert offset == len(body)
    return arrays


@st.composite
def tensors(draw: st.DrawFn, datatype: str, as_text: bool) -> np.ndarray[Any, np.dtype[Any]]:
    dtype = DATATYPES[datatype].numpy
    elements: Any = npst.from_dtype(dtype) if datatype != "BYTES" else st.binary(max_size=6)
    if datatype == "BYTES" and as_text:
        elements = st.text(st.characters(codec="utf-8"), max_size=6).map(str.encode)
    shape = draw(npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    return draw(npst.arrays(dtype, shape, elements=elements, fill=st.nothing()))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    wishes: list[OutputWish] = []
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for name in data.draw(st.lists(st.sampled_from(list(OUTPUTS)), unique=True, max_size=4)):
        binary = not DATATYPES[OUTPUTS[name]].json or data.draw(st.booleans())
        arrays[name] = data.draw(tensors(OUTPUTS[name], not binary))
        wishes.append(OutputWish(name, binary))
    chunks, length = ENCODER.encode(asked(*wishes), {name: raw(array, OUTPUTS[name]) for name, array in arrays.items()})
    assert (length is not None) == any(wish.binary for wish in wishes)
    got = decoded(chunks, length)
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        if array.dtype.kind == "f":  # JSON has one NaN; every other value comes back bit for bit
            assert np.array_equal(got[name], array, equal_nan=True)
            assert np.array_equal(np.signbit(got[name][~np.isnan(array)]), np.signbit(array[~np.isnan(array)]))
        else:
            assert np.array_equal(got[name], array)
            assert got[name].shape == array.shape


# The real client.


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_tritonclient_reads_the_answer(datatype: str, binary: bool) -> None:
    if not binary and not DATATYPES[datatype].json:
        pytest.skip("no JSON form")
    name = datatype.lower()
    dtype = DATATYPES[datatype].numpy
    array = (
        np.array([[b"abc", b""], ["grün".encode(), b"x"]], object)
        if datatype == "BYTES"
        else np.array([[0, 1], [100, 1]], dtype)
    )
    chunks, length = ENCODER.encode(asked(OutputWish(name, binary), id="9"), {name: raw(array, datatype)})
    result = tritonclient.http.InferenceServerClient.parse_response_body(b"".join(chunks), header_length=length)
    got = result.as_numpy(name)
    assert got is not None
    assert result.get_response()["id"] == "9"
    if datatype == "BYTES" and not binary:
        array = np.frompyfunc(bytes.decode, 1, 1)(array)
    if datatype == "BF16":
        assert got.dtype == ml_dtypes.bfloat16
        assert np.array_equal(got.astype(np.float32), bf16_to_float32(array))
    else:
        assert got.dtype == dtype
        assert np.array_equal(got, array)


def test_tritonclient_reads_what_json_lacks() -> None:
    body = text(in_json("fp32"), fp32=fp32(float("nan"), float("inf"), -float("inf")))
    got = tritonclient.http.InferenceServerClient.parse_response_body(body).as_numpy("fp32")
    assert np.array_equal(got, [[np.nan, np.inf, -np.inf]], equal_nan=True)


def test_a_row_without_the_batch_axis_is_answered_without_it() -> None:
    request = in_json("fp32")
    request.is_bare = True
    assert json.loads(text(request, fp32=fp32(1, 2)))["outputs"][0]["shape"] == [2]


def test_rows_of_a_ragged_output_have_their_own_sizes_in_json() -> None:
    outputs = (
        TensorSpec("boxes", "FP32", (-1, 2), ragged=True), TensorSpec("boxes_count", "INT32", (1,), counts="boxes"),
        TensorSpec("words", "BYTES", (-1,), ragged=True), TensorSpec("words_count", "INT32", (1,), counts="words"),
    )  # fmt: skip
    encoder = ResponseEncoder(msgspec.structs.replace(SIGNATURE, outputs=outputs))
    boxes = np.array([[[1, np.nan], [2, 3]], [[0, 0], [0, 0]]], "f4")
    answer = {
        "boxes": raw(boxes, "FP32"), "boxes_count": raw(np.array([[2], [0]], "<i4"), "INT32"),
        "words": raw(np.array([[b"a", b""], [b"b", b"c"]], object), "BYTES"),
        "words_count": raw(np.array([[1], [2]], "<i4"), "INT32"),
    }  # fmt: skip
    wishes = [OutputWish(name, False) for name in answer]
    (body,), _ = encoder.encode(asked(*wishes), answer)
    found = json.loads(bytes(body).replace(b"NaN", b'"NaN"'))["outputs"]
    assert [(output["shape"], output["data"]) for output in found] == [
        ([2, -1, 2], [[[1, "NaN"], [2, 3]], []]), ([2, 1], [2, 0]), ([2, -1], [["a"], ["b", "c"]]), ([2, 1], [1, 2]),
    ]  # fmt: skip
    chunks, length = encoder.encode(asked(OutputWish("boxes", True)), answer)
    assert length is not None
    assert bytes(chunks[1]) == boxes.tobytes()
