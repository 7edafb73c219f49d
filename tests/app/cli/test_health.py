"""``headwater health``: the exit status says whether the server is ready, and standard error why not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headwater_server.cli.health import default_url, health_status, unhealthy
from headwater_server.cli.main import main


class Answering(HTTPServer):
    """Answers every request alike."""

    status = 200
    body = b""
    paths: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Answering]:
    answering = Answering(("127.0.0.1", 0), Handler)
    answering.paths = []
    thread = threading.Thread(target=answering.serve_forever, args=(0.01,))
    thread.start()
    yield answering
    answering.shutdown()
    thread.join()
    answering.server_close()


def test_a_server_that_is_ready(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["health", "--url", f"{server.url}/"])
    assert ended.value.code == 0
    assert server.paths == ["/v2/health/ready"]
    assert capsys.readouterr() == ("", "")


def test_a_server_that_is_not_ready_says_why(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 503
    server.body = json.dumps({"error": "model `scale` is LOADING: checking the environment"}).encode()
    assert health_status(server.url) == 1
    assert "model `scale` is LOADING" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"\xff"])
def test_what_is_no_headwater(server: Answering, body: bytes) -> None:
    server.status, server.body = 404, body
    assert unhealthy(server.url) == f"{server.url}: status 404"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1", "ftp2://x"])
def test_nobody_there(url: str) -> None:
    assert "no answer" in unhealthy(url)


@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "http://a:b", "http://a b", "http://.."])
def test_what_is_no_url(url: str) -> None:
    assert unhealthy(url).startswith(f"--url: expected a server's URL such as http://127.0.0.1:8000, got {url!r}: ")


def test_what_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def speak() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 ready\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        assert "no answer: 220 ready" in unhealthy(f"http://127.0.0.1:{port}")
        thread.join()


def test_the_port_is_the_one_that_the_environment_says() -> None:
    assert default_url({}) == "http://127.0.0.1:8000"
    assert default_url({"HEADWATER_SERVER__PORT": "9000"}) == "http://127.0.0.1:9000"
    assert default_url({"HEADWATER_SERVER__TLS__CERTIFICATE": "c.pem"}) == "https://127.0.0.1:8000"


def test_a_proxy_is_not_asked(server: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert unhealthy(server.url) == ""


def test_as_a_module_it_imports_the_standard_library_only(server: Answering) -> None:
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('headwater_server.cli.health', run_name='__main__')\n"
        "except SystemExit as ended: status = ended.code\n"
        "heavy = {'pydantic', 'httpx', 'yaml', 'msgspec', 'fastapi', 'torch'} & set(sys.modules)\n"
        "sys.exit(status or repr(heavy) * bool(heavy) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
