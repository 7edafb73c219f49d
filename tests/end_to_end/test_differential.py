"""The gateway and the replica's own Triton, asked the same: they differ only in what docs/compatibility.md lists."""

from __future__ import annotations

import contextlib
import gzip
import inspect
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tritonclient.utils import InferenceServerException

from headwater.datatypes import DATATYPES, pack_bytes
from headwater.wire.report import REPORT
from tests.forwarding import forward
from tests.running import Running

Json = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]

COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"
MAX_ROWS = 8
"""``max_batch_size`` of `mirror`."""
HEADER = "Inference-Header-Content-Length"


class Pair(NamedTuple):
    """One model, behind the gateway and behind its replica's Triton."""

    model: str
    gateway: httpx.Client
    triton: httpx.Client

    def get(self, path: str) -> tuple[httpx.Response, httpx.Response]:
        """The same GET to both."""
        return self.gateway.get(path), self.triton.get(path)

    def post(self, body: bytes, headers: dict[str, str] | None = None) -> tuple[httpx.Response, httpx.Response]:
        """The same body to both, to infer."""
        path = f"/v2/models/{self.model}/infer"
        ours, theirs = (client.post(path, content=body, headers=headers) for client in (self.gateway, self.triton))
        return ours, theirs

    def infer(self, *inputs: Json, **fields: Any) -> tuple[httpx.Response, httpx.Response]:
        """The same JSON request to both. ``data`` that are bytes follow the JSON."""
        head, data = _binary({"inputs": list(inputs), **fields})
        return self.post(head + data, {HEADER: str(len(head))} if data else None)

    def generate(self, path: str = "generate", **fields: Any) -> tuple[httpx.Response, httpx.Response]:
        """The same fields to both."""
        path = f"/v2/models/{self.model}/{path}"
        ours, theirs = (client.post(path, json=fields) for client in (self.gateway, self.triton))
        return ours, theirs


MakePair = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pair_of(services: Running) -> Iterator[MakePair]:
    """Makes a `Pair` by the model's name."""
    with contextlib.ExitStack() as stack:
        pairs: dict[str, Pair] = {}

        def make(model: str) -> Pair:
            if model not in pairs:
                folder = services.replica_folder(model)
                address = stack.enter_context(forward(folder / "h"))
                pairs[model] = Pair(
                    model,
                    stack.enter_context(_client(services.url, {})),
                    stack.enter_context(_client(f"http://{address}", _token(folder))),
                )
            return pairs[model]

        yield make


@pytest.fixture(scope="module")
def mirror(pair_of: MakePair) -> Pair:
    return pair_of("mirror")


@pytest.fixture(scope="module")
def tuned(pair_of: MakePair) -> Pair:
    return pair_of("tuned")


def _client(url: str, headers: dict[str, str]) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Accept-Encoding": "identity", **headers}, timeout=30)


def _token(folder: Path) -> dict[str, str]:
    return {"triton-access-token": json.loads((folder / "spec.json").read_text())["token"]}


def _binary(body: Json) -> tuple[bytes, bytes]:
    """A request's JSON, and what follows it."""
    data = b""
    inputs = []
    for tensor in body["inputs"]:
        if isinstance(tensor.get("data"), bytes):
            data += tensor["data"]
            size = {"binary_data_size": len(tensor["data"])}
            tensor = {key: value for key, value in tensor.items() if key != "data"} | {"parameters": size}
        inputs.append(tensor)
    return json.dumps({**body, "inputs": inputs}).encode(), data


def tensor(name: str, datatype: str, shape: list[int], data: Any, **more: Any) -> Json:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


def x(*values: float, **changes: Any) -> Json:
    """One row for a model whose input is ``x``."""
    return tensor("x", "FP32", [1, len(values)], list(values)) | changes


