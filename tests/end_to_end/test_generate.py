"""The generate extension: a row in plain fields, answered whole or as server-sent events."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import logged
from tests.running import Running, in_background, serve, wait_for

BOTH = pytest.mark.parametrize("path", ["generate", "generate_stream"])


def generate(running: Running, model: str, path: str = "generate", **body: Any) -> httpx.Response:
    """One request; a stream is read to its end."""
    return running.client.post(f"{running.url}/v2/models/{model}/{path}", json=body)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that was read to its end."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.removesuffix("\n\n").split("\n\n")]


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        ("tuned", {"x": [1, 2.5]}, {"y": [2.0, 5.0], "batch": 1}),
        ("tuned", {"x": 3, "factor": 10}, {"y": 30.0, "batch": 1}),
        ("tuned", {"x": 3, "parameters": {"factor": 10, "offset": 1}}, {"y": 31.0, "batch": 1}),
        ("tuned", {"x": []}, {"y": [], "batch": 1}),
        ("matrix", {"m": [[1, 2, 3], [4, 5, 6]]}, {"sum": [5.0, 7.0, 9.0]}),
        ("matrix", {"m": [1, 2, 3, 4, 5, 6]}, {"sum": [5.0, 7.0, 9.0]}),
        ("short", {"text": "ab", "dimensions": 3}, {"vector": [97.0, 98.0, 0.0]}),
    ],
)
def test_a_row_is_answered_by_plain_fields(services: Running, model: str, body: Any, expected: Any) -> None:
    named = {"model_name": model, "model_version": "1"}
    assert generate(services, model, **body).json() == {**named, **expected}
    result, end = events_of(generate(services, model, "generate_stream", **body))
    assert result == {**named, **expected}
    assert end == {**named, "final": True}


@BOTH
def test_ids_and_versions(services: Running, path: str) -> None:
    answer = generate(services, "tuned", f"versions/1/{path}", x=1, id="i")
    assert answer.headers["x-request-id"]
    first = answer.json() if path == "generate" else events_of(answer)[0]
    assert first["id"] == "i"
    assert generate(services, "tuned", f"versions/2/{path}", x=1).status_code == 404


@BOTH
@pytest.mark.parametrize(
    ("model", "body", "status", "said"),
    [
        ("nope", {"x": 1}, 404, "nope"),
        ("tuned", {}, 400, "x: expected the required inputs"),
        ("tuned", {"x": "1"}, 400, "x: expected a number (FP32), got a string"),
        ("tuned", {"x": 1, "factor": 1000}, 400, "factor: expected at most 100"),
        ("tuned", {"x": 1, "volume": 3}, 400, "volume: expected one of the fields x, id, parameters"),
        ("mirror", {"in_int32": 1}, 400, "FP16"),
        ("faulty", {"x": -1}, 500, "ValueError: poison"),
        ("faulty", {"x": -2}, 400, "expected no -2"),
        ("slow", {"x": 0.5, "parameters": {"timeout": 50_000}}, 504, "deadline"),
    ],
)
def test_failures_have_true_statuses(
    services: Running, path: str, model: str, body: Any, status: int, said: str
) -> None:
    answer = generate(services, model, path, **body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert said in answer.json()["error"]
    assert generate(services, "tuned", path, x=1).status_code == 200


@BOTH
@pytest.mark.parametrize("body", [b"", b"[]", b'{"x": ', b"\xff", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_malformed_bodies_get_400(services: Running, path: str, body: bytes) -> None:
    answer = services.client.post(f"{services.url}/v2/models/tuned/{path}", content=body)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]) < 1000


@BOTH
def test_other_methods_are_refused(services: Running, path: str) -> None:
    assert services.get(f"/v2/models/tuned/{path}").status_code == 405


def test_a_deadline_after_the_start_is_an_event(services: Running) -> None:
    error, end = events_of(generate(services, "slow", "generate_stream", x=1.5, parameters={"timeout": 600_000}))
    assert error["status"] == 504
    assert "deadline of 0.6 s" in error["error"]
    assert end["final"] is True


def test_a_client_that_leaves_a_stream_is_logged_as_gone(services: Running) -> None:
    url = f"{services.url}/v2/models/slow/generate_stream"
    headers = {"X-Request-Id": "left-early"}
    with services.client.stream("POST", url, json={"x": 2.0}, headers=headers) as response:
        assert response.status_code == 200
    assert logged(services, "left-early")["status"] == 499


def slow(marker: Path, **server: Any) -> dict[str, Any]:
    """A configuration with one deployment, `slow`."""
    deployment = {"model": "faulty:Slow", "options": {"marker": str(marker)}, "warmup_batch_sizes": []}
    return {"deployments": {"slow": deployment}, "server": server}


def test_a_stream_in_flight_at_sigterm_is_finished(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker")) as running:
        gate = running.gate()
        stream = lambda: generate(running, "slow", "generate_stream", x=gate.value)  # noqa: E731
        with in_background(stream, lambda: running.popen.wait(60)) as ends:
            wait_for(gate.has_begun, what="the call")
            running.popen.send_signal(signal.SIGTERM)
            wait_for(lambda: running.get("/v2/health/ready").status_code == 503, 20, "not to be ready")
            assert generate(running, "slow", "generate_stream", x=0.0).status_code == 503
            gate.open()
        answer, status = ends
        result, end = events_of(answer)
        assert (result["y"], end["final"], status) == (gate.value, True, 0)


def test_a_stream_that_outlasts_the_shutdown_timeout_ends_explicitly(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker", shutdown_timeout_s=1)) as running:
        with in_background(lambda: generate(running, "slow", "generate_stream", x=25.0)) as answers:
            wait_for((tmp_path / "marker").exists, what="the call")
            assert running.stop() == 0
        error, end = events_of(answers[0])
        assert (error["status"], end["final"]) == (503, True)
