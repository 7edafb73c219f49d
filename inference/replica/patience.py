"""Makes a replica's instances wait longer for the first of them than PyTriton does.

Triton starts all instances at once, each in its own process. All others ask the first one for its configuration over a
unix socket, and PyTriton fails the whole start if the socket is not there within a second, or if it is between ``bind``
and ``listen``. On a busy machine both are normal.

Triton runs copies of PyTriton's scripts in its model store. `make_patient` puts a copy of this file beside them, where
none of our modules is, and has them use it: this module imports the standard library only.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

__all__ = ["make_patient", "patient"]

_USE = """

# From here on Headwater's: inference/replica/patience.py.
from .headwater_patience import patient

get_config_from_handshake_server = patient(get_config_from_handshake_server)
"""


def make_patient(script: Path) -> None:
    """Patch a copy of PyTriton's ``communication.py`` to retry.

    Raises:
        OSError: the copy is missing or can't be written.
    """
    script.chmod(0o644)  # a copy has the mode of what it was made from, which may be for reading only
    with script.open("a", encoding="utf-8") as file:
        file.write(_USE)
    shutil.copyfile(__file__, script.with_name("headwater_patience.py"))


def patient(ask: Any, timeout_s: float = 30.0, pause_s: float = 0.02) -> Any:
    """Wrap ``get_config_from_handshake_server`` so that it is retried until it succeeds.

    After the timeout the last error is raised.
    """

    def ask_again(socket_path: Any) -> Any:
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return ask(socket_path)
            except (OSError, ValueError):  # missing, not yet listening, or late with its answer
                if time.monotonic() > until_s:
                    raise
                time.sleep(pause_s)

    return ask_again
