"""Holds a replica's processes at the stage of its start that the variable HOLD names, for a test to end them there.

With this folder on PYTHONPATH, Python runs this as it starts.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

__all__ = ["hold"]


def hold(stage: str) -> None:
    """Where HOLD names this stage, leave this process's id in ``begun``, and wait for a file ``open``."""
    folder = os.environ.get("TEST_GATES", "")
    if os.environ.get("HOLD") != stage or os.path.exists(f"{folder}/open"):
        return
    with open(f"{folder}/new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/new", f"{folder}/begun")
    while not os.path.exists(f"{folder}/open"):
        time.sleep(0.01)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "import" and arguments[0] == "pytriton":
        hold("import")
    elif event == "os.exec":
        hold("execute")


if "headwater_server.process.launcher" in sys.orig_argv:
    os.register_at_fork(after_in_child=lambda: hold("fork"))
if "headwater_server.binder" in sys.orig_argv:
    sys.addaudithook(_on_event)
