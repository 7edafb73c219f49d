"""A callable that fails harms nobody but the row it failed on, however often it does."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.running import Running, resident_bytes

POISON, BAD_INPUT, SYSTEM_EXIT, WRONG_OUTPUT = -1.0, -2.0, -3.0, -4.0
MEGABYTE = 1024 * 1024


def body(*data: float, **changes: Any) -> dict[str, Any]:
    """A request of one row to `faulty`."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(data)], "data": list(data), **changes}]}


def post_all(running: Running, bodies: Sequence[dict[str, Any]], connections: int) -> list[httpx.Response]:
    """Send all bodies to `faulty` over so many connections. Returns the answers in order."""

    async def send() -> list[httpx.Response]:
        url = f"{running.url}/v2/models/faulty/infer"
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        waiting = iter(list(enumerate(bodies)))
        answers: dict[int, httpx.Response] = {}

        async def one_after_another() -> None:
            # A client for each connection: one for all takes several times the requests' own time to choose from many.
            async with httpx.AsyncClient(timeout=60, verify=no_tls, trust_env=False) as client:
                for index, content in waiting:
                    answers[index] = await client.post(url, json=content)

        await asyncio.gather(*(one_after_another() for _ in range(connections)))
        return [answers[index] for index in range(len(bodies))]

    return asyncio.run(send())


def outputs_of(answer: httpx.Response) -> list[float]:
    """The numbers of the only output."""
    data: list[float] = answer.json()["outputs"][0]["data"]
    return data


def test_of_500_concurrent_requests_only_the_bad_ones_fail(services: Running) -> None:
    poisoned = range(0, 500, 20)
    malformed = range(10, 500, 20)
    bodies = []
    for index in range(500):
        if index in poisoned:
            bodies.append(body(POISON, index))
        elif index in malformed:
            bodies.append(body(1.0, index, shape=[1, 3]))
        else:
            bodies.append(body(1.0, index))

    answers = post_all(services, bodies, connections=500)

    for index, answer in enumerate(answers):
        assert answer.headers["x-request-id"]
        assert "Traceback" not in answer.text
        if index in poisoned:
            assert (answer.status_code, answer.json()) == (500, {"error": "ValueError: poison"})
        elif index in malformed:
            assert answer.status_code == 400, answer.text
            assert "inputs[0].data" in answer.json()["error"]
        else:
            assert answer.status_code == 200, answer.text
            assert outputs_of(answer) == [2.0, 2.0 * index]


@pytest.mark.parametrize(
    ("first", "status", "message"),
    [
        pytest.param(POISON, 500, "ValueError: poison", id="exception"),
        pytest.param(SYSTEM_EXIT, 500, "SystemExit: a callable tried to leave", id="SystemExit"),
        pytest.param(BAD_INPUT, 400, "x: expected no -2", id="BadInput"),
        pytest.param(WRONG_OUTPUT, 500, "output 'y': expected FP32", id="wrong-datatype"),
    ],
)
def test_neighbours_in_the_same_batch_are_unharmed(services: Running, first: float, status: int, message: str) -> None:
    bodies = [body(first if index % 8 == 3 else 1.0, index) for index in range(64)]
    for index, answer in enumerate(post_all(services, bodies, connections=64)):
        if index % 8 == 3:
            assert answer.status_code == status, answer.text
            assert message in answer.json()["error"]
        else:
            assert answer.status_code == 200, answer.text
            assert outputs_of(answer) == [2.0, 2.0 * index]


def test_the_failing_row_of_a_larger_request_is_named(services: Running) -> None:
    answer = services.infer("faulty", [1, 1, POISON, 1], shape=[4, 1])
    assert (answer.status_code, answer.json()["error"]) == (500, "row 2: ValueError: poison")


def test_the_request_id_of_a_failure_is_the_clients(services: Running) -> None:
    url = f"{services.url}/v2/models/faulty/infer"
    answer = services.client.post(url, json=body(POISON), headers={"X-Request-Id": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-1")


def test_thousands_of_failures_leave_no_trace(services: Running) -> None:
    folder = services.replica_folder("faulty")
    log = folder / "triton.log"
    members = {name: services.process("faulty", name) for name in ("host", "tritonserver", "stub")}
    members["worker"] = services.workers()[0]
    post_all(services, [body(POISON)] * 500, connections=32)  # what the first failures allocate
    log_bytes = log.stat().st_size
    memory = {name: resident_bytes(pid) for name, pid in members.items()}

    rates = []
    for _ in range(5):
        started = time.monotonic()
        answers = post_all(services, [body(POISON)] * 600, connections=32)
        rates.append(600 / (time.monotonic() - started))
        assert {(answer.status_code, answer.text) for answer in answers} == {(500, '{"error":"ValueError: poison"}')}

    print(f"failures per second: {rates[0]:.0f} in the first 600, {rates[-1]:.0f} in the last")
    assert log.stat().st_size == log_bytes
    assert {
        name: services.process("faulty", name) for name in ("host", "tritonserver", "stub")
    }.items() <= members.items()
    grown = {name: (resident_bytes(pid) - memory[name]) / MEGABYTE for name, pid in members.items()}
    assert max(grown.values()) < 20, grown


def test_a_replica_answers_right_after_failures(services: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: services.infer("faulty", [POISON], shape=[1, 1]), range(8)))
    assert outputs_of(services.infer("faulty", [3.0], shape=[1, 1])) == [6.0]
