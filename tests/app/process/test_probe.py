"""The guardian's own calls: which replica is out of order."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater_server.process.probe import (
    HTTP_SOCKET,
    PATIENCE_LOOKS,
    PAUSE_LOOKS,
    PROBE_FILE,
    REFUSALS,
    RETRY_LOOKS,
    Probe,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Bench:
    """A replica's folder, whose Triton the test plays."""

    def __init__(self, folder: Path) -> None:
        (folder / PROBE_FILE).write_bytes(b"POST / HTTP/1.1\r\n\r\n")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / HTTP_SOCKET))
        self.listener.listen()
        self.probe = Probe(folder)

    def begin(self) -> socket.socket:
        """Look until the next call, and return its connection."""
        self.listener.settimeout(0)
        for _ in range(PAUSE_LOOKS + 1):
            assert self.probe.look(is_busy=False) is None
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                continue
            connection.settimeout(20)
            assert connection.recv(100) == b"POST / HTTP/1.1\r\n\r\n"
            return connection
        raise AssertionError("no call")


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:  # a socket's path must be short
        found = Bench(Path(folder))
        yield found
        found.probe.close()
        found.listener.close()


def test_a_replica_that_answers_is_in_order(bench: Bench) -> None:
    for _ in range(3):
        with bench.begin() as connection:
            connection.sendall(OK)
            assert bench.probe.look(is_busy=False) is None


def test_a_replica_that_computes_nothing_and_does_not_answer_is_out_of_order(bench: Bench) -> None:
    with bench.begin():
        found = [bench.probe.look(is_busy=False) for _ in range(PATIENCE_LOOKS)]
    assert found[:-1] == [None] * (PATIENCE_LOOKS - 1)
    assert "got no answer, and it did not compute" in str(found[-1])


def test_a_replica_that_computes_may_take_its_time(bench: Bench) -> None:
    with bench.begin() as connection:
        assert [bench.probe.look(is_busy=True) for _ in range(3 * PATIENCE_LOOKS)] == [None] * (3 * PATIENCE_LOOKS)
        connection.sendall(OK)
        assert bench.probe.look(is_busy=False) is None


@pytest.mark.parametrize("answer", [b"HTTP/1.1 500 Internal Server Error\r\n\r\n", b""])
def test_a_replica_whose_calls_fail_is_out_of_order_in_the_end(bench: Bench, answer: bytes) -> None:
    for count in range(1, REFUSALS + 1):
        with bench.begin() as connection:
            connection.sendall(answer)
        found = bench.probe.look(is_busy=False)
        assert (found is None) is (count < REFUSALS)
    assert f"{REFUSALS} calls of its guardian through Triton failed, the last: " in str(found)


def test_a_call_that_is_answered_makes_up_for_those_that_failed(bench: Bench) -> None:
    for answer in (*[b"HTTP/1.1 503 Service Unavailable\r\n\r\n"] * (REFUSALS - 1), OK) * 2:
        with bench.begin() as connection:
            connection.sendall(answer)
        assert bench.probe.look(is_busy=False) is None


def test_a_replica_whose_triton_refuses_connections_is_out_of_order(bench: Bench) -> None:
    bench.listener.close()
    found = [bench.probe.look(is_busy=False) for _ in range(PAUSE_LOOKS + (REFUSALS - 1) * RETRY_LOOKS)]
    assert found[:-1] == [None] * (len(found) - 1)
    assert "Connection refused" in str(found[-1])


def test_a_call_that_waits_for_a_place_among_other_connections_has_not_failed(bench: Bench) -> None:
    others = []
    with contextlib.suppress(BlockingIOError):
        while True:
            others.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            others[-1].connect(bench.listener.getsockname())
    looks = PAUSE_LOOKS + PATIENCE_LOOKS // 2
    assert {bench.probe.look(is_busy=False) for _ in range(looks)} == {None}
    for other in others:
        other.close()
    bench.listener.settimeout(20)
    for _ in others[:-1]:
        bench.listener.accept()[0].close()
    assert bench.probe.look(is_busy=False) is None
    with bench.listener.accept()[0] as connection:
        assert connection.recv(100) == b"POST / HTTP/1.1\r\n\r\n"
        connection.sendall(OK)
        assert bench.probe.look(is_busy=False) is None


def test_a_replica_that_can_not_be_called_so_is_left_alone(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    assert {probe.look(is_busy=False) for _ in range(3 * PATIENCE_LOOKS)} == {None}