def _body(*inputs: Json, **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def as_given(datatype: str, shape: list[int], data: Any) -> Json:
    return tensor(f"in_{datatype.lower()}", datatype, shape, data)


ROW = as_given("INT32", [1, 1], [1])
"""What `mirror` needs in any case."""


def output(name: str, *, binary: bool = False) -> Json:
    return {"name": name, "parameters": {"binary_data": True}} if binary else {"name": name}


def outputs_of(answer: httpx.Response) -> dict[str, tuple[str, list[int], object]]:
    """Datatype, shape and data by output: binary data as they are, JSON floats as their bits in FP32."""
    assert answer.status_code == 200, answer.text
    length = answer.headers.get(HEADER)
    document = json.loads(answer.content if length is None else answer.content[: int(length)])
    offset = int(length or 0)
    found: dict[str, tuple[str, list[int], object]] = {}
    for item in document["outputs"]:
        data: Any
        if "data" in item:
            data = item["data"]
            if item["datatype"].startswith("FP"):
                with np.errstate(over="ignore"):
                    data = np.array(data, np.float32).tobytes()
        else:
            size = item["parameters"]["binary_data_size"]
            data = answer.content[offset : offset + size]
            offset += size
        found[item["name"]] = (item["datatype"], item["shape"], data)
    return found


def same(answers: tuple[httpx.Response, httpx.Response]) -> dict[str, tuple[str, list[int], object]]:
    """Check that both gave the same outputs, and return them."""
    ours, theirs = (outputs_of(answer) for answer in answers)
    theirs.pop(REPORT, None)
    assert ours == theirs
    assert _header_of(answers[0]) == _header_of(answers[1])
    return ours


def _header_of(answer: httpx.Response) -> Json:
    length = answer.headers.get(HEADER)
    document = json.loads(answer.content if length is None else answer.content[: int(length)])
    return {key: value for key, value in document.items() if key != "outputs"}


def statuses(answers: tuple[httpx.Response, httpx.Response]) -> tuple[int, int]:
    for answer in answers:
        if answer.status_code != 200:
            assert isinstance(answer.json()["error"], str)
    return answers[0].status_code, answers[1].status_code


class TestMetadata:
    @pytest.mark.parametrize("version", ["", "/versions/1"])
    @pytest.mark.parametrize("model", ["tuned", "matrix"])
    def test_of_a_model(self, pair_of: MakePair, model: str, version: str) -> None:
        ours, theirs = (answer.json() for answer in pair_of(model).get(f"/v2/models/{model}{version}"))
        theirs["outputs"] = [item for item in theirs["outputs"] if item["name"] != REPORT]
        assert ours == theirs

    def test_config_in_what_both_have(self, tuned: Pair) -> None:
        ours, theirs = (answer.json() for answer in tuned.get("/v2/models/tuned/config"))
        for field in ("name", "platform", "backend", "max_batch_size"):
            assert ours[field] == theirs[field]
        assert "model_transaction_policy" not in ours.keys() | theirs.keys()
        theirs["output"] = [item for item in theirs["output"] if item["name"] != REPORT]
        for field in ("input", "output"):
            assert len(ours[field]) == len(theirs[field])
            for mine, other in zip(ours[field], theirs[field], strict=True):
                assert mine.items() <= other.items()

    def test_config_of_every_datatype(self, mirror: Pair) -> None:
        ours, theirs = (answer.json() for answer in mirror.get("/v2/models/mirror/config"))
        for field in ("input", "output"):
            types = [{item["name"]: item["data_type"] for item in config[field]} for config in (ours, theirs)]
            types[1].pop(REPORT, None)
            assert types[0] == types[1] | {name: "TYPE_BF16" for name in types[0] if name.endswith("bf16")}

    @pytest.mark.parametrize(
        "path",
        [
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/tuned/ready",
            "/v2/models/tuned/versions/1/ready",
            "/v2/models/tuned/versions/2",
            "/v2/models/tuned/versions/2/config",
            "/v2/models/tuned/stats",
            "/v2/models/nope",
            "/v2/models/nope/config",
            "/v2/nope",
            "/v2/models/tuned/infer",
        ],
    )
    def test_the_same_status(self, tuned: Pair, path: str) -> None:
        ours, theirs = tuned.get(path)
        assert ours.status_code == theirs.status_code

    def test_statistics_have_the_same_counters(self, tuned: Pair) -> None:
        ours, theirs = (answer.json()["model_stats"][0] for answer in tuned.get("/v2/models/tuned/stats"))
        assert ours.keys() <= theirs.keys()
        assert ours["inference_stats"].keys() <= theirs["inference_stats"].keys()

    def test_the_repository_index_has_the_same_fields(self, tuned: Pair) -> None:
        ours, theirs = (client.post("/v2/repository/index").json() for client in (tuned.gateway, tuned.triton))
        (mine,) = [model for model in ours if model["name"] == "tuned"]
        assert theirs[0].items() <= mine.items()


JSON_VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP32": [0.1, -3.4028235e38],
    "FP64": [0.1, 1e30],
    "BYTES": ["", 'grün\0\t"\\/'],
}


