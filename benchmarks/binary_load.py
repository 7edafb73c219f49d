"""Load of one binary request again and again, in a closed loop over connections, every answer compared byte by byte."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BinaryLoad", "run_binary"]

ANSWER_TIMEOUT_S = 30.0
RECEIVE_ROOM = 64 * 1024
"""For an answer's head and JSON."""


@dataclass
class BinaryLoad:
    """What one run found."""

    seconds: float
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return len(self.latencies_ms) / self.seconds

    def quantile_ms(self, fraction: float) -> float:
        """A quantile of the latency."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class _Connection:
    """One connection with a request under way."""

    def __init__(self, port: int, request: Sequence[bytes | memoryview], tail: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._request = memoryview(b"".join(request))
        self._tail = tail
        self._room = memoryview(bytearray(len(tail) + RECEIVE_ROOM))
        self._sent = self._received = 0
        self._length = 0  # of the answer, head and all; 0 while its head isn't complete
        self.began_s = 0.0

    def begin(self) -> None:
        """Send the next request, as far as that goes at once."""
        self._sent = self._received = self._length = 0
        self.began_s = time.perf_counter()
        self.send()

    @property
    def is_sending(self) -> bool:
        return self._sent < len(self._request)

    def send(self) -> None:
        """Send on."""
        try:
            while self.is_sending:
                self._sent += self.socket.send(self._request[self._sent :])
        except BlockingIOError:
            pass

    def receive(self) -> bool:
        """Read on. Returns whether the answer is there, complete and right."""
        try:
            while not self._length or self._received < self._length:
                count = self.socket.recv_into(self._room[self._received :])
                if not count:
                    raise SystemExit("the server closed the connection in the middle of an answer")
                self._received += count
                if not self._length:
                    self._read_head()
        except BlockingIOError:
            return False
        # As bytes: views are compared element by element.
        if bytes(self._room[self._length - len(self._tail) : self._length]) != self._tail:
            raise SystemExit("an answer's tensor is wrong")
        return True

    def _read_head(self) -> None:
        head, found, _ = bytes(self._room[: min(self._received, 4096)]).partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        if b" 200 " not in lines[0] + b" ":
            raise SystemExit(f"expected status 200, got {lines[0].decode()}: {bytes(self._room[: self._received])!r}")
        length = next(int(line.partition(b":")[2]) for line in lines if line.lower().startswith(b"content-length"))
        self._length = len(head) + 4 + length


def run_binary(
    port: int, path: str, text: bytes, tensor: bytes, tail: bytes, connections: int, seconds: float
) -> BinaryLoad:
    """Send one request over some connections, each waiting for its answer.

    Args:
        port: the server's on the loopback.
        path: where to post to.
        text: the body's JSON.
        tensor: the bytes that follow it.
        tail: what every answer must end with.
        connections: how many.
        seconds: how long; answers that come later are not counted.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + len(tensor)}\r\n\r\n"
    ).encode()
    load = BinaryLoad(seconds)
    opened = [_Connection(port, (head, text, tensor), tail) for _ in range(connections)]
    both = selectors.EVENT_READ | selectors.EVENT_WRITE
    with selectors.DefaultSelector() as selector:
        end_s = time.perf_counter() + seconds
        for connection in opened:
            selector.register(connection.socket, both, connection)
            connection.begin()
        while (now_s := time.perf_counter()) < end_s:
            for key, events in selector.select(ANSWER_TIMEOUT_S):
                connection = key.data
                if events & selectors.EVENT_WRITE:
                    connection.send()
                    if not connection.is_sending:
                        selector.modify(connection.socket, selectors.EVENT_READ, connection)
                if events & selectors.EVENT_READ and connection.receive():
                    now_s = time.perf_counter()
                    load.latencies_ms.append((now_s - connection.began_s) * 1000)
                    connection.begin()
                    if connection.is_sending:
                        selector.modify(connection.socket, both, connection)
    for connection in opened:
        connection.socket.close()
    if not load.latencies_ms:
        raise SystemExit(f"no answer within {seconds:g} s")
    return load
