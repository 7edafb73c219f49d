"""Retries an instance's request to the first instance for longer than PyTriton does.

`inference.replica.first_instance` copies this file beside PyTriton's scripts, where none of our modules is: it imports
the standard library only.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["patient"]


def patient(ask: Any, timeout_s: float = 30.0, pause_s: float = 0.02) -> Any:
    """Wrap ``ask`` so that it is retried until it succeeds.

    Args:
        ask: ``get_config_from_handshake_server``.
        timeout_s: after this long the last error is raised.
        pause_s: the pause between two attempts.
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
