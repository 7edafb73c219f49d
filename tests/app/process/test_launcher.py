"""What becomes a replica's host: its environment, and what it imports before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headwater_server.process.launcher import with_changes

ROOT = Path(__file__).parents[3]


def test_an_environment_with_changes() -> None:
    assert with_changes({"a": "1", "b": "2"}, {"b": None, "c": "3", "d": None}) == {"a": "1", "c": "3"}


def test_nothing_but_the_standard_library_is_imported_before_the_other_python_is_asked() -> None:
    others = {"numpy", "msgspec", "headwater.environment", "asyncio"}
    code = f"import sys, headwater_server.process.launcher; print({others} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
