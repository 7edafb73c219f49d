"""A /dev/shm of 16 MiB: what does not fit gets an error that says so, and all else is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.running import Running, in_mount_namespace, serve

SMALL = "mount -t tmpfs -o size=16m none /dev/shm"
LARGE_BYTES = 12_000_000


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    names = ("Texts", "Waits", "Streams")
    deployments = {name.lower(): {"model": f"lengthy:{name}", "warmup_batch_sizes": [1]} for name in names}
    config = {"deployments": deployments, "server": {"max_body_bytes": 50_000_000}}
    with serve(config, prefix=in_mount_namespace(SMALL)) as server:
        yield server


def ask(running: Running, model: str, length: int, text: str = "") -> httpx.Response:
    if model == "streams":
        return running.client.post(f"{running.url}/v2/models/streams/generate_stream", json={"n": length, "text": text})
    inputs: list[dict[str, Any]] = [
        {"name": "n", "datatype": "INT32", "shape": [1, 1], "data": [length]},
        {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]},
    ]
    return running.client.post(f"{running.url}/v2/models/{model}/infer", json={"inputs": inputs})


@pytest.mark.parametrize("model", ["texts", "waits", "streams"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_tensors_that_do_not_fit_get_an_error_that_says_so_and_the_next_request_is_answered(
    running: Running, model: str, side: str
) -> None:
    large = ask(running, model, LARGE_BYTES) if side == "output" else ask(running, model, 1, "a" * LARGE_BYTES)
    if model == "streams" and large.status_code == 200:  # the error took more than the time that the head waits for it
        error = json.loads(large.text.partition("\n")[0].removeprefix("data: "))
        assert error.pop("status") == 503
    else:
        error = large.json()
        assert large.status_code == 503
        assert large.headers["retry-after"]
    assert "/dev/shm is full" in error["error"]
    assert "--shm-size" in error["error"]
    assert "Triton" not in large.text
    small = ask(running, model, 3)
    assert small.status_code == 200
    assert "zzz" in small.text
