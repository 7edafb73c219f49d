"""A TCP port that leads elsewhere: to a unix socket, for clients that can't dial it, or to a server that may go."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["forward"]


@contextlib.contextmanager
def forward(target: Path | tuple[str, int], port: int = 0) -> Iterator[str]:
    """Listen on a loopback port until the block ends, which ends all connections; yields ``host:port``.

    Args:
        target: a unix socket's path, or a TCP address.
        port: 0 takes a free one.
    """
    with _Forwarder(target, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()
            server.cut()


class _Forwarder(socketserver.ThreadingTCPServer):
    daemon_threads = True  # a client that keeps its connection must not keep us
    allow_reuse_address = True

    def __init__(self, target: Path | tuple[str, int], port: int) -> None:
        self.target = target
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Connection)

    def dial(self) -> socket.socket:
        """A connection to where it leads."""
        if isinstance(self.target, tuple):
            return socket.create_connection(self.target)
        there = socket.socket(socket.AF_UNIX)
        try:
            there.connect(str(self.target))
        except OSError:
            there.close()
            raise
        return there

    def cut(self) -> None:
        """End all connections."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    server: _Forwarder

    def handle(self) -> None:
        self.server.connections.add(self.request)
        try:
            with self.server.dial() as there:
                back = threading.Thread(target=_copy, args=(there, self.request), daemon=True)
                back.start()
                _copy(self.request, there)
                back.join()
        finally:
            self.server.connections.discard(self.request)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # either end may close when it likes
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
