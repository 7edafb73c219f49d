"""The drill's clients count every request once, and notice each kind of loss."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.drill.load import load
from tests.running import wait_for


@contextmanager
def server(behaviour: str) -> Iterator[int]:
    """An HTTP server that answers every other request of a connection rightly, the others as told. Gives its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        asked = 0

        def do_POST(self) -> None:
            (tensor,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
            self.asked += 1
            is_wrong = self.asked % 2 == 0
            if is_wrong and behaviour == "closes":
                self.close_connection = True
                return
            data = [0.0] if is_wrong and behaviour == "wrong" else tensor["data"]
            body = json.dumps({"outputs": [{"data": data}]}).encode()
            self.send_response(503 if is_wrong and behaviour == "unavailable" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield listener.server_address[1]
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def test_right_answers_are_counted() -> None:
    with server("right") as port, load(port, "m", 3) as seen:
        wait_for(lambda: seen.answered >= 30)
    assert seen.lost == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "why"), [("closes", "RemoteDisconnected"), ("unavailable", "503 "), ("wrong", "a wrong answer")]
)
def test_a_loss_is_counted_and_the_client_goes_on(behaviour: str, why: str) -> None:
    with server(behaviour) as port, load(port, "m", 3) as seen:
        wait_for(lambda: seen.answered >= 30)
    assert len(seen.lost) >= 20
    assert all(one.startswith(why) for one in seen.lost)
