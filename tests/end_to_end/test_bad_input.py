"""Whatever a client sends: it is told which field is wrong, and nobody else notices."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.running import Raw, Running, wait_for

MAX_BODY_BYTES = 20_000_000  # of `services`


def tensor(**changes: Any) -> dict[str, Any]:
    """An input of `matrix`, with changes."""
    return {"name": "m", "datatype": "FP32", "shape": [1, 1, 3], "data": [1, 2, 3], **changes}


def request(*inputs: Any, **more: Any) -> bytes:
    """A request's body."""
    return json.dumps({"inputs": list(inputs), **more}).encode()


def good(services: Running) -> None:
    """A request that is right, which works."""
    answer = services.client.post(f"{services.url}/v2/models/matrix/infer", content=request(tensor()))
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0]


NESTED = b"[" * 100_000 + b"]" * 100_000
# What is sent to `matrix` (m: FP32 [rows, any, 3]), and what the message must name.
BODIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "body"),
    "blank": (b"  \n", "body"),
    "not-json": (b"m=1", "body"),
    "cut-short": (request(tensor())[:-5], "body"),
    "two-objects": (request(tensor()) * 2, "body"),
    "not-utf8": (request(tensor()).replace(b'"m"', b'"\xff"'), "UTF-8"),
    "no-object": (b"[1, 2]", "object"),
    "null": (b"null", "object"),
    "no-inputs": (b"{}", "inputs"),
    "inputs-null": (b'{"inputs": null}', "inputs"),
    "inputs-empty": (request(), "inputs"),
    "unknown-field": (request(tensor(), inptus=[]), "inptus"),
    "unknown-input-field": (request(tensor(dtype="FP32")), "dtype"),
    "unknown-datatype": (request(tensor(datatype="FLOAT")), "inputs[0].datatype"),
    "other-datatype": (request(tensor(datatype="INT32")), "inputs[0].datatype"),
    "datatype-number": (request(tensor(datatype=32)), "datatype"),
    "too-little-data": (request(tensor(shape=[2, 1, 3])), "inputs[0].data"),
    "too-much-data": (request(tensor(data=[1, 2, 3, 4])), "inputs[0].data"),
    "ragged": (request(tensor(shape=[1, 2, 3], data=[[[1, 2, 3], [4, 5]]])), "inputs[0].data"),
    "nested-otherwise": (request(tensor(shape=[1, 2, 3], data=[[[1, 2], [3, 4], [5, 6]]])), "inputs[0].data"),
    "data-string": (request(tensor(data="123")), "inputs[0].data"),
    "data-strings": (request(tensor(data=["1", "2", "3"])), "inputs[0].data"),
    "data-null": (request(tensor(data=None)), "inputs[0].data"),
    "data-element-null": (request(tensor(data=[1, None, 3])), "inputs[0].data"),
    "data-too-large": (request(tensor()).replace(b"[1, 2, 3]", b"[1, 1e39, 3]"), "inputs[0].data"),
    "nan": (request(tensor(data=[1, float("nan"), 3])), "inputs[0].data"),
    "infinity": (request(tensor(data=[1, float("inf"), 3])), "inputs[0].data"),
    "minus-infinity": (request(tensor(data=[1, -float("inf"), 3])), "inputs[0].data"),
    "no-data": (request({"name": "m", "datatype": "FP32", "shape": [1, 1, 3]}), "inputs[0].data"),
    "shape-missing": (request({"name": "m", "datatype": "FP32", "data": [1, 2, 3]}), "shape"),
    "shape-number": (request(tensor(shape=3)), "shape"),
    "shape-fraction": (request(tensor(shape=[1, 1.5, 3])), "shape"),
    "shape-too-short": (request(tensor(shape=[1, 3])), "inputs[0].shape"),
    "shape-too-long": (request(tensor(shape=[1, 1, 1, 3])), "inputs[0].shape"),
    "shape-empty": (request(tensor(shape=[])), "inputs[0].shape"),
    "fixed-dimension": (request(tensor(shape=[1, 1, 4], data=[1, 2, 3, 4])), "inputs[0].shape"),
    "negative-dimension": (request(tensor(shape=[1, -1, 3])), "inputs[0].shape[1]"),
    "negative-rows": (request(tensor(shape=[-1, 1, 3])), "inputs[0].shape[0]"),
    "huge-dimension": (request(tensor(shape=[1, 2**40, 3])), "inputs[0].shape[1]"),
    "beyond-64-bits": (request(tensor(shape=[1, 2**64 + 1, 3])), "shape"),
    "overflowing-product": (request(tensor(shape=[2**31 - 1, 2**31 - 1, 3])), "inputs[0].data"),
    "duplicate-input": (request(tensor(), tensor()), "inputs[1].name"),
    "unknown-input": (request(tensor(name="x")), "inputs[0].name"),
    "additional-input": (request(tensor(), tensor(name="x")), "inputs[1].name"),
    "unknown-output": (request(tensor(), outputs=[{"name": "total"}]), "outputs[0].name"),
    "duplicate-output": (request(tensor(), outputs=[{"name": "sum"}] * 2), "outputs[1].name"),
    "outputs-object": (request(tensor(), outputs={"name": "sum"}), "outputs"),
    "unknown-parameter": (request(tensor(), parameters={"temperature": 1}), "parameters.temperature"),
    "negative-timeout": (request(tensor(), parameters={"timeout": -1}), "parameters.timeout"),
    "priority-string": (request(tensor(), parameters={"priority": "high"}), "parameters.priority"),
    "parameter-list": (request(tensor(), parameters={"timeout": [1]}), "parameters"),
    "shared-memory": (
        request(tensor(parameters={"shared_memory_region": "r"})),
        "inputs[0].parameters.shared_memory_region",
    ),
    "id-number": (request(tensor(), id=7), "id"),
    "id-too-long": (request(tensor(), id="x" * 1001), "id"),
    "deep-data": (request(tensor()).replace(b"[1, 2, 3]", NESTED), "nested too deeply"),
    "deep-body": (NESTED, "body"),
    "deep-unknown-field": (b'{"a": ' + NESTED + b"}", "a:"),
    "deep-objects": (b'{"inputs":' * 50_000 + b"1" + b"}" * 50_000, "inputs"),
    "many-inputs": (request(*[tensor(name=f"x{index}") for index in range(10_000)]), "inputs[0].name"),
    "long-number": (request(tensor()).replace(b"[1, 2, 3]", b"[1, " + b"9" * 100_000 + b", 3]"), "inputs[0].data"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_wrong_body_gets_400_naming_the_field(services: Running, case: str) -> None:
    body, field = BODIES[case]
    answer = services.client.post(f"{services.url}/v2/models/matrix/infer", content=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]
    assert field in message
    assert len(message) < 1000
    assert "Traceback" not in message
    good(services)


# Binary tensors: a body's JSON part and what follows it, the header's value (None: the true one), the field named.
TAIL = b"\0\0\x80?" * 3


def binary(size: object, tail: bytes = TAIL, header: str | None = None, **changes: Any) -> tuple[bytes, str]:
    """A body with one binary tensor, and its header."""
    described = {"name": "m", "datatype": "FP32", "shape": [1, 1, 3], "parameters": {"binary_data_size": size}}
    head = request({**described, **changes})
    return head + tail, str(len(head)) if header is None else header


BINARIES: dict[str, tuple[tuple[bytes, str], str]] = {
    "size-too-small": (binary(8), "inputs[0].parameters.binary_data_size"),
    "size-too-large": (binary(16), "inputs[0].parameters.binary_data_size"),
    "size-beyond-the-body": (binary(12, TAIL[:8]), "inputs[0].parameters.binary_data_size"),
    "size-negative": (binary(-12), "inputs[0].parameters.binary_data_size"),
    "size-huge": (binary(2**63), "inputs[0].parameters.binary_data_size"),
    "size-string": (binary("12"), "inputs[0].parameters.binary_data_size"),
    "size-bool": (binary(True), "inputs[0].parameters.binary_data_size"),
    "bytes-left-over": (binary(12, TAIL + b"more"), "body"),
    "data-and-binary": (binary(12, data=[1, 2, 3]), "inputs[0].data"),
    "huge-shape": (binary(12, shape=[2**31 - 1, 2**31 - 1, 3]), "inputs[0].parameters.binary_data_size"),
    "header-too-small": (binary(12, header="10"), "Inference-Header-Content-Length"),
    "header-too-large": (binary(12, header="100000"), "Inference-Header-Content-Length"),
    "header-zero": (binary(12, header="0"), "body"),
    "header-negative": (binary(12, header="-1"), "Inference-Header-Content-Length"),
    "header-no-number": (binary(12, header="many"), "Inference-Header-Content-Length"),
    "header-huge": (binary(12, header="9" * 1000), "Inference-Header-Content-Length"),
}


@pytest.mark.parametrize("case", BINARIES)
def test_a_wrong_binary_body_gets_400_naming_the_field(services: Running, case: str) -> None:
    (body, header), field = BINARIES[case]
    headers = {"Inference-Header-Content-Length": header, "Content-Type": "application/octet-stream"}
    answer = services.client.post(f"{services.url}/v2/models/matrix/infer", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]
    good(services)


def test_binary_data_without_the_header_are_refused(services: Running) -> None:
    body, _ = binary(12)
    answer = services.client.post(f"{services.url}/v2/models/matrix/infer", content=body)
    assert answer.status_code == 400
    assert "Inference-Header-Content-Length" in answer.json()["error"]


def test_lengths_within_binary_strings_are_checked(services: Running) -> None:
    described = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
    head = request(described)
    for tail in (b"\xff\xff\xff\xff1234", b"\x05\0\0\x001234", b"\x01\0\0\x001234"):
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = services.client.post(f"{services.url}/v2/models/short/infer", content=head + tail, headers=headers)
        assert answer.status_code == 400, answer.text
        assert "inputs[0] (tensor 'text')" in answer.json()["error"]
    good(services)


# `/v1/embeddings`, which `short` serves and `matrix` doesn't.
EMBEDDINGS: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "body"),
    "not-json": (b"input=a", 400, "body"),
    "unknown-model": (b'{"model": "none", "input": "a"}', 404, "model"),
    "other-model": (b'{"model": "matrix", "input": "a"}', 400, "model"),
    "no-input": (b'{"model": "short"}', 400, "input"),
    "input-number": (b'{"model": "short", "input": 1}', 400, "input"),
    "input-tokens": (b'{"model": "short", "input": [1, 2]}', 400, "input"),
    "input-deep": (b'{"model": "short", "input": ' + NESTED + b"}", 400, "body"),
    "unknown-field": (b'{"model": "short", "input": "a", "language": "de"}', 400, "language"),
    "encoding": (b'{"model": "short", "input": "a", "encoding_format": "hex"}', 400, "encoding_format"),
    "dimensions-string": (b'{"model": "short", "input": "a", "dimensions": "4"}', 400, "dimensions"),
    "dimensions-negative": (b'{"model": "short", "input": "a", "dimensions": -1}', 400, "dimensions"),
    "dimensions-too-large": (b'{"model": "short", "input": "a", "dimensions": 9}', 400, "dimensions"),
    "dimensions-huge": (b'{"model": "short", "input": "a", "dimensions": ' + b"9" * 30 + b"}", 400, "dimensions"),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_a_wrong_embeddings_request_names_the_field(services: Running, case: str) -> None:
    body, status, field = EMBEDDINGS[case]
    url = f"{services.url}/v1/embeddings"
    answer = services.client.post(url, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]
    good_one = services.client.post(url, json={"model": "short", "input": "a"})
    assert good_one.status_code == 200, good_one.text


