"""What Triton's own tests of its HTTP (qa/L0_http) check, and what other HTTP clients do by default.

What those tests check and this server does otherwise is in docs/compatibility.md.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.running import Running, leftovers, segments_of, serve

BOTH = pytest.mark.parametrize("route", ["generate", "generate_stream"])
MAX_BODY_BYTES = 1_000_000
JSON = "application/json"
CURL = shutil.which("curl")
JAVA = shutil.which("java")
JAVAC = shutil.which("javac")
NEEDS_CURL = pytest.mark.skipif(CURL is None, reason="curl is not installed")
NEEDS_JAVA = pytest.mark.skipif(JAVA is None or JAVAC is None, reason="no JDK is installed")


@pytest.fixture(scope="module")
def triton() -> Iterator[Running]:
    """A server with the models that Triton's tests ask."""
    deployments = {"mock_llm": {"model": "mock_llm:MockLlm"}, "simple": {"model": "typed:Tuned"}}
    with serve({"deployments": deployments, "server": {"max_body_bytes": MAX_BODY_BYTES}}) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def ask(running: Running, route: str, body: dict[str, Any] | str) -> httpx.Response:
    """One request, as `requests` sends one: without a content type."""
    content = body if isinstance(body, str) else json.dumps(body)
    return running.client.post(f"{running.url}/v2/models/mock_llm/{route}", content=content.encode())


def tensor(elements: int, fields: str = "") -> str:
    """A request for `simple` in JSON."""
    data = ",".join(["1"] * elements)
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,{elements}],"data":[{data}]}}]{fields}}}'


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events, without the end that Triton does not send."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    *events, end = (json.loads(block.removeprefix("data: ")) for block in blocks)
    assert end["final"] is True
    return events


def refused(answer: httpx.Response, said: str, status: int = 400) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, JSON)
    assert said in answer.json()["error"]


# generate_endpoint_test.py


@pytest.mark.parametrize("more", [{}, {"input_ids": [100, 200]}, {"param": "x"}])
def test_one_result_of_a_model_that_streams(triton: Running, more: dict[str, Any]) -> None:
    for is_stream in (True, False):
        body = {"PROMPT": "hello world", "STREAM": is_stream, **more}
        answer = ask(triton, "generate", body)
        assert (answer.status_code, answer.headers["content-type"]) == (200, JSON)
        assert answer.json() == {"model_name": "mock_llm", "model_version": "1", "TEXT": "hello world"}
        assert events_of(ask(triton, "generate_stream", body)) == [answer.json()]


def test_request_ids(triton: Running) -> None:
    body = {"PROMPT": "a", "STREAM": False}
    assert ask(triton, "generate", {**body, "id": "42"}).json()["id"] == "42"
    assert events_of(ask(triton, "generate_stream", {**body, "id": "42"}))[0]["id"] == "42"
    for absent in ({}, {"id": ""}):
        assert "id" not in ask(triton, "generate", {**body, **absent}).json()


@pytest.mark.parametrize("where", [{"REPETITION": 3}, {"parameters": {"REPETITION": 3}}])
def test_several_results(triton: Running, where: dict[str, Any]) -> None:
    body = {"PROMPT": ["hello"], "STREAM": True, **where}
    assert [event["TEXT"] for event in events_of(ask(triton, "generate_stream", body))] == ["hello"] * 3
    refused(ask(triton, "generate", body), "expected exactly one result, got several: it streams its results; POST to")


def test_no_result(triton: Running) -> None:
    body = {"PROMPT": "hello", "STREAM": True, "REPETITION": 0}
    assert events_of(ask(triton, "generate_stream", body)) == []
    refused(ask(triton, "generate", body), "expected exactly one result, got none")


def test_a_stream_without_end_is_left_after_the_second_result(triton: Running) -> None:
    refused(ask(triton, "generate", {"PROMPT": "x", "STREAM": True, "REPETITION": 1000}), "got several")
    assert triton.in_flight("mock_llm") == 0


