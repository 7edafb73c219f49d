"""The socket that the server listens on."""

from __future__ import annotations

import socket

from headwater_server.supervisor.preflight import open_listener


def test_a_client_that_vanishes_without_a_word_is_noticed() -> None:
    with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
