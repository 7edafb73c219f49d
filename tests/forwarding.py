"""A TCP port that leads to a unix socket, for clients that can't dial the latter."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["forward"]


@contextlib.contextmanager
def forward(path: Path) -> Iterator[str]:
    """Listen on a free loopback port until the block ends; yields ``host:port``."""
    with _Forwarder(path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()


class _Forwarder(socketserver.ThreadingTCPServer):
    daemon_threads = True  # a client that keeps its connection must not keep us

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(("127.0.0.1", 0), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Forwarder

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(self.server.path))
            back = threading.Thread(target=_copy, args=(there, self.request), daemon=True)
            back.start()
            _copy(self.request, there)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # either end may close when it likes
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