def test_a_failure_first_has_its_status_and_later_an_event(triton: Running) -> None:
    body = {"PROMPT": "x", "STREAM": True, "REPETITION": 0, "FAIL_LAST": True}
    refused(ask(triton, "generate_stream", body), "An Error Occurred", 500)
    refused(ask(triton, "generate", body), "An Error Occurred", 500)
    text, error = events_of(ask(triton, "generate_stream", {**body, "REPETITION": 1}))
    assert text["TEXT"] == "x"
    assert ("An Error Occurred" in error["error"], error["status"]) == (True, 500)
    refused(ask(triton, "generate", {**body, "REPETITION": 1}), "An Error Occurred", 500)


def test_outputs_without_elements(triton: Running) -> None:
    assert ask(triton, "generate", {"PROMPT": "x", "STREAM": False, "OUTPUT_0_DIM": True}).json()["TEXT"] == []


@BOTH
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "expected the required inputs 'PROMPT', 'STREAM'"),
        ({"abc": 123}, "abc: expected one of the fields PROMPT, STREAM, input_ids"),
        ({"PROMPT": "hello"}, "STREAM: expected the required inputs"),
        ({"STREAM": False}, "PROMPT: expected the required inputs"),
        ({"PROMPT": 123, "STREAM": False}, "PROMPT: expected a string (BYTES), got an integer"),
        ({"PROMPT": "hello", "STREAM": "false"}, "STREAM: expected a boolean (BOOL), got a string"),
        ({"PROMPT": True, "STREAM": 123}, "PROMPT: expected a string"),
        ('{"PROMPT": "a", "STREAM": false, "PROMPT": "b"}', "PROMPT: expected every key of an object once"),
        ({"PROMPT": "a", "STREAM": True, "PARAMS": {"a": 0}}, "PARAMS: expected one of the fields"),
        ({"PROMPT": {"USER": "a"}, "STREAM": True}, "PROMPT"),
        ({"PROMPT": "a", "STREAM": True, "parameters": 1}, "parameters: expected an object, got an integer"),
        ({"PROMPT": "a", "STREAM": True, "parameters": {"nested": {"twice": 1}}}, "parameters.nested"),
        ({"PROMPT": "a", "STREAM": True, "REPETITION": {"a": 1}}, "REPETITION: expected int, got an object"),
    ],
)
def test_wrong_bodies(triton: Running, route: str, body: dict[str, Any] | str, said: str) -> None:
    refused(ask(triton, route, body), said)


def test_its_configuration_says_that_it_streams(triton: Running) -> None:
    assert triton.get("/v2/models/mock_llm/config").json()["model_transaction_policy"] == {"decoupled": True}
    refused(triton.infer("mock_llm", ["x"], shape=[1, 1], datatype="BYTES", name="PROMPT"), "streams its results")


# http_test.py, nested_json_crash.py


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"shape": [2**4, 2**60 + 2], "data": [1.0]}, "inputs[0]"),
        ({"shape": [2**2, 2**60 + 2], "data": [1.0]}, "inputs[0]"),
        ({"shape": [2, -5], "data": [1.0]}, "inputs[0].shape"),
        ({"shape": [1, 1], "data": json.loads("[" * 120 + "1" + "]" * 120)}, "inputs[0].data"),
        ({"shape": [1, 15], "data": list(range(16))}, "expected 15 elements"),
        ({"shape": [1, 16], "data": list(range(15))}, "expected 16 elements"),
    ],
)
def test_shapes_that_lie(triton: Running, tensor: dict[str, Any], said: str) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", **tensor}]}
    refused(triton.client.post(f"{triton.url}/v2/models/simple/infer", json=body), said)


def test_an_output_twice(triton: Running) -> None:
    refused(triton.infer("simple", [1], shape=[1, 1], outputs=[{"name": "y"}, {"name": "y"}]), "at most once")


def test_a_deeply_nested_index_request(triton: Running) -> None:
    body = b'{"ready":' + b"[" * 250_000 + b"true" + b"]" * 250_000 + b"}"
    answer = triton.client.post(f"{triton.url}/v2/repository/index", content=body, headers={"Content-Type": JSON})
    assert (answer.status_code, triton.get("/v2/health/live").status_code) == (400, 200)


