"""Logs and traces of a whole server: each line of the log is JSON, and spans reach a collector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.running import serve, wait_for

SECRET = "a word that nobody shall read"


class Collector(HTTPServer):
    """Takes what is sent."""

    received: list[bytes]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector(("127.0.0.1", 0), Handler)
    server.received = []
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_line_is_json_and_every_request_a_trace(collector: Collector) -> None:
    config = {
        "server": {
            "log_format": "json",
            "tracing": {"endpoint": f"http://127.0.0.1:{collector.server_port}"},
        },
        "deployments": {"scale": {"model": "headwater.zoo.scale:Scale", "warmup_batch_sizes": []}},
    }
    with serve(config) as running:
        assert running.infer("scale", [1.0, 2.0], shape=[1, 2]).status_code == 200
        body = {"inputs": [{"name": SECRET, "datatype": "FP32", "shape": [1], "data": [SECRET]}]}
        refused = running.client.post(
            f"{running.url}/v2/models/scale/infer", json=body, headers={"X-Request-Id": "refused-1"}
        )
        assert refused.status_code == 400
        assert SECRET in refused.text
        wait_for(lambda: "refused-1" in running.log.read_text(), 60, "the access log")
        assert running.stop() == 0
        log = running.log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if line]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert SECRET not in log
    (line,) = [line for line in lines if line.get("request_id") == "refused-1"]
    assert line["error"] == "BadRequest"
    assert refused.headers["traceresponse"][3:35] == line["trace_id"]
    assert any(line["message"].endswith(": scale") and line.get("models") == ["scale"] for line in lines)
    # The worker sends what it has before it ends.
    spans = b"".join(collector.received)
    assert b"infer scale" in spans
    assert b"scale-1" in spans
    assert bytes.fromhex(line["trace_id"]) in spans
    assert SECRET.encode() not in spans
