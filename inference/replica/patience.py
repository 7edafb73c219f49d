"""How an instance of a replica finds the first one: with more patience than PyTriton has.

`inference.replica.first_instance` copies this file beside PyTriton's scripts, where none of our modules is: it imports
the standard library only.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["patient"]


def patient(ask: Any, timeout_s: float = 30.0, pause_s: float = 0.02) -> Any:
    """Something that asks as ``ask`` does, again and again until it is answered.

    Args:
        ask: ``get_config_from_handshake_server``.
        timeout_s: after which it gives up, with the last error.
        pause_s: between two questions.
    """

    def ask_again(socket_path: Any) -> Any:
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return ask(socket_path)
            except (OSError, ValueError):  # not there, not yet listening, or too late with its answer
                if time.monotonic() > until_s:
                    raise
                time.sleep(pause_s)

    return ask_again
