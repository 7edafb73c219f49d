"""The access log: one line a request, written in groups so that it costs little."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from app.config.sections import LogFormat
from app.errors import HeadwaterError
from app.logs import is_for_people, json_line, printable, utc, written_whole

__all__ = ["AccessLog"]

FLUSH_AFTER_S = 0.1
NOTE_CHARS = 200
_NO_FIELDS: Mapping[str, Any] = {}


class _Line(msgspec.Struct):
    """What is told of every request, where it isn't for people."""

    time: str
    level: str
    logger: str
    message: str
    method: str
    path: str
    status: int
    ms: float
    client: str | None
    note: str
    request_id: str


class AccessLog:
    """Writes a line for each request: for people, or as JSON.

    Args:
        stream: where to; default: standard error.
        log_format: whether for people.
        payloads: whether messages may be told that quote what a client sent, or a callable said. Otherwise of an error
            that may its name is told.
    """

    def __init__(
        self, stream: IO[str] | None = None, log_format: LogFormat = "auto", *, payloads: bool = False
    ) -> None:
        self._stream = written_whole(stream or sys.stderr)
        self._is_human = is_for_people(log_format, self._stream)
        self._payloads = payloads
        self._lines: list[str] = []

    def write(self, scope: Mapping[str, Any], status: int, took_s: float, state: Mapping[str, Any]) -> None:
        """Log one answer. ``status`` 499 stands for a client that went away; no query string is logged.

        Of ``state`` it tells ``request_id``, ``note``, ``error`` (a `HeadwaterError`) and ``log_fields`` (a mapping).
        """
        method, path = scope["method"], printable(scope["path"])
        error: HeadwaterError | None = state.get("error")
        note = state.get("note", "")
        fields: Mapping[str, Any] = state.get("log_fields", _NO_FIELDS)
        if error is not None:
            fields = {**fields, "error": self._said(error)}
        if self._is_human:
            told = "".join(f" {name}={printable(str(value))}" for name, value in fields.items())
            line = (
                f"{utc(time.time())[11:]} {method} {path} {status} {took_s * 1000:.1f} ms {printable(note)} "
                f"{state['request_id']}{told}\n"
            )
        else:
            client = scope.get("client")
            content = _Line(
                utc(time.time()),
                "info",
                "access",
                f"{method} {path} {status}",
                method,
                path,
                status,
                int(took_s * 100_000 + 0.5) / 100,  # `round` takes eight times as long
                client[0] if client else None,
                note,
                state["request_id"],
            )
            line = json_line({**msgspec.structs.asdict(content), **fields} if fields else content) + "\n"
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self.flush)
        self._lines.append(line)

    def flush(self) -> None:
        """Write what has gathered."""
        lines, self._lines = self._lines, []
        if lines:
            self._stream.write("".join(lines))
            self._stream.flush()

    def _said(self, error: HeadwaterError) -> str:
        return error.message[:NOTE_CHARS] if self._payloads or not error.may_quote else type(error).__name__