@pytest.mark.parametrize("sent", [0, 1, 40, 70], ids=lambda sent: f"{sent}-bytes")
def test_a_body_whose_client_hangs_up_harms_nobody(services: Running, sent: int) -> None:
    body = request(tensor())
    log_from = services.log.stat().st_size
    with services.raw() as connection:
        head = f"POST /v2/models/matrix/infer HTTP/1.1\r\nHost: here\r\nX-Request-Id: hung-up-{sent}\r\n"
        connection.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:sent])
    good(services)

    def line() -> str:
        lines = services.log.read_text()[log_from:].splitlines()
        return next((line for line in lines if f"hung-up-{sent}" in line), "")

    assert json.loads(wait_for(line, 60, "the access log"))["status"] == 499


def ask_and_end(services: Running, model: str, *inputs: Any, request_id: str = "ended") -> Raw:
    """Send a request, and nothing after it."""
    body = request(*inputs)
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
    connection = services.raw()
    connection.send(f"{head}Content-Type: application/json\r\nX-Request-Id: {request_id}\r\n\r\n".encode() + body)
    connection.socket.shutdown(socket.SHUT_WR)
    return connection


def test_a_client_that_ends_its_sending_side_after_its_request_is_answered(services: Running) -> None:
    for _ in range(10):
        with ask_and_end(services, "matrix", tensor()) as connection:
            status, _, content = connection.answer()
            assert status == 200, content
            assert connection.socket.recv(1) == b""
    gate = services.gate()
    with ask_and_end(services, "slow", tensor(name="x", shape=[1, 1], data=[gate.value])) as connection:
        assert connection.socket.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 100"
        gate.open()
        assert connection.answer()[0] == 200