class TestInference:
    @pytest.mark.parametrize("datatype", JSON_VALUES)
    def test_json(self, mirror: Pair, datatype: str) -> None:
        name = f"out_{datatype.lower()}"
        inputs = {tensor["name"]: tensor for tensor in (ROW, as_given(datatype, [1, 2], JSON_VALUES[datatype]))}
        answers = mirror.infer(*inputs.values(), outputs=[output(name)])
        assert same(answers)[name][:2] == (datatype, [1, 2])

    @pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BF16"])
    def test_binary(self, mirror: Pair, datatype: str) -> None:
        name = f"out_{datatype.lower()}"
        data = pack_bytes([b"\xff\0", b""]) if datatype == "BYTES" else b"\1\0" * DATATYPES[datatype].size_bytes
        if datatype == "BOOL":
            data = b"\1\0"
        shape = [1, 2]
        inputs = {tensor["name"]: tensor for tensor in (ROW, as_given(datatype, shape, data))}
        answers = mirror.infer(*inputs.values(), outputs=[output(name, binary=True)])
        assert same(answers)[name] == (datatype, shape, data)

    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
    def test_what_is_not_finite(self, pair_of: MakePair, binary: bool) -> None:
        same(pair_of("specials").infer(x(0), outputs=[output("y", binary=binary)]))

    def test_nested_data(self, pair_of: MakePair) -> None:
        data = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [1, 1, 1]]]
        same(pair_of("matrix").infer(tensor("m", "FP32", [2, 2, 3], data)))

    @pytest.mark.parametrize("names", [None, [], ["y"], ["batch"]])
    def test_wanted_outputs(self, tuned: Pair, names: list[str] | None) -> None:
        fields = {} if names is None else {"outputs": [output(name) for name in names]}
        same(tuned.infer(x(1, 2), **fields))

    def test_all_outputs_in_binary(self, tuned: Pair) -> None:
        same(tuned.infer(x(1, 2), parameters={"binary_data_output": True}))

    def test_an_output_overrides_the_default_form(self, tuned: Pair) -> None:
        wanted = [output("y"), {"name": "batch", "parameters": {"binary_data": False}}]
        same(tuned.infer(x(1, 2), outputs=wanted, parameters={"binary_data_output": True}))

    @pytest.mark.parametrize("id", ["", "1", 'grün "\\ \t', "x" * 1000])
    def test_ids(self, tuned: Pair, id: str) -> None:
        answers = tuned.infer(x(1), id=id)
        same(answers)
        assert answers[0].json().get("id", "") == id

    @pytest.mark.parametrize(
        "parameters",
        [{}, {"factor": 3}, {"factor": 0.1}, {"offset": -7}, {"mode": "negated", "offset": 1}, {"priority": 1}],
    )
    def test_parameters(self, tuned: Pair, parameters: Json) -> None:
        same(tuned.infer(x(1, 2), parameters=parameters))

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_compressed_requests(self, tuned: Pair, encoding: str) -> None:
        body = _body(x(1, 2))
        packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        same(tuned.post(packed, {"Content-Encoding": encoding}))

    def test_tritonclient_gets_the_same_from_both(self, services: Running) -> None:
        folder = services.replica_folder("tuned")
        results = []
        with forward(folder / "h") as address:
            for url, headers in ((services.url.removeprefix("http://"), None), (address, _token(folder))):
                with tritonclient.http.InferenceServerClient(url) as client:
                    array = np.array([[1, 2], [3, 4]], np.float32)
                    inputs = [tritonclient.http.InferInput("x", [2, 2], "FP32").set_data_from_numpy(array)]
                    result = client.infer("tuned", inputs, parameters={"factor": 3.0}, headers=headers)
                    results.append((result.as_numpy("y").tolist(), result.as_numpy("batch").tolist()))
                    with pytest.raises(InferenceServerException) as caught:
                        client.infer("nope", inputs, headers=headers)
                    assert caught.value.status() in ("400", "404")
        assert results[0] == results[1] == ([[3, 6], [9, 12]], [[2], [2]])


def case(name: str, *inputs: Json, **fields: Any) -> Any:
    return pytest.param(*_binary({"inputs": list(inputs), **fields}), id=name)


