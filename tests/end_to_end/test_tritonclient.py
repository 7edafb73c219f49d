"""The unmodified ``tritonclient.http``, sync and aio, against the gateway."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

import headwater_server
from tests.running import Running

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[..., Any]
"""Calls a method of a client by name: ``call("is_server_live")``."""

MAX_BODY_BYTES = 20_000_000
"""As the services' configuration says."""

VALUES: dict[str, Array] = {
    "BOOL": np.array([[True, False], [False, True]]),
    "UINT8": np.array([[0, 255], [1, 128]], np.uint8),
    "UINT16": np.array([[0, 65535], [1, 256]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1], [1, 65536]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1], [1, 2**53 + 1]], np.uint64),
    "INT8": np.array([[-128, 127], [0, -1]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1], [0, -1]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1], [0, -1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1], [0, -(2**53) - 1]], np.int64),
    "FP16": np.array([[0.1, -65504], [6e-8, -0.0]], np.float16),
    "BF16": np.array([[0.1, -3.3895314e38], [1e-40, -0.0]], ml_dtypes.bfloat16),
    "FP32": np.array([[0.1, -3.4028235e38], [1e-45, -0.0]], np.float32),
    "FP64": np.array([[0.1, -1.7976931348623157e308], [5e-324, -0.0]], np.float64),
    "BYTES": np.array([["grün\0".encode(), b""], [b"tab\t", "\U0001f600".encode()]], object),
}
IN_JSON = [name for name in VALUES if name not in ("FP16", "BF16")]
NOT_FINITE = np.array([[np.nan, np.inf], [-np.inf, 1]])
NO_TEXT = np.array([[b"\xff\xfe\0", bytes(range(256))]], object)


@pytest.fixture(scope="module", params=["sync", "aio"])
def call(request: pytest.FixtureRequest, services: Running) -> Iterator[Call]:
    """Either client."""
    address = services.url.removeprefix("http://")
    if request.param == "sync":
        with tritonclient.http.InferenceServerClient(address) as client:
            yield lambda method, *args, **options: getattr(client, method)(*args, **options)
        return
    loop = asyncio.new_event_loop()

    async def connect() -> Any:
        return tritonclient.http.aio.InferenceServerClient(address)

    aio = loop.run_until_complete(connect())
    yield lambda method, *args, **options: loop.run_until_complete(getattr(aio, method)(*args, **options))
    loop.run_until_complete(aio.close())
    loop.close()


