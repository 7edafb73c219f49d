"""What the planner reads from a server that it started."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from headwater_server.cli.plan import measured_server
from headwater_server.cli.plan.measured_server import STOP_TIMEOUT_S, serve_point
from headwater_server.errors import CommandError


def test_why_a_replica_did_not_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [
        {"level": "info", "message": "listening on http://127.0.0.1:8123"},
        {"level": "warning", "message": "a-1: did not start (1 of 5): of another level"},
        {"level": "error", "message": "a-1: did not start (2 of 5): model a:B: no such class (line 3): fix it"},
    ]
    log.write_text("not JSON\n" + "\n".join(map(json.dumps, lines[:2])))
    assert measured_server._start_failure(log) is None
    assert measured_server._address(log) == "http://127.0.0.1:8123"
    log.write_text("\n".join(map(json.dumps, lines)))
    assert measured_server._start_failure(log) == "model a:B: no such class (line 3): fix it"


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    wanted = r"the server ended with status 1: .*nowhere.yaml: can't be read"
    with pytest.raises(CommandError, match=wanted), serve_point(str(tmp_path / "nowhere.yaml"), {}, 60):
        sys.exit("it started")


@pytest.mark.slow
def test_a_server_is_stopped_without_the_delay_of_its_configuration() -> None:
    with serve_point("headwater.zoo.scale:Scale", {"server.drain_delay_s": 600}, 120):
        left_s = time.monotonic()
    assert time.monotonic() - left_s < STOP_TIMEOUT_S  # after which it is killed