REFUSED_BY_BOTH = [
    case("wrong datatype", x(1, datatype="FP64")),
    case("no datatype", x(1, datatype="float")),
    case("too few dimensions", x(1, shape=[1])),
    case("too many dimensions", x(1, shape=[1, 1, 1])),
    case("unknown input", x(1, name="z")),
    case("one input too many", x(1), x(1, name="z")),
    case("an input twice", x(1), x(1)),
    case("no inputs"),
    case("unknown output", x(1), outputs=[output("z")]),
    case("too few bytes", x(shape=[1, 2], data=b"1234")),
    case("too many bytes", x(shape=[1, 1], data=b"12345678")),
    case("data and bytes", x(1, parameters={"binary_data_size": 4})),
    case("neither data nor bytes", {"name": "x", "datatype": "FP32", "shape": [1, 1]}),
]


class TestErrors:
    @pytest.mark.parametrize(("head", "data"), REFUSED_BY_BOTH)
    def test_both_refuse(self, tuned: Pair, head: bytes, data: bytes) -> None:
        assert statuses(tuned.post(head + data, {HEADER: str(len(head))} if data else None)) == (400, 400)

    @pytest.mark.parametrize(
        "inputs",
        [
            pytest.param([ROW, as_given("FP32", [2, 1], [1, 2])], id="inputs of unequal rows"),
            pytest.param([ROW, as_given("FP16", [1, 1], [1])], id="FP16 in JSON"),
            pytest.param([ROW, as_given("BYTES", [1, 1], b"\7\0\0\0ab")], id="an element that is cut short"),
            pytest.param([ROW, as_given("BYTES", [1, 2], b"\2\0\0\0ab")], id="too few elements"),
            pytest.param([ROW, as_given("BYTES", [1, 1], b"\2\0\0\0ab" * 2)], id="too many elements"),
        ],
    )
    def test_both_refuse_inputs(self, mirror: Pair, inputs: list[Json]) -> None:
        assert statuses(mirror.infer(*inputs, outputs=[output("out_int32")])) == (400, 400)

    def test_both_refuse_an_output_without_a_json_form(self, mirror: Pair) -> None:
        assert statuses(mirror.infer(ROW, outputs=[output("out_fp16")])) == (400, 400)

    @pytest.mark.parametrize("length", ["5000", "-1"])
    def test_both_refuse_a_length_outside_the_body(self, mirror: Pair, length: str) -> None:
        head, data = _binary({"inputs": [as_given("INT32", [1, 1], b"1234")]})
        assert statuses(mirror.post(head + data, {HEADER: length})) == (400, 400)

    def test_both_refuse_bytes_after_the_last_tensor(self, mirror: Pair) -> None:
        head, data = _binary({"inputs": [as_given("INT32", [1, 1], b"1234")]})
        assert statuses(mirror.post(head + data + b"5", {HEADER: str(len(head))})) == (400, 400)


# Random requests that are valid at both.


class _Request(NamedTuple):
    inputs: list[Json]
    outputs: list[Json]
    id: str


@st.composite
def requests(draw: st.DrawFn) -> _Request:
    rows = draw(st.integers(1, MAX_ROWS))
    others = st.sampled_from([name for name in DATATYPES if name not in ("INT32", "BF16")])
    chosen = draw(st.lists(others, unique=True, max_size=4))
    inputs = []
    outputs = []
    for datatype in draw(st.permutations(["INT32", *chosen])):
        json_in, json_out = (DATATYPES[datatype].json and draw(st.booleans()) for _ in range(2))
        shape = [rows, draw(st.integers(1, 4))]
        array = draw(_arrays(datatype, shape, json_in=json_in, json_out=json_out))
        inputs.append(as_given(datatype, shape, _data(datatype, array, as_json=json_in)))
        outputs.append(output(f"out_{datatype.lower()}", binary=not json_out))
    ids = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    return _Request(inputs, draw(st.permutations(outputs)), draw(ids))


def _arrays(datatype: str, shape: list[int], *, json_in: bool, json_out: bool) -> st.SearchStrategy[Array]:
    dtype = DATATYPES[datatype].numpy
    elements: st.SearchStrategy[Any] = st.binary(max_size=6)
    if dtype.hasobject and (json_in or json_out):
        elements = st.text(st.characters(codec="utf-8"), max_size=6).map(str.encode)
    elif datatype == "FP32" and json_in:
        elements = st.floats(allow_nan=False, allow_infinity=False, width=32)
    elif datatype == "FP64" and json_in:  # test_how_doubles_are_read
        elements = st.integers(-(2**40), 2**40).map(float)
    elif not dtype.hasobject:
        elements = npst.from_dtype(dtype)
    return npst.arrays(dtype, tuple(shape), elements=elements, fill=st.nothing())