def given(name: str, array: Array, datatype: str, *, binary: bool = True) -> tritonclient.http.InferInput:
    """One input."""
    tensor = tritonclient.http.InferInput(name, list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


def wanted(*names: str, binary: bool = True) -> list[tritonclient.http.InferRequestedOutput]:
    """Some outputs."""
    return [tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in names]


def mirrored(datatype: str, array: Array, *, binary: bool = True) -> list[tritonclient.http.InferInput]:
    """Inputs for `mirror`, which needs ``in_int32`` in any case."""
    inputs = [given(f"in_{datatype.lower()}", array, datatype, binary=binary)]
    if datatype != "INT32":
        inputs.append(given("in_int32", np.zeros((len(array), 1), np.int32), "INT32"))
    return inputs


def x(*values: float) -> list[tritonclient.http.InferInput]:
    """One row of a model whose input is ``x``."""
    return [given("x", np.array([values], np.float32), "FP32")]


def as_strings(array: Array) -> Array:
    """What the client makes of BYTES in JSON."""
    return np.array([element.decode() for element in array.ravel()], object).reshape(array.shape)


def same_bits(got: Array | None, expected: Array) -> bool:
    assert got is not None
    if expected.dtype.hasobject:
        return got.shape == expected.shape and got.ravel().tolist() == expected.ravel().tolist()
    return (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def refused(status: int, call: Call, *args: Any, **options: Any) -> str:
    """The message of an error of that status."""
    with pytest.raises(InferenceServerException) as caught:
        call("infer", *args, **options)
    assert caught.value.status() == str(status)
    return str(caught.value.message())


class TestHealthAndMetadata:
    def test_the_server_is_live_and_ready(self, call: Call) -> None:
        assert call("is_server_live") is True
        assert call("is_server_ready") is True

    @pytest.mark.parametrize(
        ("model", "version", "ready"),
        [("mirror", "", True), ("mirror", "1", True), ("mirror", "2", False), ("no", "", False)],
    )
    def test_whether_a_model_is_ready(self, call: Call, model: str, version: str, ready: bool) -> None:
        assert call("is_model_ready", model, version) is ready

    def test_server_metadata(self, call: Call) -> None:
        metadata = call("get_server_metadata")
        assert (metadata["name"], metadata["version"]) == ("headwater", headwater_server.__version__)
        assert "binary_tensor_data" in metadata["extensions"]

    @pytest.mark.parametrize("version", ["", "1"])
    def test_model_metadata(self, call: Call, version: str) -> None:
        assert call("get_model_metadata", "matrix", version) == {
            "name": "matrix",
            "versions": ["1"],
            "platform": "python",
            "inputs": [{"name": "m", "datatype": "FP32", "shape": [-1, -1, 3]}],
            "outputs": [{"name": "sum", "datatype": "FP32", "shape": [-1, 3]}],
        }

    @pytest.mark.parametrize(("model", "version"), [("no", ""), ("matrix", "2")])
    @pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
    def test_of_what_is_not_there(self, call: Call, method: str, model: str, version: str) -> None:
        with pytest.raises(InferenceServerException) as caught:
            call(method, model, version)
        assert caught.value.status() == "404"
        assert f"'{version or model}'" in caught.value.message()

    def test_model_config(self, call: Call) -> None:
        config = call("get_model_config", "mirror")
        assert (config["name"], config["backend"], config["max_batch_size"]) == ("mirror", "python", 8)
        types = {tensor["name"]: tensor["data_type"] for tensor in config["input"]}
        assert types["in_bf16"] == "TYPE_BF16"
        assert types["in_bytes"] == "TYPE_STRING"
        assert [tensor["name"] for tensor in config["input"] if not tensor["optional"]] == ["in_int32"]

    def test_the_repository_index_lists_every_model(self, call: Call) -> None:
        index = call("get_model_repository_index")
        assert {"mirror", "tuned"} <= {model["name"] for model in index}
        assert {(model["version"], model["state"]) for model in index} == {("1", "READY")}

    @pytest.mark.parametrize(
        ("config", "status", "told"),
        [
            ('{"timeout_s": 3}', "409", "model `mirror` is READY: it is already loaded; expected reload"),
            ('{"timeout_s": 0}', "400", "`deployments.mirror.timeout_s`: input should be greater than 0, got 0"),
            ('{"backend": "python"}', "400", "`deployments.mirror.backend`: unknown field"),
            ('{"model": "typed:Matrix"}', "403", "server.allow_load is settings"),
        ],
    )
    def test_a_load_with_a_config(self, call: Call, config: str, status: str, told: str) -> None:
        with pytest.raises(InferenceServerException) as caught:
            call("load_model", "mirror", config=config)
        assert (caught.value.status(), told in caught.value.message()) == (status, True), caught.value

    def test_a_load_with_a_file(self, call: Call) -> None:
        with pytest.raises(InferenceServerException, match=r"file:1/model\.py: not supported"):
            call("load_model", "mirror", config="{}", files={"file:1/model.py": b"import os"})

    def test_inference_statistics_count_requests_and_rows(self, call: Call) -> None:
        def counts() -> tuple[int, int, int]:
            (model,) = call("get_inference_statistics", "matrix")["model_stats"]
            success = model["inference_stats"]["success"]["count"]
            return model["inference_count"], model["execution_count"], success

        rows, calls, requests = counts()
        call("infer", "matrix", [given("m", np.ones((5, 2, 3), np.float32), "FP32")])
        assert counts() == (rows + 5, calls + 1, requests + 1)

    def test_inference_statistics_of_all_models(self, call: Call) -> None:
        names = {model["name"] for model in call("get_inference_statistics")["model_stats"]}
        assert {"mirror", "tuned"} <= names


class TestDatatypes:
    @pytest.mark.parametrize("datatype", VALUES)
    def test_binary_both_ways(self, call: Call, datatype: str) -> None:
        array = VALUES[datatype]
        output = f"out_{datatype.lower()}"
        result = call("infer", "mirror", mirrored(datatype, array), outputs=wanted(output))
        assert result.get_output(output)["datatype"] == datatype
        assert same_bits(result.as_numpy(output), array)

    @pytest.mark.parametrize("datatype", IN_JSON)
    def test_json_both_ways(self, call: Call, datatype: str) -> None:
        array = VALUES[datatype]
        output = f"out_{datatype.lower()}"
        inputs = mirrored(datatype, array, binary=False)
        got = call("infer", "mirror", inputs, outputs=wanted(output, binary=False)).as_numpy(output)
        assert same_bits(got, as_strings(array) if datatype == "BYTES" else array)

    @pytest.mark.parametrize("way", ["binary in, JSON out", "JSON in, binary out"])
    @pytest.mark.parametrize("datatype", IN_JSON)
    def test_one_form_in_and_the_other_out(self, call: Call, datatype: str, way: str) -> None:
        array = VALUES[datatype]
        output = f"out_{datatype.lower()}"
        binary = way.startswith("binary")
        inputs = mirrored(datatype, array, binary=binary)
        got = call("infer", "mirror", inputs, outputs=wanted(output, binary=not binary)).as_numpy(output)
        assert same_bits(got, as_strings(array) if datatype == "BYTES" and binary else array)

    def test_both_forms_in_one_request(self, call: Call) -> None:
        inputs = [
            given("in_fp32", VALUES["FP32"], "FP32", binary=False),
            given("in_bytes", VALUES["BYTES"], "BYTES"),
            given("in_int32", VALUES["INT32"], "INT32", binary=False),
            given("in_uint64", VALUES["UINT64"], "UINT64"),
        ]
        outputs = [
            *wanted("out_uint64", "out_int32"),
            *wanted("out_fp32", binary=False),
            *wanted("out_bytes"),
        ]
        result = call("infer", "mirror", inputs, outputs=outputs)
        for datatype in ("FP32", "BYTES", "INT32", "UINT64"):
            assert same_bits(result.as_numpy(f"out_{datatype.lower()}"), VALUES[datatype])

    def test_all_at_once_and_all_outputs(self, call: Call) -> None:
        inputs = [given(f"in_{name.lower()}", array, name) for name, array in VALUES.items()]
        result = call("infer", "mirror", inputs)
        for datatype, array in VALUES.items():
            assert same_bits(result.as_numpy(f"out_{datatype.lower()}"), array)

    def test_bytes_that_are_no_text(self, call: Call) -> None:
        result = call("infer", "mirror", mirrored("BYTES", NO_TEXT), outputs=wanted("out_bytes"))
        assert same_bits(result.as_numpy("out_bytes"), NO_TEXT)

    def test_more_rows_than_max_batch_size(self, call: Call) -> None:
        array = np.arange(40, dtype=np.int32).reshape(20, 2)
        result = call("infer", "mirror", mirrored("INT32", array), outputs=wanted("out_int32"))
        assert same_bits(result.as_numpy("out_int32"), array)

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_outputs_without_a_json_form(self, call: Call, datatype: str) -> None:
        output = f"out_{datatype.lower()}"
        inputs = mirrored(datatype, VALUES[datatype])
        message = refused(400, call, "mirror", inputs, outputs=wanted(output, binary=False))
        assert f"'{output}'" in message
        assert f"got {datatype}; ask for binary data" in message

    def test_an_input_without_a_json_form(self, call: Call) -> None:
        inputs = mirrored("FP16", VALUES["FP16"], binary=False)
        message = refused(400, call, "mirror", inputs, outputs=wanted("out_fp16"))
        assert "'in_fp16'" in message
        assert "FP16 has no JSON form" in message

    def test_an_output_that_is_no_text_in_json(self, call: Call) -> None:
        inputs = mirrored("BYTES", NO_TEXT)
        message = refused(400, call, "mirror", inputs, outputs=wanted("out_bytes", binary=False))
        assert "'out_bytes'" in message
        assert "got byte 0xff; ask /infer for binary data" in message


class TestEmptyTensors:
    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
    @pytest.mark.parametrize("datatype", IN_JSON)
    def test_no_rows(self, call: Call, datatype: str, binary: bool) -> None:
        output = f"out_{datatype.lower()}"
        inputs = mirrored(datatype, VALUES[datatype][:0], binary=binary)
        got = call("infer", "mirror", inputs, outputs=wanted(output, binary=binary)).as_numpy(output)
        assert (len(got), got.dtype) == (0, VALUES[datatype].dtype)

    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
    @pytest.mark.parametrize("datatype", IN_JSON)
    def test_rows_of_no_elements(self, call: Call, datatype: str, binary: bool) -> None:
        output = f"out_{datatype.lower()}"
        inputs = mirrored(datatype, VALUES[datatype][:, :0], binary=binary)
        got = call("infer", "mirror", inputs, outputs=wanted(output, binary=binary)).as_numpy(output)
        assert (got.shape, got.dtype) == ((2, 0), VALUES[datatype].dtype)

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    @pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
    def test_in_binary_only(self, call: Call, datatype: str, shape: tuple[int, int]) -> None:
        output = f"out_{datatype.lower()}"
        inputs = mirrored(datatype, np.empty(shape, VALUES[datatype].dtype))
        got = call("infer", "mirror", inputs, outputs=wanted(output)).as_numpy(output)
        assert (len(got), got.size, got.dtype) == (shape[0], 0, VALUES[datatype].dtype)

    def test_the_model_is_called_with_the_true_shape(self, call: Call) -> None:
        result = call("infer", "matrix", [given("m", np.empty((2, 0, 3), np.float32), "FP32")])
        assert same_bits(result.as_numpy("sum"), np.zeros((2, 3), np.float32))

    def test_beside_one_that_is_not(self, call: Call) -> None:
        inputs = [*mirrored("FP32", np.empty((2, 0), np.float32)), given("in_bytes", VALUES["BYTES"], "BYTES")]
        result = call("infer", "mirror", inputs, outputs=wanted("out_fp32", "out_bytes"))
        assert result.as_numpy("out_fp32").shape == (2, 0)
        assert same_bits(result.as_numpy("out_bytes"), VALUES["BYTES"])


class TestNotFinite:
    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
    def test_in_outputs(self, call: Call, binary: bool) -> None:
        got = call("infer", "specials", x(0), outputs=wanted("y", binary=binary)).as_numpy("y")
        assert np.array_equal(got, np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32), equal_nan=True)

    @pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
    def test_in_binary_inputs(self, call: Call, datatype: str) -> None:
        array = NOT_FINITE.astype(VALUES[datatype].dtype)
        output = f"out_{datatype.lower()}"
        got = call("infer", "mirror", mirrored(datatype, array), outputs=wanted(output)).as_numpy(output)
        assert np.array_equal(got.astype(np.float64), NOT_FINITE, equal_nan=True)

    def test_in_json_inputs_they_are_refused(self, call: Call) -> None:
        inputs = mirrored("FP32", NOT_FINITE.astype(np.float32), binary=False)
        message = refused(400, call, "mirror", inputs, outputs=wanted("out_fp32"))
        assert "'in_fp32'" in message
        assert "NaN or Infinity" in message
        assert "binary data" in message


class TestCompression:
    @pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
    def test_requests(self, call: Call, algorithm: str, binary: bool) -> None:
        array = np.arange(60_000, dtype=np.int32).reshape(6, -1)
        inputs = mirrored("INT32", array, binary=binary)
        result = call("infer", "mirror", inputs, outputs=wanted("out_int32"), request_compression_algorithm=algorithm)
        assert same_bits(result.as_numpy("out_int32"), array)

    @pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
    def test_a_client_that_would_take_compressed_responses(self, call: Call, algorithm: str) -> None:
        result = call("infer", "tuned", x(1, 2), response_compression_algorithm=algorithm)
        assert result.as_numpy("y").tolist() == [[2, 4]]

    @pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
    def test_a_body_that_unpacks_to_more_than_the_limit(self, call: Call, algorithm: str) -> None:
        inputs = [given("x", np.zeros((1, MAX_BODY_BYTES // 4), np.float32), "FP32")]
        message = refused(413, call, "tuned", inputs, request_compression_algorithm=algorithm)
        assert f"at most {MAX_BODY_BYTES} bytes (server.max_body_bytes)" in message

    @pytest.mark.parametrize(("encoding", "window_bits"), [("gzip", 31), ("deflate", 15)])
    def test_a_bomb_is_refused_in_bounded_memory(self, services: Running, encoding: str, window_bits: int) -> None:
        bomb = _bomb(window_bits, 30 * MAX_BODY_BYTES)
        assert len(bomb) < MAX_BODY_BYTES / 10
        (worker,) = services.workers()
        url = f"{services.url}/v2/models/tuned/infer"
        before = _reset_peak(worker)
        answer = httpx.post(url, content=bomb, headers={"Content-Encoding": encoding}, timeout=60)
        assert answer.status_code == 413
        assert _resident_bytes(worker, "VmHWM") - before < 1.25 * MAX_BODY_BYTES


class TestRequests:
    def test_the_id_comes_back(self, call: Call) -> None:
        assert call("infer", "tuned", x(1), request_id="abc-1").get_response()["id"] == "abc-1"

    def test_without_an_id_there_is_none(self, call: Call) -> None:
        assert "id" not in call("infer", "tuned", x(1)).get_response()

    @pytest.mark.parametrize("version", ["", "1"])
    def test_the_model_is_named_with_its_version(self, call: Call, version: str) -> None:
        response = call("infer", "tuned", x(1), model_version=version).get_response()
        assert (response["model_name"], response["model_version"]) == ("tuned", "1")

    def test_another_version(self, call: Call) -> None:
        assert "expected '1', got '2'" in refused(404, call, "tuned", x(1), model_version="2")

    def test_an_unknown_model(self, call: Call) -> None:
        assert "model 'nope': unknown" in refused(404, call, "nope", x(1))

    def test_only_the_outputs_asked_for_in_the_order_asked(self, call: Call) -> None:
        def names(*asked: str) -> list[str]:
            outputs = call("infer", "tuned", x(1), outputs=wanted(*asked)).get_response()["outputs"]
            return [output["name"] for output in outputs]

        assert names("batch") == ["batch"]
        assert names("batch", "y") == ["batch", "y"]
        assert names("y", "batch") == ["y", "batch"]

    def test_parameters(self, call: Call) -> None:
        result = call("infer", "tuned", x(1, 2), parameters={"factor": 3.0, "offset": 4, "mode": "negated"})
        assert result.as_numpy("y").tolist() == [[1, -2]]

    def test_parameters_have_defaults(self, call: Call) -> None:
        assert call("infer", "tuned", x(1, 2)).as_numpy("y").tolist() == [[2, 4]]

    @pytest.mark.parametrize(
        ("parameters", "said"),
        [
            ({"factor": "3"}, "parameters.factor: expected float, got '3'"),
            ({"factor": 101.0}, "parameters.factor: expected at most 100"),
            ({"mode": "loud"}, "parameters.mode: expected one of 'plain', 'negated', got 'loud'"),
            ({"volume": 3}, "parameters.volume: expected one of the parameters factor, offset, mode"),
        ],
    )
    def test_wrong_parameters(self, call: Call, parameters: dict[str, Any], said: str) -> None:
        assert said in refused(400, call, "tuned", x(1), parameters=parameters)

    def test_a_priority_and_a_timeout_in_microseconds(self, call: Call) -> None:
        result = call("infer", "tuned", x(1), priority=1, timeout=30_000_000)
        assert result.as_numpy("y").tolist() == [[2]]

    def test_a_timeout_that_passes(self, call: Call) -> None:
        assert "the deadline of 0.05 s passed" in refused(504, call, "slow", x(0.3), timeout=50_000)

    def test_sequences_are_not_ignored(self, call: Call) -> None:
        assert "sequence_id: not supported" in refused(400, call, "tuned", x(1), sequence_id=7, sequence_start=True)

    def test_classification_is_not_ignored(self, call: Call) -> None:
        outputs = [tritonclient.http.InferRequestedOutput("y", class_count=2)]
        message = refused(400, call, "tuned", x(1), outputs=outputs)
        assert "outputs[0].parameters.classification" in message
        assert "not supported" in message

    def test_shared_memory_is_not_ignored(self, call: Call) -> None:
        tensor = tritonclient.http.InferInput("x", [1, 1], "FP32").set_shared_memory("region", 4)
        message = refused(400, call, "tuned", [tensor])
        assert "inputs[0].parameters.shared_memory_region" in message
        assert "not supported" in message

    def test_an_error_of_the_callable(self, call: Call) -> None:
        assert refused(500, call, "faulty", x(-1)) == "ValueError: poison"


class TestManyAtOnce:
    def test_async_infer(self, services: Running) -> None:
        address = services.url.removeprefix("http://")
        with tritonclient.http.InferenceServerClient(address, concurrency=8) as client:
            pending = [client.async_infer("tuned", x(number), request_id=str(number)) for number in range(40)]
            results = [request.get_result(timeout=30) for request in pending]
        assert [result.as_numpy("y").tolist() for result in results] == [[[2 * number]] for number in range(40)]
        assert [result.get_response()["id"] for result in results] == [str(number) for number in range(40)]

    def test_an_error_of_async_infer(self, services: Running) -> None:
        address = services.url.removeprefix("http://")
        with tritonclient.http.InferenceServerClient(address, concurrency=2) as client:
            bad = client.async_infer("faulty", x(-1))
            good = client.async_infer("faulty", x(1))
            assert good.get_result(timeout=30).as_numpy("y").tolist() == [[2]]
            with pytest.raises(InferenceServerException, match="poison"):
                bad.get_result(timeout=30)

    def test_aio(self, services: Running) -> None:
        async def infer_all() -> list[Any]:
            address = services.url.removeprefix("http://")
            async with tritonclient.http.aio.InferenceServerClient(address) as client:
                results = await asyncio.gather(*[client.infer("tuned", x(number)) for number in range(40)])
                return [result.as_numpy("y").tolist() for result in results]

        assert asyncio.run(infer_all()) == [[[2 * number]] for number in range(40)]


def test_the_clients_own_request_body_helpers_work(services: Running) -> None:
    body, json_length = tritonclient.http.InferenceServerClient.generate_request_body(x(1, 2))
    headers = {"Inference-Header-Content-Length": str(json_length)}
    answer = httpx.post(f"{services.url}/v2/models/tuned/infer", content=body, headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:length])["model_name"] == "tuned"
    result = tritonclient.http.InferenceServerClient.parse_response_body(answer.content, header_length=length)
    assert result.as_numpy("y").tolist() == [[2, 4]]


def _bomb(window_bits: int, size_bytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, window_bits)
    piece = bytes(1 << 20)
    pieces = [packer.compress(piece) for _ in range(size_bytes // len(piece))]
    return b"".join([*pieces, packer.flush()])


def _reset_peak(pid: int) -> int:
    """Start the process's peak of resident memory anew; returns what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _resident_bytes(pid, "VmRSS")


def _resident_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(value) * 1024
