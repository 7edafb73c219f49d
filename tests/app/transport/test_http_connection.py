"""A client's connection, against a transport that is none."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.transport.http_connection import HttpConnection

ANSWER = (
    b"HTTP/1.1 201 Created\r\nX-Name: value\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
)
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_aborted = False

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0  # each request is sent at once

    def abort(self) -> None:
        self.is_aborted = True


class Connection(HttpConnection):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.transport = Transport()
        self.connection_made(self.transport)
        self.headers: list[tuple[bytes, bytes]] = []
        self.answers: list[tuple[int, bytes]] = []
        self.ends: list[Exception | None] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def answered(self) -> None:
        self.answers.append((self.status, self.take_body()))

    def ended(self, error: Exception | None) -> None:
        self.ends.append(error)


@given(st.lists(st.integers(0, len(ANSWER))))
def test_an_answer_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    connection = Connection()
    for request in (b"GET /a HTTP/1.1\r\n\r\n", b"GET /b HTTP/1.1\r\n\r\n"):
        connection.begin([request[:5], memoryview(request)[5:]])
        places = [0, *sorted(cuts), len(ANSWER)]
        for begin, end in itertools.pairwise(places):
            if begin < end:
                connection.data_received(ANSWER[begin:end])
        assert connection.is_kept
    assert connection.transport.sent == b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n"
    assert connection.answers == [(201, b"abcdefg")] * 2
    assert (b"X-Name", b"value") in connection.headers
    assert connection.ends == []


def test_a_connection_that_the_server_will_close_is_not_kept() -> None:
    connection = Connection()
    connection.begin([b"GET / HTTP/1.1\r\n\r\n"])
    connection.data_received(CLOSING)
    assert connection.answers == [(200, b"hi")]
    assert not connection.is_kept


@pytest.mark.parametrize("is_asked", [False, True])
def test_data_that_no_request_asked_for_end_the_connection(is_asked: bool) -> None:
    connection = Connection()
    if is_asked:
        connection.begin([b"GET / HTTP/1.1\r\n\r\n"])
        connection.data_received(ANSWER + ANSWER)
        assert connection.answers == [(201, b"abcdefg")]
    else:
        connection.data_received(ANSWER)
        assert connection.answers == []
    assert connection.ends == [None]
    assert connection.transport.is_aborted
    assert connection.is_lost


def test_data_that_are_not_http_end_the_connection_with_the_parsers_error() -> None:
    connection = Connection()
    connection.begin([b"GET / HTTP/1.1\r\n\r\n"])
    connection.data_received(b"SSH-2.0-OpenSSH_9.2\r\n")
    assert [isinstance(error, httptools.HttpParserError) for error in connection.ends] == [True]
    assert connection.transport.is_aborted


def test_the_end_is_told_once() -> None:
    connection = Connection()
    connection.begin([b"GET / HTTP/1.1\r\n\r\n"])
    connection.close()
    connection.connection_lost(OSError("reset"))
    connection.close()
    assert connection.ends == [None]