def test_a_json_length_beyond_any_integer(triton: Running) -> None:
    for length in ("99999999999", "9" * 30, "-1"):
        headers = {"Inference-Header-Content-Length": length}
        answer = triton.client.post(f"{triton.url}/v2/models/simple/infer", json={"inputs": []}, headers=headers)
        refused(answer, "Inference-Header-Content-Length")


def test_a_path_before_the_routes_is_unknown(triton: Running) -> None:
    with tritonclient.http.InferenceServerClient(f"{triton.url.removeprefix('http://')}/base_path") as client:
        tensor = tritonclient.http.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
        with pytest.raises(InferenceServerException, match="route /base_path/v2/models/simple/infer: unknown"):
            client.infer("simple", [tensor])


# http_input_size_limit_test.py


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["JSON", "binary"])
def test_the_limit_of_a_body(triton: Running, form: str, packed: bool) -> None:
    def sent(size: int) -> int:
        head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],'
        headers = {"Content-Encoding": "gzip"} if packed else {}
        if form == "JSON":
            elements = (size - len(head) - 20) // 2
            body = head % elements + b'"data":[' + b",".join([b"1"] * elements) + b"]}]}"
            body += b" " * (size - len(body))
        else:
            elements = (size - 200) // 4
            body = head % elements + b'"parameters":{"binary_data_size":%d}}]}' % (elements * 4)
            body += b" " * (size - elements * 4 - len(body))
            headers["Inference-Header-Content-Length"] = str(len(body))
            body += bytes(elements * 4)
        assert len(body) == size
        url = f"{triton.url}/v2/models/simple/infer"
        return triton.client.post(url, content=gzip.compress(body) if packed else body, headers=headers).status_code

    assert [sent(MAX_BODY_BYTES), sent(MAX_BODY_BYTES + 1)] == [200, 413]


def test_damaged_bodies_leave_no_memory_behind(triton: Running) -> None:
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "9999999"}
    for _ in range(20):
        answer = triton.client.post(
            f"{triton.url}/v2/models/simple/infer", content=gzip.compress(bytes(100_000)), headers=headers
        )
        refused(answer, "Inference-Header-Content-Length")
    assert triton.in_flight("simple") == 0


# http_request_many_chunks.py


@pytest.mark.parametrize("packed", [False, True])
def test_a_body_of_very_many_chunks(triton: Running, packed: bool) -> None:
    body = tensor(1).encode()
    sent = gzip.compress(body + b" " * 100_000, 0) if packed else body + b" " * 100_000
    head = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Encoding: gzip\r\n" if packed else b""
    with triton.raw() as connection:
        connection.send(head + b"\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in sent) + b"0\r\n\r\n")
        status, _, answer = connection.answer()
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [2.0])