def _data(datatype: str, array: Array, *, as_json: bool) -> Any:
    if datatype == "BYTES":
        elements = array.ravel().tolist()
        return [element.decode() for element in elements] if as_json else pack_bytes(elements)
    return array.tolist() if as_json else array.tobytes()


@settings(deadline=None, max_examples=60)
@given(requests())
def test_any_valid_request_gets_the_same_outputs_from_both(mirror: Pair, request_: _Request) -> None:
    answers = mirror.infer(*request_.inputs, outputs=request_.outputs, id=request_.id)
    found = same(answers)
    assert found.keys() == {item["name"] for item in request_.outputs}
    for item in request_.inputs:
        assert found[item["name"].replace("in_", "out_")][:2] == (item["datatype"], item["shape"])


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("tuned", {"x": 3}),
        ("tuned", {"x": [1, 2.5], "id": "i"}),
        ("tuned", {"x": 3, "factor": 5}),
        ("tuned", {"x": 3, "parameters": {"factor": 5}}),
        ("matrix", {"m": [1, 2, 3, 4, 5, 6]}),
        ("short", {"text": "ab"}),
        ("short", {"text": ["grün"]}),
        ("specials", {"x": 1}),
    ],
)
def test_generate_gives_the_same_fields(pair_of: MakePair, path: str, model: str, fields: Json) -> None:
    answers = pair_of(model).generate(path, **fields)
    texts = [answer.text.removeprefix("data: ").partition("\n\n")[0] for answer in answers]
    ours, theirs = (json.loads(text, parse_constant=str) for text in texts)
    del theirs[REPORT]
    assert ours == theirs
    kinds = {answer.headers["content-type"] for answer in answers}
    assert kinds == {"application/json" if path == "generate" else "text/event-stream; charset=utf-8"}


