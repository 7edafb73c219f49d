"""`benchmarks.smoke`: which benchmarks take part, and what their flag does; what ends a benchmark's servers."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.servers import free_port, running
from benchmarks.smoke import BENCHMARKS, parse_with_smoke
from tests.running import wait_for

FOLDER = Path(__file__).parents[1] / "benchmarks"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5)
    return parser


@pytest.mark.parametrize(
    ("given", "rounds", "seconds", "smoke"),
    [
        ([], 40, 5, False),
        (["--smoke"], 1, 0.5, True),
        (["--rounds", "7", "--smoke"], 7, 0.5, True),
        (["--seconds", "3"], 40, 3, False),
    ],
)
def test_the_flag_changes_what_is_not_given(
    monkeypatch: pytest.MonkeyPatch, given: list[str], rounds: int, seconds: float, smoke: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *given])
    options = parse_with_smoke(parser(), rounds=1, seconds=0.5)
    assert (options.rounds, options.seconds, options.smoke) == (rounds, seconds, smoke)


def test_an_option_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(ValueError, match=r"got round$"):
        parse_with_smoke(parser(), round=1)


def test_every_benchmark_with_the_flag_takes_part() -> None:
    has_flag = re.compile(r'parse_with_smoke\(|add_argument\("--smoke"')
    found = {
        path.parent.name if path.name == "__main__.py" else path.stem
        for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py"))
        if has_flag.search(path.read_text()) and path.stem != "smoke"
    }
    assert found == set(BENCHMARKS)


LEAVES_A_CHILD = """
import http.server, pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[2]).write_text(str(child.pid))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_server_leaves_no_process_behind(tmp_path: Path) -> None:
    port, note = free_port(), tmp_path / "pid"
    command = [sys.executable, "-c", LEAVES_A_CHILD, str(port), str(note)]
    with running(command, f"http://127.0.0.1:{port}/", cwd=tmp_path):
        child = psutil.Process(int(note.read_text()))
        assert child.is_running()
    wait_for(lambda: has_ended(child), what="the end of the child")


HAS_FAILED = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"ready": false, "error": "model `m` is FAILED: no weights"}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_whose_model_has_failed_is_not_waited_for(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with (
        pytest.raises(RuntimeError, match="model `m` is FAILED: no weights"),
        running([sys.executable, "-c", HAS_FAILED, str(port)], f"http://127.0.0.1:{port}/", cwd=tmp_path, log=log),
    ):
        pass
