"""Ragged outputs and inputs behind a server: each request has its own rows, whatever its neighbours have, also where
other steps compute with their elements."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http

from tests.asking import Pipeline
from tests.running import Running, serve, wait_for

BATCHING = {"max_batch_size": 8, "max_in_flight": 1}
STEPS = {"trunk": {"model": "found:Numbers"}, "heads": {"boxes": {"model": "found:Boxes", "inputs": {"n": "trunk.n"}}}}
MODELS = ["plain", "fused", "graph"]
READING = {
    "steps": {
        "detect": {"model": "found:Boxes", "inputs": {"n": "input.n"}},
        "crop": {"model": "found:Crops", "expand": "detect", "inputs": {"n": "input.n"}},
        "read": {"model": "found:Texts"},
    },
    "heads": ["read", "crop"],
}
READERS = ["reader", "reader-graph"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    config = {
        "deployments": {
            "plain": {"model": "found:Boxes", "batching": BATCHING},
            "fused": {"pipeline": STEPS, "batching": BATCHING},
            "sums": {"model": "found:Sums", "batching": {"max_batch_size": 16, "max_in_flight": 1}},
            "graph": {"pipeline": {**STEPS, "placement": "graph"}, "batching": BATCHING},
            "reader": {"pipeline": READING, "batching": BATCHING},
            "reader-graph": {"pipeline": {**READING, "placement": "graph"}, "batching": BATCHING},
        }
    }
    with serve(config) as running:
        yield running


def ask(server: Running, model: str, *numbers: int, **body: Any) -> httpx.Response:
    return server.infer(model, list(numbers), shape=[len(numbers), 1], name="n", datatype="INT64", **body)


@contextlib.contextmanager
def together(server: Running, model: str, count: int, ask_at_gate: Callable[[float], object]) -> Iterator[None]:
    """A context in whose background this many requests are sent: none is computed before all have arrived."""
    gate = server.gate()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask_at_gate, gate.value)
        wait_for(gate.has_begun, what="the first call to begin")

        def release() -> None:
            wait_for(lambda: server.in_flight(model) == 1 + count, what="all requests to arrive")
            gate.open()

        released = pool.submit(release)
        yield
        released.result()
        first.result()


def expected(*numbers: int) -> dict[str, Any]:
    boxes = [[[number, place] for place in range(number)] for number in numbers]
    names = [[f"{number}.{place}" for place in range(number)] for number in numbers]
    return {"boxes": boxes, "names": names, "boxes_count": list(numbers), "names_count": list(numbers)}


def values(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"] if output["name"] != "rows"}


@pytest.mark.parametrize("model", MODELS)
def test_each_request_has_rows_of_its_own_sizes(server: Running, model: str) -> None:
    requests = [(3,), (0,), (1, 5), (0, 0), (2, -1), (7, 0, 1), tuple(range(20))]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda numbers: ask(server, model, *numbers), requests))
    for numbers, answer in zip(requests, answers, strict=True):
        if min(numbers) < 0:
            assert (answer.status_code, "row 1: " in answer.json()["error"]) == (400, True)
        else:
            assert values(answer) == expected(*numbers)


def test_tritonclient_gets_one_array_of_the_requests_longest_row_and_the_counts(server: Running) -> None:
    with tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"), concurrency=2) as client:
        inputs = []
        for numbers in ([1, 3], [9]):
            tensor = tritonclient.http.InferInput("n", [len(numbers), 1], "INT64")
            tensor.set_data_from_numpy(np.array(numbers).reshape(-1, 1))
            inputs.append([tensor])
        calls = [
            client.async_infer("plain", tensors, outputs=[tritonclient.http.InferRequestedOutput("boxes")])
            for tensors in inputs
        ]
        first, _ = (call.get_result() for call in calls)
        counts = first.as_numpy("boxes_count")
        assert first.as_numpy("boxes").shape == (2, 3, 2)
        rows = [row[:count].tolist() for row, count in zip(first.as_numpy("boxes"), counts[:, 0], strict=True)]
    assert rows == expected(1, 3)["boxes"]


def test_one_row_in_plain_fields_and_what_metadata_say(server: Running) -> None:
    answer = server.client.post(f"{server.url}/v2/models/plain/generate", json={"n": 2}).json()
    assert (answer["names"], answer["boxes"], answer["boxes_count"]) == (["2.0", "2.1"], [2, 0, 2, 1], 2)
    outputs = server.client.get(f"{server.url}/v2/models/plain").json()["outputs"]
    assert [(output["name"], output["shape"], output.get("ragged")) for output in outputs][:2] == [
        ("boxes", [-1, -1, 2], True), ("boxes_count", [-1, 1], None),
    ]  # fmt: skip


def widths(server: Running, x: np.ndarray[Any, Any], **counts: Any) -> dict[str, Any]:
    inputs = [{"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}]
    if counts:
        inputs.append({"name": "x_count", "datatype": "INT32", "shape": [len(x), 1], **counts})
    answer = server.client.post(f"{server.url}/v2/models/sums/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def test_rows_of_similar_width_share_a_call_and_are_answered_as_alone(server: Running) -> None:
    random = np.random.default_rng(7)
    rows = [random.normal(size=(1, 40 + 5 * (number % 32), 2)).astype("f4") for number in range(64)]
    first = partial(np.full, (1, 40, 2))
    with (
        together(server, "sums", len(rows), lambda gate: widths(server, first(gate))),
        ThreadPoolExecutor(len(rows)) as pool,
    ):
        answers = list(pool.map(lambda row: widths(server, row), rows))
    assert len({answer["call"][0] for answer in answers}) <= 8
    for row, answer in zip(rows, answers, strict=True):
        assert answer["call"][1] < 2 * row.shape[1] + 2
        np.testing.assert_allclose(answer["same"][0], row[0])
        np.testing.assert_allclose(answer["sum"], row[0].sum(0), rtol=1e-6, atol=1e-5)


def test_a_request_says_by_counts_that_its_own_rows_differ(server: Running) -> None:
    x = np.array([[[1, 2], [3, 4], [-9, -9]], [[5, 6], [7, 8], [9, 10]]], "f4")
    answer = widths(server, x, data=[2, 3])
    assert answer["same"] == [[[1, 2], [3, 4]], [[5, 6], [7, 8], [9, 10]]]
    assert answer["sum"] == [4, 6, 21, 24]


@pytest.mark.parametrize("count", [-1, 4])
def test_a_count_beyond_the_tensor_is_refused(server: Running, count: int) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 3, 2], "data": [0] * 6},
        {"name": "x_count", "datatype": "INT32", "shape": [1, 1], "data": [count]},
    ]
    answer = server.client.post(f"{server.url}/v2/models/sums/infer", json={"inputs": inputs})
    assert answer.status_code == 400
    assert f"row 0: expected 0 to 3, the size of input 'x', got {count}" in answer.json()["error"]


@pytest.mark.parametrize("model", READERS)
def test_elements_are_rows_of_other_steps_and_come_back_to_their_requests(server: Running, model: str) -> None:
    requests = [(3,), (0,), (1, 4), (0, 0), (2, 5), (4, 0, 1), (5,), (3, -1)]
    with (
        together(server, model, len(requests), lambda gate: ask(server, model, int(gate))),
        ThreadPoolExecutor(len(requests)) as pool,
    ):
        answers = list(
            pool.map(lambda numbers: ask(server, model, *numbers, parameters={"greeting": f"{numbers}"}), requests)
        )
    shared = False
    for numbers, answer in zip(requests, answers, strict=True):
        if 5 in numbers or -1 in numbers:
            assert answer.status_code == 400, answer.text
            continue
        found = values(answer)
        names = [[[f"{numbers} {name}"] for name in row] for row in expected(*numbers)["names"]]
        assert (found["text"], found["text_count"]) == (names, list(numbers))
        assert [[crop[:2] for crop in row] for row in found["crop"]] == expected(*numbers)["boxes"]
        shared |= any(size > sum(numbers) for row in found["calls"] for sizes in row for size in sizes)
    assert shared, "no call had elements of several requests"


@pytest.mark.parametrize("model", READERS)
def test_a_failed_element_is_named(server: Running, model: str) -> None:
    error = ask(server, model, 1, 5).json()["error"]
    where = (
        "row 1: element 4: " if model == "reader" else "step `crop`, whose rows are the elements of `detect`: row 5: "
    )
    assert error == f"{where}boxes: expected another box"


@pytest.mark.parametrize("model", READERS)
def test_a_request_without_elements_calls_no_other_step(server: Running, model: str, tmp_path: Path) -> None:
    pipeline = Pipeline(server, model, "fused" if model == "reader" else "graph", tmp_path / "log")
    before = pipeline.executions()
    found = values(ask(server, model, 0))
    assert (found["text"], found["text_count"], found["crop_count"]) == ([[]], [0], [0])
    assert pipeline.executions() - before == Counter(detect=1)
    found = values(ask(server, model, 0, 2, 1))
    assert pipeline.executions() - before == Counter(detect=2, crop=1, read=1)