class TestDifferences:
    """Each is a row of the table in docs/compatibility.md, which names these tests."""

    # What is refused here and taken there.

    @pytest.mark.parametrize("fields", [{"model": "tuned"}, {"inputs": [x(1, dtype="FP32")]}])
    def test_unknown_fields(self, tuned: Pair, fields: Json) -> None:
        body = {"inputs": [x(1)], **fields}
        assert statuses(tuned.post(json.dumps(body).encode())) == (400, 200)

    def test_keys_that_stand_twice(self, tuned: Pair) -> None:
        body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1], "name": "x"}]}'
        assert statuses(tuned.post(body)) == (400, 200)

    def test_undeclared_parameters(self, tuned: Pair) -> None:
        assert statuses(tuned.infer(x(1), parameters={"volume": 3})) == (400, 200)

    @pytest.mark.parametrize(
        "fields",
        [
            {"parameters": {"sequence_id": 1, "sequence_start": True}},
            {"outputs": [{"name": "y", "parameters": {"classification": 1}}]},
        ],
    )
    def test_extensions_that_are_not_offered(self, tuned: Pair, fields: Json) -> None:
        assert statuses(tuned.infer(x(1), **fields)) == (400, 200)
        ours, theirs = (set(answer.json()["extensions"]) for answer in tuned.get("/v2"))
        assert ours - {"generate"} <= theirs
        assert theirs - ours >= {"sequence", "classification", "system_shared_memory", "trace", "logging"}

    @pytest.mark.parametrize("path", ["/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status"])
    def test_routes_that_are_not_offered(self, tuned: Pair, path: str) -> None:
        assert statuses(tuned.get(path)) == (404, 200)

    @pytest.mark.parametrize(("datatype", "value", "became"), [("INT8", 128, -128), ("FP32", 1e39, float("inf"))])
    def test_numbers_out_of_range(self, mirror: Pair, datatype: str, value: float, became: float) -> None:
        answers = mirror.infer(ROW, as_given(datatype, [1, 1], [value]), outputs=[output(f"out_{datatype.lower()}")])
        assert statuses(answers) == (400, 200)
        assert answers[1].json()["outputs"][0]["data"] == [became]

    @pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity"])
    def test_nan_and_infinity_in_json_inputs(self, tuned: Pair, literal: bytes) -> None:
        assert statuses(tuned.post(_body(x(1)).replace(b"[1]", b"[%b]" % literal))) == (400, 200)

    def test_a_required_input_that_is_missing_beside_an_optional_one(self, mirror: Pair) -> None:
        answers = mirror.infer(as_given("FP32", [1, 1], [1]), outputs=[output("out_fp32")])
        assert statuses(answers) == (400, 200)

    @pytest.mark.parametrize("data", [[[1], [2]], [[[1, 2]]]])
    def test_nesting_that_contradicts_the_shape(self, tuned: Pair, data: Any) -> None:
        assert statuses(tuned.infer(x(shape=[1, 2], data=data))) == (400, 200)

    def test_bool_bytes_other_than_0_and_1(self, mirror: Pair) -> None:
        answers = mirror.infer(ROW, as_given("BOOL", [1, 1], b"\2"), outputs=[output("out_bool", binary=True)])
        assert statuses(answers) == (400, 200)
        assert answers[1].content.endswith(b"\2")

    def test_an_output_asked_for_twice(self, tuned: Pair) -> None:
        assert statuses(tuned.infer(x(1), outputs=[output("y"), output("y")])) == (400, 200)

    def test_bytes_that_are_no_text_in_json_outputs(self, mirror: Pair) -> None:
        data = pack_bytes([b"\xff"])
        ours, theirs = mirror.infer(ROW, as_given("BYTES", [1, 1], data), outputs=[output("out_bytes")])
        assert (ours.status_code, theirs.status_code) == (400, 200)
        with pytest.raises(UnicodeDecodeError):
            theirs.content.decode()

    def test_ids_of_more_than_1000_characters(self, tuned: Pair) -> None:
        assert statuses(tuned.infer(x(1), id="x" * 1001)) == (400, 200)

    @pytest.mark.parametrize(
        "headers",
        [
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://elsewhere"},
            {"Origin": "http://elsewhere"},
        ],
    )
    def test_content_types(self, tuned: Pair, headers: dict[str, str]) -> None:
        assert statuses(tuned.post(_body(x(1)), headers)) == (415, 200)

    def test_raw_requests_without_json(self, tuned: Pair) -> None:
        assert statuses(tuned.post(struct.pack("<2f", 1, 2), {HEADER: "0"})) == (400, 200)
        assert statuses(tuned.post(b"")) == (400, 200)

    @pytest.mark.parametrize("damage", ["none of it", "cut short", "followed by more"])
    def test_damaged_compressed_bodies(self, tuned: Pair, damage: str) -> None:
        packed = gzip.compress(_body(x(1)))
        body = {"none of it": b"abc", "cut short": packed[:-5], "followed by more": packed + packed}[damage]
        assert statuses(tuned.post(body, {"Content-Encoding": "gzip"})) == (400, 200)

    # What is taken here and refused, or spoiled, there.

    def test_integers_written_as_floats(self, mirror: Pair) -> None:
        answers = mirror.infer(ROW, as_given("INT64", [1, 2], [1.0, 2e3]), outputs=[output("out_int64")])
        assert statuses(answers) == (200, 500)
        assert answers[0].json()["outputs"][0]["data"] == [1, 2000]

    def test_the_root_with_a_slash(self, tuned: Pair) -> None:
        assert tuned.get("/v2/")[1].status_code == 404
        assert tuned.get("/v2/")[0].json() == tuned.get("/v2")[0].json()

    def test_a_repeated_model_name(self, tuned: Pair) -> None:
        assert statuses(tuned.infer(x(1), model_name="tuned")) == (200, 200)
        assert statuses(tuned.infer(x(1), model_name="other")) == (400, 200)

    def test_more_rows_than_max_batch_size(self, mirror: Pair) -> None:
        data = list(range(3 * MAX_ROWS))
        answers = mirror.infer(as_given("INT32", [len(data), 1], data), outputs=[output("out_int32")])
        assert statuses(answers) == (200, 400)
        assert answers[0].json()["outputs"][0]["data"] == data

    def test_requests_without_rows(self, mirror: Pair) -> None:
        answers = mirror.infer(as_given("INT32", [0, 1], []), outputs=[output("out_int32")])
        assert statuses(answers) == (200, 400)
        assert answers[0].json()["outputs"][0]["data"] == []

    def test_tensors_without_elements(self, mirror: Pair) -> None:
        ours, theirs = mirror.infer(ROW, as_given("FP32", [1, 0], []), outputs=[output("out_fp32")])
        assert ours.json()["outputs"][0]["shape"] == [1, 0]
        assert theirs.json()["outputs"][0]["shape"] == [1, 1]

    def test_bf16_under_its_own_name(self, mirror: Pair) -> None:
        wanted = [output("out_bf16", binary=True)]
        assert statuses(mirror.infer(ROW, as_given("BF16", [1, 1], b"\x80\x3f"), outputs=wanted)) == (200, 400)
        as_bits = as_given("BF16", [1, 1], b"\x80\x3f") | {"datatype": "UINT16"}
        assert statuses(mirror.infer(ROW, as_bits, outputs=wanted)) == (400, 200)
        ours, _ = mirror.infer(ROW, as_given("BF16", [1, 1], b"\x80\x3f"), outputs=wanted)
        _, theirs = mirror.infer(ROW, as_bits, outputs=wanted)
        assert outputs_of(ours) == {"out_bf16": ("BF16", [1, 1], b"\x80\x3f")}
        assert outputs_of(theirs) == {"out_bf16": ("UINT16", [1, 1], b"\x80\x3f")}

    def test_content_encoding_in_capitals(self, tuned: Pair) -> None:
        packed = gzip.compress(_body(x(1)))
        assert statuses(tuned.post(packed, {"Content-Encoding": "GZIP"})) == (200, 501)

    def test_timeouts_while_computing(self, pair_of: MakePair) -> None:
        answers = pair_of("slow").infer(x(0.3), parameters={"timeout": 20_000}, outputs=[output("y")])
        assert statuses(answers) == (504, 200)

    # What both answer, and how.

    @pytest.mark.parametrize(
        "body",
        [
            b"{",
            b"[]",
            b"{}",
            _body(x(data=["1"], shape=[1, 1])),
            _body(x(data=[True], shape=[1, 1])),
            _body(x(data=None, shape=[1, 1])),
            _body(x(1, shape=[1, 3])),
            _body(x(1, shape=[1, -1])),
            _body(x(1, shape=["1", 1])),
            _body(x(1), id=5),
            _body(x(1), parameters={"timeout": "1"}),
            _body(x(1)).replace(b"[1]", b"[1e400]"),
        ],
    )
    def test_malformed_json(self, tuned: Pair, body: bytes) -> None:
        assert statuses(tuned.post(body)) == (400, 500)

    @pytest.mark.parametrize(
        ("datatype", "value"), [("BOOL", 1), ("BOOL", "true"), ("INT64", 1.5), ("INT64", "1"), ("BYTES", 1)]
    )
    def test_elements_of_another_type(self, mirror: Pair, datatype: str, value: object) -> None:
        answers = mirror.infer(ROW, as_given(datatype, [1, 1], [value]), outputs=[output("out_int32")])
        assert statuses(answers) == (400, 500)

    def test_unknown_content_encodings(self, tuned: Pair) -> None:
        assert statuses(tuned.post(b"abc", {"Content-Encoding": "br"})) == (415, 501)

    def test_readiness_of_an_unknown_model(self, tuned: Pair) -> None:
        assert statuses(tuned.get("/v2/models/nope/ready")) == (404, 400)

    def test_errors_of_the_callable_and_the_hidden_report(self, pair_of: MakePair) -> None:
        ours, theirs = pair_of("faulty").infer(x(-1))
        assert (ours.status_code, ours.json()["error"]) == (500, "ValueError: poison")
        assert REPORT in outputs_of(theirs)
        assert statuses(pair_of("tuned").infer(x(1), outputs=[output(REPORT)])) == (400, 200)

    def test_generate_with_an_unknown_field(self, tuned: Pair) -> None:
        assert statuses(tuned.generate(x=1, volume=3)) == (400, 200)

    def test_generate_with_too_many_elements(self, pair_of: MakePair) -> None:
        ours, theirs = pair_of("specials").generate(x=[1, 2])
        assert (ours.status_code, theirs.status_code) == (400, 200)
        assert len(theirs.json()["y"]) == 8  # of two rows

    def test_generate_with_nested_arrays(self, pair_of: MakePair) -> None:
        assert statuses(pair_of("matrix").generate(m=[[1, 2, 3], [4, 5, 6]])) == (200, 400)

    def test_generate_with_values_of_another_type(self, tuned: Pair) -> None:
        assert statuses(tuned.generate(x="1")) == (400, 500)

    def test_the_end_of_generate_stream(self, tuned: Pair) -> None:
        ours, theirs = (answer.text.split("\n\n") for answer in tuned.generate("generate_stream", x=1))
        assert len(theirs) == 2
        assert theirs[-1] == ours[-1] == ""
        assert json.loads(ours[1].removeprefix("data: "))["final"] is True

    def test_the_order_of_outputs(self, tuned: Pair) -> None:
        ours, theirs = tuned.infer(x(1), outputs=[output("batch"), output("y")])
        assert [item["name"] for item in ours.json()["outputs"]] == ["batch", "y"]
        assert [item["name"] for item in theirs.json()["outputs"]] == ["y", "batch"]

    def test_a_null_character_in_an_id(self, tuned: Pair) -> None:
        ours, theirs = tuned.infer(x(1), id="ab\0c")
        assert (ours.json()["id"], theirs.json()["id"]) == ("ab\0c", "ab")

    def test_how_floats_are_written(self, mirror: Pair) -> None:
        ours, theirs = mirror.infer(ROW, as_given("FP32", [1, 1], [0.1]), outputs=[output("out_fp32")])
        assert b"[0.1]" in ours.content
        assert b"[0.10000000149011612]" in theirs.content

    def test_how_doubles_are_read(self, mirror: Pair) -> None:
        values = np.random.default_rng(0).standard_normal(500).tolist()
        ours, theirs = mirror.infer(ROW, as_given("FP64", [1, 500], values), outputs=[output("out_fp64")])
        assert ours.json()["outputs"][0]["data"] == values
        off = np.array(theirs.json()["outputs"][0]["data"]) - values
        assert 0 < np.abs(off / np.spacing(values)).max() <= 3

    def test_compressed_responses(self, tuned: Pair) -> None:
        body = _body(x(1))
        ours, theirs = tuned.post(body, {"Accept-Encoding": "gzip"})
        assert "content-encoding" not in ours.headers
        assert theirs.headers["content-encoding"] == "gzip"
        same((ours, theirs))

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v2/health/live", {"live": True}),
            ("/v2/health/ready", {"ready": True}),
            ("/v2/models/tuned/ready", {"name": "tuned", "ready": True}),
        ],
    )
    def test_bodies_of_health(self, tuned: Pair, path: str, body: Json) -> None:
        ours, theirs = tuned.get(path)
        assert (ours.status_code, ours.json()) == (theirs.status_code, body) == (200, body)
        assert theirs.content == b""

    def test_the_servers_name(self, tuned: Pair) -> None:
        assert [answer.json()["name"] for answer in tuned.get("/v2")] == ["headwater", "triton"]

    def test_the_extensions_listed(self, tuned: Pair) -> None:
        ours, theirs = (set(answer.json()["extensions"]) for answer in tuned.get("/v2"))
        assert ours - theirs == {"generate"}

    def test_configuration_that_is_left_out(self, tuned: Pair) -> None:
        ours, theirs = (answer.json() for answer in tuned.get("/v2/models/tuned/config"))
        assert theirs.keys() - ours.keys() >= {"version_policy", "optimization"}
        assert set(ours["parameters"]) == {"factor", "offset", "mode"}

    def test_statistics_that_are_left_out(self, tuned: Pair) -> None:
        same(tuned.infer(x(1, 2)))
        ours, theirs = (answer.json()["model_stats"][0] for answer in tuned.get("/v2/models/tuned/stats"))
        assert theirs.keys() - ours.keys() == {"last_inference", "response_stats", "memory_usage"}
        assert ours["batch_stats"][0].keys() <= theirs["batch_stats"][0].keys()

    def test_the_repository_index(self, tuned: Pair) -> None:
        ours, theirs = (client.post("/v2/repository/index").json() for client in (tuned.gateway, tuned.triton))
        assert [model["name"] for model in theirs] == ["tuned"]
        assert {"mirror", "tuned"} <= {model["name"] for model in ours}
        assert statuses(tuned.get("/v2/repository/index")) == (200, 405)


def test_every_difference_is_in_the_table_and_has_a_test() -> None:
    listed = re.findall(r"^\|.*\| `(test_\w+)` \|$", COMPATIBILITY.read_text(), re.MULTILINE)
    written = [name for name, _ in inspect.getmembers(TestDifferences, inspect.isfunction) if name.startswith("test_")]
    assert sorted(listed) == sorted(written)