def test_chunks_beyond_the_limit(triton: Running) -> None:
    with triton.raw() as connection:
        head = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.send(head + b"3E8\r\n%b\r\n" % (b" " * 1000) * (MAX_BODY_BYTES // 1000 + 1))
        assert connection.answer()[0] == 413


# http_basic_auth_test.py, the client's plugin


def test_a_client_with_basic_authentication(triton: Running) -> None:
    from tritonclient.http.auth import BasicAuth

    with tritonclient.http.InferenceServerClient(triton.url.removeprefix("http://")) as client:
        client.register_plugin(BasicAuth("username", "password"))
        assert client.is_server_live()
        assert client.get_model_metadata("simple")["name"] == "simple"


# The commands of Triton's documentation and of qa/L0_http/test.sh


def curl(*arguments: str, input: str | None = None) -> str:
    assert CURL is not None
    command = [CURL, "-sSN", "--max-time", "60", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=input).stdout


@NEEDS_CURL
@pytest.mark.parametrize(
    "fields", ["", ',"outputs":[{"name":"y"}]', ',"outputs":[{"name":"y","parameters":{"binary_data":false}}]']
)
def test_curl_infers(triton: Running, fields: str) -> None:
    answer = json.loads(curl("-d", tensor(2, fields), f"{triton.url}/v2/models/simple/infer"))
    assert answer["outputs"][0]["data"] == [2, 2]


@NEEDS_CURL
def test_curl_asks_for_health_and_metadata(triton: Running) -> None:
    url = f"{triton.url}/v2"
    assert json.loads(curl(f"{url}/health/ready")) == {"ready": True}
    assert "HTTP/1.1 200" in curl("-I", f"{url}/health/ready")
    assert json.loads(curl(f"{url}/models/simple/versions/1"))["name"] == "simple"
    assert [one["name"] for one in json.loads(curl("-X", "POST", f"{url}/repository/index"))] == ["mock_llm", "simple"]
    ready = curl("-X", "POST", "-d", '{"ready": true}', f"{url}/repository/index")
    assert len(json.loads(ready)) == 2
    assert curl("-X", "POST", "-w", "%{http_code}", "-o", "/dev/null", f"{url}/repository/models/simple/load") == "409"


PROMPT = '{"PROMPT": "hello", "STREAM": true, "parameters": {"REPETITION": 2}}'


@NEEDS_CURL
@pytest.mark.parametrize("protocol", ["--http1.0", "--http1.1", "--http2"])
def test_curl_posts_and_streams(triton: Running, protocol: str) -> None:
    infer, stream = (f"{triton.url}/v2/models/{path}" for path in ("simple/infer", "mock_llm/generate_stream"))
    assert json.loads(curl(protocol, "-d", tensor(2), infer))["outputs"][0]["data"] == [2, 2]
    assert curl(protocol, "-d", PROMPT, stream).count('"TEXT":"hello"') == 2
    answer = curl(protocol, "-H", "Expect: 100-continue", "-d", "@-", infer, input=tensor(50_000))
    assert len(json.loads(answer)["outputs"][0]["data"]) == 50_000


@NEEDS_JAVA
def test_javas_client_posts_and_streams(triton: Running) -> None:
    infer, stream = (f"{triton.url}/v2/models/{path}" for path in ("simple/infer", "mock_llm/generate_stream"))
    command = [
        str(JAVA),
        str(Path(__file__).with_name("Ask.java")),
        infer,
        tensor(2),
        stream,
        PROMPT,
        infer,
        tensor(20_000),
    ]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()
    assert lines.count("HTTP_1_1 200") == 3
    assert json.loads(lines[1])["outputs"][0]["data"] == [2, 2]
    assert sum('"TEXT":"hello"' in line for line in lines) == 2
    assert len(json.loads(lines[-1])["outputs"][0]["data"]) == 20_000


@NEEDS_CURL
def test_the_documented_commands_of_the_backends_of_language_models(lm: Running) -> None:
    url = f"{lm.url}/v2/models/tiny"
    vllm = '{"text_input": "def add", "parameters": {"stream": false, "temperature": 0}}'
    text = json.loads(curl("-X", "POST", f"{url}/generate", "-d", vllm))["text_output"]
    tensorrt = '{"text_input": "def add", "max_tokens": 16, "bad_words": "", "stop_words": "", "temperature": 0}'
    assert json.loads(curl("-X", "POST", f"{url}/generate", "-d", tensorrt))["text_output"] == text != ""
    one, end = curl("-X", "POST", f"{url}/generate_stream", "-d", vllm).strip().split("\n\n")
    assert json.loads(one.removeprefix("data: "))["text_output"] == text
    assert '"final":true' in end
    assert len(curl(f"{url}/generate_stream", "-d", vllm.replace("false", "true")).strip().split("\n\n")) > 2
    whole = vllm.replace("false", 'false, "exclude_input_in_output": false')
    assert json.loads(curl(f"{url}/generate", "-d", whole))["text_output"] == f"def add{text}"
    first = text.split()[0]
    stopped = tensorrt.replace('"stop_words": ""', f'"stop_words": {json.dumps([first])}')
    assert first not in json.loads(curl(f"{url}/generate", "-d", stopped))["text_output"]
