"""Requests and answers of the generate extension: a row in plain fields, and what is said when it is none."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.datatypes import pack_bytes, unpack_bytes
from headwater.model import Parameter
from headwater.runtime.loader import load_model
from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater_server.codecs.generate_body import GenerateDecoder, GenerateEncoder
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, OutputWish, RawTensor
from headwater_server.config.reader import load_config
from headwater_server.errors import BadRequest, CallableFailed, DeadlineExceeded

SIGNATURE = Signature(
    name="m",
    inputs=(
        TensorSpec("text", "BYTES", (1,)),
        TensorSpec("ids", "INT32", (-1,), optional=True),
        TensorSpec("pair", "FP32", (2,), optional=True),
        TensorSpec("matrix", "FP32", (-1, 3), optional=True),
        TensorSpec("free", "FP64", (-1, -1), optional=True),
        TensorSpec("flag", "BOOL", (1,), optional=True),
        TensorSpec("words", "BYTES", (-1, 2), optional=True),
        TensorSpec("none", "FP32", (), optional=True),
        TensorSpec("half", "FP16", (1,), optional=True),
    ),
    outputs=(TensorSpec("y", "FP32", (-1,)), TensorSpec("label", "BYTES", (1,))),
    parameters=(
        Parameter("temperature", "float", 1.0, "batch", maximum=2.0),
        Parameter("top_k", "int", 5, "row"),
    ),
)
DECODER = GenerateDecoder(SIGNATURE)
ENCODER = GenerateEncoder(SIGNATURE)

PIPELINE = Signature(
    name="p",
    inputs=(TensorSpec("x", "FP32", (1,)),),
    outputs=(
        TensorSpec("digit", "INT32", (1,)),
        TensorSpec("scores", "FP32", (2,)),
        TensorSpec("ink", "FP16", (1,)),
    ),
    heads=(HeadSpec("a", ("digit", "scores")), HeadSpec("b", ("ink",), on_error="omit")),
)


def decoded(**fields: Any) -> InferRequest:
    return DECODER.decode(json.dumps({"text": "t", **fields}).encode())


def refused(body: bytes, *said: str, decoder: GenerateDecoder = DECODER) -> None:
    with pytest.raises(BadRequest) as caught:
        decoder.decode(body)
    for text in said:
        assert text in caught.value.message
    assert caught.value.field
    assert len(caught.value.message) < 1500


def floats(tensor: RawTensor) -> Any:
    kind = {"FP32": np.float32, "FP64": np.float64, "INT32": np.int32}[tensor.datatype]
    return np.frombuffer(tensor.data, kind).reshape(tensor.shape).tolist()


class TestRows:
    def test_a_string(self) -> None:
        request = decoded(text="grün [1, 2]")
        assert (request.rows, request.id) == (1, "")
        assert request.inputs["text"].shape == (1, 1)
        assert unpack_bytes(request.inputs["text"].data) == ["grün [1, 2]".encode()]
        assert request.outputs == [OutputWish("y", False), OutputWish("label", False)]

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("ids", 7, [[7]]),
            ("ids", [7], [[7]]),
            ("ids", [1, 2, 3], [[1, 2, 3]]),
            ("ids", [], [[]]),
            ("pair", [1, 2.5], [[1.0, 2.5]]),
            ("matrix", [[1, 2, 3]], [[[1, 2, 3]]]),
            ("matrix", [[1, 2, 3], [4, 5, 6]], [[[1, 2, 3], [4, 5, 6]]]),
            ("matrix", [1, 2, 3, 4, 5, 6], [[[1, 2, 3], [4, 5, 6]]]),
            ("matrix", [], [[]]),
            ("free", [[1], [2]], [[[1], [2]]]),
            ("free", [[], []], [[[], []]]),
            ("free", 1e3, [[[1000.0]]]),
            ("none", 3, [3.0]),
            ("none", [3], [3.0]),
        ],
    )
    def test_numbers(self, name: str, value: Any, expected: Any) -> None:
        assert floats(decoded(**{name: value}).inputs[name]) == expected

    def test_white_space(self) -> None:
        request = DECODER.decode(b' { "text" : "t" , "matrix" : [ [ 1 , 2 , 3 ]\n, [4,5,6] ] , "ids" : [ ] } ')
        assert floats(request.inputs["matrix"]) == [[[1, 2, 3], [4, 5, 6]]]
        assert request.inputs["ids"].shape == (1, 0)

    def test_booleans_and_strings_in_arrays(self) -> None:
        request = decoded(flag=True, words=[["a]", "[b"], ["c,", '"']])
        assert bytes(request.inputs["flag"].data) == b"\1"
        assert request.inputs["words"].shape == (1, 2, 2)
        assert unpack_bytes(request.inputs["words"].data) == [b"a]", b"[b", b"c,", b'"']

    @pytest.mark.slow
    @pytest.mark.parametrize("nested", [False, True])
    def test_long_rows_cost_a_small_multiple_of_the_body(self, nested: bool) -> None:
        values = np.arange(300_000, dtype=np.float32)
        body = json.dumps({"text": "t", "matrix": (values.reshape(-1, 3) if nested else values).tolist()}).encode()
        tracemalloc.start()
        try:
            request = DECODER.decode(body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert request.inputs["matrix"].shape == (1, 100_000, 3)
        assert request.inputs["matrix"].data == values.tobytes()
        assert peak < 8 * len(body)

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("text", 5, ("text: expected a string (BYTES), got an integer",)),
            ("text", {"a": 1}, ("text: expected a string", "got an object")),
            ("text", None, ("text: expected a string", "got null")),
            ("text", ["a", "b"], ("text: expected 1 elements, for shape [1], got 2",)),
            ("text", [["a"]], ("text: expected a flat array", "2 levels")),
            ("ids", 1.5, ("ids: expected an integer (INT32), got 1.5",)),
            ("ids", 2**31, ("ids: expected INT32", "2147483648")),
            ("ids", [1, "2"], ("ids[1]: expected an integer (INT32), got a string",)),
            ("ids", [1, [2]], ("ids[1]: expected an integer (INT32) in a flat array, got an array",)),
            ("ids", "12", ("ids: expected an integer (INT32), got a string",)),
            ("pair", 1, ("pair: expected an array of FP32 for a row of shape [2], got a single value",)),
            ("pair", [1], ("pair: expected 2 elements, for shape [2], got 1",)),
            ("matrix", [1, 2], ("matrix: expected a multiple of 3 elements, for shape [-1, 3], got 2",)),
            ("matrix", [[1, 2]], ("matrix: expected a row of shape [-1, 3], got a row of shape [1, 2]",)),
            ("matrix", [[1, 2, 3], [4]], ("matrix[1]: expected 3 elements", "got 1")),
            ("matrix", [[1, 2, 3], [4, 5, "6"]], ("matrix[1][2]: expected a number (FP32)", "got a string")),
            ("matrix", [[[1]]], ("matrix: expected a flat array, or one nested as a row of shape [-1, 3]", "3 levels")),
            ("matrix", "1", ("matrix: expected an array of FP32", "got a string")),
            ("free", [1, 2], ("free: expected arrays nested", "several dimensions of which vary", "flat")),
            ("flag", 1, ("flag: expected a boolean (BOOL), got an integer",)),
            ("half", 1, ("half: expected binary data, got JSON", "FP16", "/infer")),
            ("words", [["a", "b"], "c"], ("words[1]: expected an array", "got a string")),
        ],
    )
    def test_wrong(self, name: str, value: Any, said: tuple[str, ...]) -> None:
        refused(json.dumps({"text": "t", name: value}).encode(), *said)

    def test_deep_nesting(self) -> None:
        refused(b'{"text": "t", "free": ' + b"[" * 400 + b"]" * 400 + b"}", "free", "400 levels")
        refused(b'{"text": ' + b"[" * 500_000 + b"}", "nested too deeply")
        refused(b'{"text": "t", "other": ' + b"[" * 500_000 + b"}", "nested too deeply")

    def test_numbers_that_json_lacks(self) -> None:
        refused(b'{"text": "t", "ids": [NaN]}', "NaN or Infinity", "/infer")

    def test_a_lone_surrogate(self) -> None:
        refused(rb'{"text": "\ud800"}', "surrogate")

    def test_text_that_is_not_utf8(self) -> None:
        refused(b'{"text": "\xff"}', "text", "UTF-8", "0xff", "/infer")
        refused(b'{"text": ["\xff"]}', "text", "UTF-8", "0xff")


class TestFields:
    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (b"", ("body: expected a JSON object, got an empty body",)),
            (b"[]", ("body: expected an object, got an array",)),
            (b"{", ("body: expected JSON, got malformed JSON",)),
            (b"{}", ("text: expected the required inputs 'text', got an object without 'text'",)),
            (b'{"text": "t", "id": 5}', ("id: expected a string, got an integer",)),
            (b'{"text": "t", "id": "%b"}' % (b"i" * 1001), ("id: expected at most 1000 characters",)),
            (b'{"text": "t", "parameters": 5}', ("parameters: expected an object, got an integer",)),
            (b'{"text": "t", "txt": "t"}', ("txt: expected one of the fields text, ids", "temperature", "got 'txt'")),
            (b'{"text": "t", "outputs": ["y"]}', ("outputs: expected one of the fields", "got 'outputs'")),
            (b'{"text": "t", "top_k": "a"}', ("top_k: expected int, got 'a'",)),
            (b'{"text": "t", "top_k": 1, "parameters": {"top_k": 2}}', ("top_k: expected it once",)),
            (b'{"text": "t", "parameters": {"top_k": [1]}}', ("parameters.top_k: expected int, got an array",)),
            (b'{"text": "t", "parameters": {"beam": 1}}', ("parameters.beam", "temperature, top_k, priority, timeout")),
            (b'{"text": "t", "parameters": {"heads": "a"}}', ("parameters.heads", "got 'heads'")),
            (b'{"text": "t", "parameters": {"binary_data_output": true}}', ("parameters.binary_data_output",)),
            (b'{"text": "t", "parameters": {"timeout": -1}}', ("parameters.timeout: expected an integer",)),
        ],
    )
    def test_wrong(self, body: bytes, said: tuple[str, ...]) -> None:
        refused(body, *said)

    def test_parameters_in_either_place(self) -> None:
        request = decoded(id="7", temperature=0, parameters={"top_k": 3, "timeout": 1000, "priority": 2})
        assert request.id == "7"
        assert (request.batch_parameters, request.row_parameters) == ({"temperature": 0.0}, {"top_k": 3})
        assert (request.timeout_us, request.priority) == (1000, 2)
        assert decoded().row_parameters == {"top_k": 5}

    def test_id_and_parameters_may_be_null(self) -> None:
        assert decoded(id=None, parameters=None).id == ""


class TestHeads:
    decoder = GenerateDecoder(PIPELINE)

    @pytest.mark.parametrize("fields", [{"heads": "a"}, {"parameters": {"heads": ["a"]}}])
    def test_chosen(self, fields: dict[str, Any]) -> None:
        request = self.decoder.decode(json.dumps({"x": 1, **fields}).encode())
        assert request.heads == ("a",)
        assert [wish.name for wish in request.outputs] == ["digit", "scores"]

    def test_an_output_without_a_json_form(self) -> None:
        said = ("outputs (tensor 'ink')", "FP16", "/infer", "parameters.heads")
        refused(b'{"x": 1}', *said, decoder=self.decoder)


def tensor(datatype: str, *values: Any) -> RawTensor:
    if datatype == "BYTES":
        return RawTensor(datatype, (1, len(values)), pack_bytes(values))
    kind = {"FP32": np.float32, "INT32": np.int32}[datatype]
    return RawTensor(datatype, (1, len(values)), np.array(values, kind).tobytes())


OUTPUTS = {"y": tensor("FP32", 1.5, 2), "label": tensor("BYTES", "grün".encode())}


class TestAnswers:
    def test_whole(self) -> None:
        text = ENCODER.whole(decoded(id="i"), Answer(OUTPUTS))
        assert text == (
            '{"model_name":"m","model_version":"1","id":"i","y":[1.5,2.0],"label":"grün"}'.encode()
        )  # fmt: skip

    @pytest.mark.parametrize(("values", "expected"), [((), []), ((0.5,), 0.5), ((1.0, 2.0), [1.0, 2.0])])
    def test_one_element_is_a_scalar(self, values: Any, expected: Any) -> None:
        text = ENCODER.whole(decoded(), Answer({**OUTPUTS, "y": tensor("FP32", *values)}))
        assert json.loads(text)["y"] == expected

    def test_a_piece_of_a_plain_model(self) -> None:
        piece = json.loads(ENCODER.piece(decoded(), HeadAnswer("", OUTPUTS, took_ms=1)))
        assert piece == {"model_name": "m", "model_version": "1", "y": [1.5, 2.0], "label": "grün"}

    def test_every_event_of_a_model_with_a_text_output_has_a_text(self) -> None:
        encoder = GenerateEncoder(Signature("m", (), (TensorSpec("text_output", "BYTES", (1,)),), streams=True))
        end = json.loads(encoder.end(decoded(), {}))
        assert end == {"model_name": "m", "model_version": "1", "text_output": "", "final": True}

    def test_the_end_of_a_plain_model(self) -> None:
        assert json.loads(ENCODER.end(decoded(id="i"), {"": "ok"})) == {
            "model_name": "m",
            "model_version": "1",
            "id": "i",
            "final": True,
        }

    def test_a_missing_output(self) -> None:
        with pytest.raises(CallableFailed, match="label"):
            ENCODER.whole(decoded(), Answer({"y": OUTPUTS["y"]}))

    def test_bytes_that_are_no_text(self) -> None:
        with pytest.raises(BadRequest, match="/infer"):
            ENCODER.whole(decoded(), Answer({**OUTPUTS, "label": tensor("BYTES", b"\xff")}))

    def test_an_error(self) -> None:
        assert json.loads(ENCODER.failure(DeadlineExceeded("late"))) == {"error": "late", "status": 504}


class TestHeadsOfAnswers:
    signature = Signature(
        name="p",
        inputs=(TensorSpec("x", "FP32", (1,)),),
        outputs=(
            TensorSpec("digit", "INT32", (1,)),
            TensorSpec("scores", "FP32", (2,)),
            TensorSpec("c", "BYTES", (1,)),
        ),
        heads=(HeadSpec("a", ("digit", "scores")), HeadSpec("b", ("c",), on_error="omit")),
    )
    encoder = GenerateEncoder(signature)
    request = GenerateDecoder(signature).decode(b'{"x": 1}')
    outputs = {"digit": tensor("INT32", 7), "scores": tensor("FP32", 0.5, 1)}  # noqa: RUF012 - not changed

    def test_a_head_that_is_ready(self) -> None:
        text = self.encoder.piece(self.request, HeadAnswer("a", self.outputs, took_ms=1.23456))
        assert json.loads(text) == {
            "model_name": "p",
            "model_version": "1",
            "head": "a",
            "status": "ok",
            "time_ms": 1.235,
            "digit": 7,
            "scores": [0.5, 1.0],
        }

    def test_a_head_that_failed(self) -> None:
        piece = json.loads(self.encoder.piece(self.request, HeadAnswer("b", error=DeadlineExceeded("late"))))
        assert (piece["head"], piece["status"], piece["error"]) == ("b", "timeout", "late")
        assert "c" not in piece

    def test_an_omitted_head_of_a_whole_answer(self) -> None:
        omitted = [HeadAnswer("b", error=DeadlineExceeded("late"))]
        assert json.loads(self.encoder.whole(self.request, Answer(self.outputs, omitted))) == {
            "model_name": "p",
            "model_version": "1",
            "parameters": {"omitted_heads": "b", "head.b.status": "timeout", "head.b.reason": "late"},
            "digit": 7,
            "scores": [0.5, 1.0],
        }

    def test_the_end(self) -> None:
        end = json.loads(self.encoder.end(self.request, {"a": "ok", "b": "timeout"}))
        assert (end["final"], end["heads"]) == (True, {"a": "ok", "b": "timeout"})


def test_the_references_example_is_answered_as_it_says_by_the_demo() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/reference.md").read_text()
    example = re.search(r"models/(\S+)/generate -H .* -d '(.*)'\n(.*)\n", text)
    assert example is not None
    name, body, answer = example.groups()
    section = load_config(root / "configs/demo.yaml", environment={}, flags={}).deployments[name]
    assert section.model is not None
    model = load_model(section.model, section.options)
    signature = Signature.of(model, name=name, max_batch_size=section.batching.max_batch_size)
    request = GenerateDecoder(signature).decode(body.encode())
    (x,) = request.inputs.values()
    y = model(x=np.frombuffer(x.data, np.float32).reshape(x.shape))["y"]
    outputs = {"y": RawTensor("FP32", y.shape, y.tobytes())}
    assert GenerateEncoder(signature).whole(request, Answer(outputs, ())).decode() == answer
