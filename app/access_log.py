"""The access log: one line a request, written in groups so that it costs little."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

__all__ = ["AccessLog"]

FLUSH_AFTER_S = 0.1


class AccessLog:
    """Writes lines for people to a terminal, JSON otherwise.

    Args:
        stream: where to; default: standard error.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_human = self._stream.isatty()
        self._lines: list[str] = []

    def write(self, scope: Mapping[str, Any], status: int, took_s: float, state: Mapping[str, Any]) -> None:
        """Log one answer. ``status`` 499 stands for a client that went away; no query string is logged."""
        method, path, request_id = scope["method"], scope["path"], state["request_id"]
        client = scope.get("client")
        note = state.get("note", "")
        if self._is_human:
            now = time.strftime("%H:%M:%S")
            line = f"{now} {method} {_safe(path)} {status} {took_s * 1000:.1f} ms {_safe(note)} {request_id}\n"
        else:
            line = (
                json.dumps(
                    {
                        "time": round(time.time(), 3),
                        "logger": "access",
                        "method": method,
                        "path": path,
                        "status": status,
                        "ms": round(took_s * 1000, 2),
                        "client": client[0] if client else None,
                        "note": note,
                        "request_id": request_id,
                    }
                )
                + "\n"
            )
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self.flush)
        self._lines.append(line)

    def flush(self) -> None:
        """Write what has gathered."""
        lines, self._lines = self._lines, []
        if lines:
            self._stream.write("".join(lines))
            self._stream.flush()


def _safe(text: str) -> str:
    """Paths and messages may hold what a client sent: nothing in it may forge a line or command the terminal."""
    return text if text.isprintable() else ascii(text)