def test_a_client_that_leaves_before_its_answer_is_logged_as_gone(services: Running) -> None:
    gate = services.gate()
    with ask_and_end(services, "slow", tensor(name="x", shape=[1, 1], data=[gate.value]), request_id="left"):
        wait_for(gate.has_begun, what="the call")

    def line() -> str:
        lines = services.log.read_text().splitlines()
        return next((line for line in lines if '"left"' in line), "")

    assert json.loads(wait_for(line, 60, "the access log"))["status"] == 499
    gate.open()


@pytest.mark.parametrize("path", ["/v2/models/matrix/infer", "/v1/embeddings"])
def test_a_body_of_100_megabytes_gets_413(services: Running, path: str) -> None:
    body = b'{"inputs": ' + b" " * 100_000_000 + b"[]}"
    with services.raw() as connection:
        connection.send(f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        status, _, content = connection.answer()
    assert status == 413
    assert "body: expected at most" in content.decode()
    good(services)


def test_a_large_body_within_the_limit_is_taken(services: Running) -> None:
    rows = 1000
    body = request(tensor(shape=[rows, 100, 3], data=[0.5] * (rows * 300)))
    assert 1_000_000 < len(body) < MAX_BODY_BYTES
    answer = services.client.post(f"{services.url}/v2/models/matrix/infer", content=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == [50.0] * (rows * 3)
