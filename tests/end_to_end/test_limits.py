"""Bounds: of the queue, of time, of batches, of bodies and headers; and what identifies a request."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.running import Gate, Raw, Running, in_background, resident_bytes, wait_for

MAX_BODY_BYTES = 20_000_000  # of `services`
MEGABYTE = 1024 * 1024


def ask(services: Running, *x: float, **parameters: Any) -> httpx.Response:
    """A request to `slow`, a row for each x."""
    return services.infer("slow", list(x), shape=[len(x), 1], parameters=parameters)


def output(answer: httpx.Response, name: str) -> list[float]:
    """The numbers of one output."""
    assert answer.status_code == 200, answer.text
    data: list[float] = next(item["data"] for item in answer.json()["outputs"] if item["name"] == name)
    return data


@contextlib.contextmanager
def busy(services: Running) -> Iterator[Gate]:
    """Keep the only slot of `slow` taken until the gate is opened, or the block ends."""
    gate = services.gate()
    with in_background(lambda: ask(services, gate.value)) as answers:
        try:
            wait_for(gate.has_begun, what="slow to be busy")
            yield gate
        finally:
            gate.open()
    assert answers[0].status_code == 200, answers[0].text


def wait_in_flight(services: Running, count: int) -> None:
    """Wait until `slow` has so many requests, one of which it computes."""
    wait_for(lambda: services.in_flight("slow") == count, what=f"{count} requests in flight")


def seen(services: Running) -> int:
    """How many rows `slow` has computed so far."""
    return int(output(ask(services, 0.0), "seen")[0])


# The queue


def test_a_full_queue_refuses_and_says_when_to_come_again(services: Running) -> None:
    with in_background(*[lambda: ask(services, 0.5)] * 24) as answers:
        pass
    refused = [answer for answer in answers if answer.status_code == 429]
    # 8 rows wait, and at most 4 compute when the others come.
    assert 24 - 8 - 4 <= len(refused) <= 24 - 8 - 1
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert "queue is full" in answer.json()["error"]
    assert ask(services, 0.0).status_code == 200


def test_a_request_that_never_fits_the_queue_is_the_clients_fault(services: Running) -> None:
    answer = ask(services, *[0.0] * 9)
    assert answer.status_code == 400
    assert "at most 8 rows (max_queue_size" in answer.json()["error"]


def test_a_request_larger_than_a_batch_is_split_and_joined_in_order(services: Running) -> None:
    data = [float(number) for number in range(100)]
    answer = services.infer("tuned", data, shape=[100, 1], parameters={"factor": 3.0})
    assert output(answer, "y") == [3 * number for number in data]
    assert max(output(answer, "batch")) <= 16
    assert output(ask(services, *[0.0] * 8), "batch") == [4.0] * 8


# Coalescing


def test_requests_coalesce_while_the_replica_is_busy(services: Running) -> None:
    with busy(services) as gate, in_background(*[lambda: ask(services, 0.0)] * 4) as answers:
        wait_in_flight(services, 5)
        gate.open()
    assert [output(answer, "batch") for answer in answers] == [[4.0]] * 4


def test_rows_with_different_parameters_of_a_batch_never_share_a_call(services: Running) -> None:
    def scaled(scale: float) -> Callable[[], httpx.Response]:
        return lambda: ask(services, 0.01, scale=scale)

    with busy(services) as gate, in_background(*[scaled(scale) for scale in (2.0, 3.0, 2.0, 3.0)]) as answers:
        wait_in_flight(services, 5)
        gate.open()
    assert [output(answer, "y") for answer in answers] == [[pytest.approx(0.01 * scale)] for scale in (2, 3, 2, 3)]
    assert [output(answer, "batch") for answer in answers] == [[2.0]] * 4


def test_rows_with_different_parameters_of_their_own_share_a_call(services: Running) -> None:
    def shifted(shift: float) -> Callable[[], httpx.Response]:
        return lambda: ask(services, 0.0, shift=shift)

    with busy(services) as gate, in_background(*[shifted(float(shift)) for shift in range(4)]) as answers:
        wait_in_flight(services, 5)
        gate.open()
    assert [output(answer, "y") for answer in answers] == [[0.0], [1.0], [2.0], [3.0]]
    assert [output(answer, "batch") for answer in answers] == [[4.0]] * 4


def test_an_urgent_request_overtakes(services: Running) -> None:
    with busy(services) as gate, in_background(lambda: ask(services, *[0.0] * 4, priority=9)) as patient:
        wait_in_flight(services, 2)  # it comes first
        with in_background(lambda: ask(services, 0.0, priority=1)) as urgent:
            wait_in_flight(services, 3)
            gate.open()
    assert output(urgent[0], "seen")[0] < output(patient[0], "seen")[0]


# Deadlines


def test_rows_that_expire_in_the_queue_are_never_computed(services: Running) -> None:
    before = seen(services)
    with busy(services):
        answer = ask(services, *[0.0] * 4, timeout=200_000)
        assert answer.status_code == 504
        assert "deadline of 0.2 s passed while it waited in the queue" in answer.json()["error"]
    # The row of `seen` itself, and that of `busy`.
    assert seen(services) - before == 1 + 1


def test_a_deadline_also_bounds_the_computing(services: Running) -> None:
    answer = ask(services, 0.5, timeout=100_000)
    assert answer.status_code == 504
    assert "while it was computed" in answer.json()["error"]
    assert ask(services, 0.0).status_code == 200


def test_rows_of_a_client_that_went_away_are_never_computed(services: Running) -> None:
    before = seen(services)
    with busy(services):
        for _ in range(2):
            tensor = {"name": "x", "datatype": "FP32", "shape": [4, 1], "data": [0.0] * 4}
            url = f"{services.url}/v2/models/slow/infer"
            with pytest.raises(httpx.ReadTimeout):
                services.client.post(url, json={"inputs": [tensor]}, timeout=0.2)

        def has_room() -> bool:
            answer = ask(services, *[0.0] * 8, timeout=200_000)
            assert answer.status_code in (429, 504), answer.text
            return answer.status_code == 504  # it waited

        wait_for(has_room, what="their places in the queue")
    assert seen(services) - before == 1 + 1


# Bodies

HEAD = "POST /v2/models/tuned/infer HTTP/1.1\r\nHost: here\r\n"


def test_a_body_over_the_limit_is_refused_before_it_is_sent(services: Running) -> None:
    with services.raw() as connection:
        connection.send(f"{HEAD}Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        status, _, body = connection.answer()
    assert status == 413
    assert f"at most {MAX_BODY_BYTES} bytes (server.max_body_bytes), got {MAX_BODY_BYTES + 1}" in body.decode()


def send_until_answered(connection: Raw, piece: bytes, most: int) -> int:
    """Send pieces until the server answers or closes. Returns how many bytes were sent."""
    sent = 0
    connection.socket.setblocking(False)
    while sent < most:
        readable, writable, _ = select.select([connection.socket], [connection.socket], [], 30)
        if readable or not writable:
            break
        try:
            sent += connection.socket.send(piece)
        except BlockingIOError:
            continue
        except ConnectionError:  # closed since the look
            break
    connection.socket.settimeout(30)
    return sent


def test_a_body_without_a_length_is_refused_where_the_limit_is(services: Running) -> None:
    with services.raw() as connection:
        connection.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        # One endless chunk: no piece of it has to be framed.
        connection.send(b"7fffffff\r\n")
        sent = send_until_answered(connection, b" " * MEGABYTE, 100 * MEGABYTE)
        status, _, _ = connection.answer()
    assert status == 413
    assert sent < MAX_BODY_BYTES + 20 * MEGABYTE  # what the sockets hold


def test_what_a_body_unpacks_to_is_bounded(services: Running) -> None:
    url = f"{services.url}/v2/models/tuned/infer"
    packed = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    assert len(packed) < 100_000
    answer = services.client.post(url, content=packed, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 413


@pytest.mark.parametrize("length", ["Content-Length: 104857600", "Transfer-Encoding: chunked"])
def test_many_huge_bodies_at_once_do_not_fill_the_memory(services: Running, length: str) -> None:
    pid = services.workers()[0]
    before = resident_bytes(pid)
    highest = [before]

    def send() -> int:
        with services.raw() as connection:
            connection.send(f"{HEAD}{length}\r\n\r\n".encode())
            if "chunked" in length:
                connection.send(b"7fffffff\r\n")
            send_until_answered(connection, b" " * MEGABYTE, 100 * MEGABYTE)
            return connection.answer()[0]

    with in_background(*[send] * 8) as statuses:
        for _ in range(20):
            highest.append(resident_bytes(pid))
            time.sleep(0.02)
    assert statuses == [413] * 8
    # Each body may be in memory up to the limit, once in pieces.
    assert max(*highest, resident_bytes(pid)) - before < 8 * MAX_BODY_BYTES * 1.5
    assert services.is_ready()


@pytest.mark.parametrize("first", [b"", b'{"inputs": ['], ids=["nothing", "half"])
def test_a_body_that_does_not_come_ends_in_408(services: Running, first: bytes) -> None:
    with services.raw() as connection:
        connection.send(f"{HEAD}Content-Length: 1000\r\n\r\n".encode() + first)
        started = time.monotonic()
        status, _, body = connection.answer()
        assert time.monotonic() - started > 4  # client_timeout_s: 5
    assert (status, "within 5 s" in body.decode()) == (408, True)


@pytest.mark.parametrize("head", [b"POST /v2", HEAD.encode() + b"X-More: "], ids=["line", "headers"])
def test_headers_that_do_not_come_end_in_408(services: Running, head: bytes) -> None:
    with services.raw() as connection:
        connection.send(head)
        status, headers, body = connection.answer()
        assert (status, "within 5 s" in body.decode()) == (408, True)
        assert headers["connection"] == "close"
        assert connection.socket.recv(1) == b""


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data", "nonsense"])
def test_a_wrong_content_type_is_refused(services: Running, content_type: str) -> None:
    for path in ("/v2/models/tuned/infer", "/v1/embeddings"):
        answer = services.client.post(services.url + path, content=b"{}", headers={"Content-Type": content_type})
        assert answer.status_code == 415
        assert "header Content-Type: expected application/json" in answer.text


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", None])
def test_a_page_of_another_site_must_name_the_type(services: Running, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    for path in ("/v2/models/tuned/infer", "/v1/embeddings"):
        by_curl = services.client.post(services.url + path, content=b"{}", headers=headers)
        by_page = services.client.post(
            services.url + path, content=b"{}", headers={"Origin": "http://elsewhere", **headers}
        )
        assert (by_curl.status_code, by_page.status_code) == (400, 415)


def test_a_wrong_content_encoding_is_refused(services: Running) -> None:
    url = f"{services.url}/v2/models/tuned/infer"
    answer = services.client.post(url, content=b"{}", headers={"Content-Encoding": "br"})
    assert (answer.status_code, "header Content-Encoding: expected gzip" in answer.text) == (415, True)


# Headers


def test_headers_over_the_limit_are_refused(services: Running) -> None:
    answer = services.client.get(services.url + "/v2", headers={"X-Large": "x" * 40_000})
    assert (answer.status_code, "at most 32768 bytes" in answer.json()["error"]) == (431, True)
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("head", [b"GET /v2 HTTP/1.1\r\nHost: here\r\nX-Large: ", b"GET /v2/"], ids=["header", "path"])
def test_headers_without_an_end_are_refused_where_the_limit_is(services: Running, head: bytes) -> None:
    before = resident_bytes(services.workers()[0])
    with services.raw() as connection:
        connection.send(head)
        sent = send_until_answered(connection, b"x" * MEGABYTE, 100 * MEGABYTE)
    assert sent < 20 * MEGABYTE
    assert resident_bytes(services.workers()[0]) - before < 20 * MEGABYTE
    assert services.is_ready()


def test_a_head_in_pieces_that_ends_is_taken(services: Running) -> None:
    with services.raw() as connection:
        for piece in (b"GET /v2 HT", b"TP/1.1\r\nHo", b"st: here\r\nX-A: " + b"a" * 10_000, b"\r\n\r\n"):
            connection.send(piece)
            time.sleep(0.05)  # so that they arrive apart
        assert connection.answer("GET")[0] == 200


# Routes and methods


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nothing", 404),
        ("POST", "/v2/models/nothing/infer", 404),
        ("POST", "/v2/models/tuned/versions/2/infer", 404),
        ("GET", "/v2/models/tuned/versions/2", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/tuned/infer", 405),
        ("DELETE", "/v2", 405),
        ("PUT", "/v2/health/live", 405),
        ("PATCH", "/v2/models/tuned", 405),
        ("OPTIONS", "/v2/models/tuned/infer", 405),
    ],
)
def test_v2_says_what_is_not_there(services: Running, method: str, path: str, status: int) -> None:
    answer = services.client.request(method, services.url + path)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert answer.headers["x-request-id"]
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/v1/embeddings", 405),
        ("DELETE", "/v1/models/tuned", 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "/v1/embeddings", 405),
    ],
)
def test_v1_says_what_is_not_there_as_openai_does(services: Running, method: str, path: str, status: int) -> None:
    answer = services.client.request(method, services.url + path)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found" if error["param"] else None)
    assert error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/models/tuned/infer", "/v1/models", "/docs", "/"])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE"])
def test_rare_methods_crash_nothing(services: Running, method: str, path: str) -> None:
    answer = services.client.request(method, services.url + path)
    assert answer.status_code in (200, 307, 405), answer.text
    if method == "HEAD":
        assert answer.content == b""


def test_what_is_no_http_gets_400(services: Running) -> None:
    with services.raw() as connection:
        connection.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
        status, headers, body = connection.answer()
    assert (status, list(json.loads(body))) == (400, ["error"])
    assert headers["connection"] == "close"


# Request ids


def test_a_sound_request_id_is_echoed(services: Running) -> None:
    answer = services.client.get(services.url + "/v2", headers={"X-Request-Id": "client-42/a"})
    assert answer.headers["x-request-id"] == "client-42/a"


@pytest.mark.parametrize("given", [b"", b"with space", b"x" * 129, b"caf\xe9", b"tab\there"])
def test_an_unsound_request_id_is_replaced(services: Running, given: bytes) -> None:
    answer = services.client.get(services.url + "/v2", headers={b"X-Request-Id": given})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].encode("latin-1") not in (given, b"")


def test_every_request_gets_an_id_of_its_own(services: Running) -> None:
    ids = {services.get("/v2").headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20
