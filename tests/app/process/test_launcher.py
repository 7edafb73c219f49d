"""What becomes a replica's host: its environment, and what it imports before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater_server.process.launcher import with_changes

ROOT = Path(__file__).parents[3]


def test_an_environment_with_changes() -> None:
    assert with_changes({"a": "1", "b": "2"}, {"b": None, "c": "3", "d": None}) == {"a": "1", "c": "3"}


def test_nothing_but_the_standard_library_is_imported_before_the_other_python_is_asked() -> None:
    others = {"numpy", "msgspec", "headwater.environment", "asyncio"}
    code = f"import sys, headwater_server.process.launcher; print({others} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def test_descriptors_that_the_launcher_lacks_are_reported_as_a_shortage(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({"environment": {}}))
    read, write = os.pipe()
    with open(read, "rb") as statuses:
        python = sys.executable
        command = [python, "-m", "headwater_server.process.launcher", python, "name", str(tmp_path), str(write)]
        limited = ["sh", "-c", 'ulimit -n 9 && exec "$@"', "sh", *command]
        subprocess.run(limited, pass_fds=(write,), timeout=60, check=False)
        os.close(write)
        status = json.loads(statuses.read())
    assert "the machine lacks file descriptors (ulimit -n)" in status["text"]
    assert status["is_shortage"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "reason", "fix"),
    [
        (
            "PYTHONHOME",
            "it doesn't answer as Python does: ModuleNotFoundError: No module named 'encodings'",
            "PYTHONHOME",
        ),
        ("PYTHONPATH", "numpy can't be imported there from {}/numpy.py: ImportError: no", "{} from PYTHONPATH"),
    ],
)
def test_an_environment_in_which_our_own_python_cannot_run_a_model(
    variable: str, reason: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no')")
    (tmp_path / "spec.json").write_text(json.dumps({"environment": {variable: str(tmp_path)}}))
    read, write = os.pipe()
    with open(read, "rb") as statuses:
        command = [sys.executable, "-m", "headwater_server.process.launcher", "", "name", str(tmp_path), str(write)]
        subprocess.run(command, pass_fds=(write,), timeout=60, check=False)
        os.close(write)
        status = json.loads(statuses.read())
    said = f"the model's Python, {sys.executable}: {reason}; remove {fix}".replace("{}", str(tmp_path))
    assert status["event"] == "failed"
    assert status["text"].startswith(said)
