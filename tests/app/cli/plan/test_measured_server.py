"""What the planner reads from a server that it started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.plan import measured_server
from headwater_server.cli.plan.measured_server import STOP_TIMEOUT_S, serve_point
from headwater_server.errors import CommandError


class Ready:
    """A client of a server that is ready."""

    def __init__(self, url: str, *, key: str) -> None:
        """Nothing is asked there."""

    def get(self, path: str) -> tuple[int, object]:
        return 200, {}

    def index(self) -> list[dict[str, object]]:
        return []


def test_where_a_server_listens_and_why_a_replica_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"level": "info", "message": "listening on http://127.0.0.1:8123"},
        {"level": "warning", "message": "a-1: did not start (1 of 5): of another level"},
        {"level": "error", "message": "a-1: did not start (2 of 5): model a:B: no such class (line 3): fix it"},
    ]
    popen, told = subprocess.Popen, ["not JSON", *map(json.dumps, lines[:2])]

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        script = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
        return popen([sys.executable, "-c", script, "\n".join(told)], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(measured_server, "ServerClient", Ready)
    with serve_point("a:B", {}, 60) as server:
        assert server.url == "http://127.0.0.1:8123"
    told[:] = map(json.dumps, lines)
    with pytest.raises(CommandError) as caught, serve_point("a:B", {}, 60):
        sys.exit("it started")
    assert str(caught.value) == "model a:B: no such class (line 3): fix it"


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    wanted = r"the server ended with status 1: .*nowhere.yaml: can't be read"
    with pytest.raises(CommandError, match=wanted), serve_point(str(tmp_path / "nowhere.yaml"), {}, 60):
        sys.exit("it started")


@pytest.mark.slow
def test_a_server_is_stopped_without_the_delay_of_its_configuration() -> None:
    with serve_point("headwater.zoo.scale:Scale", {"server.drain_delay_s": 600}, 120):
        left_s = time.monotonic()
    assert time.monotonic() - left_s < STOP_TIMEOUT_S  # after which it is killed
