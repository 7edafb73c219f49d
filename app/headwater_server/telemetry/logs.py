"""Logs on standard error, with a line per event and times in UTC, as text or JSON (``server.log_format``).

A record's ``extra`` becomes fields: ``logger.info("...", extra={"request_id": id})``. The access log has a line per
request, and writes lines in groups to save time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import msgspec

from headwater_server.config.sections import LogFormat
from headwater_server.errors import HeadwaterError
from headwater_server.telemetry.instruments import Counter
from headwater_server.telemetry.log_output import LogOutput, never_blocking
from headwater_server.telemetry.store import Store

__all__ = ["REPLICA_LOGGER", "AccessLog", "count_dropped_lines", "finish_log", "printable", "set_up_logging"]

REPLICA_LOGGER: Final = "headwater.replica"
"""The logger for the output that replicas print. The field ``replica`` names the replica."""
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every record has."""
_JSON_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)
FLUSH_AFTER_S: Final = 0.1
NOTE_CHARS: Final = 200


class _Human(logging.Formatter):
    """``12:34:56.789Z WARNING message key=value``; the level is shown from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        fields = fields_of(record)
        if record.name == REPLICA_LOGGER:
            level += f"{fields.pop('replica', '?')} | "
        suffix = "".join(f" {name}={_word(value)}" for name, value in fields.items())
        text = f"{utc(record.created)[11:]} {level}{record.getMessage()}{suffix}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json_line(content)


def set_up_logging(log_format: LogFormat) -> None:
    """Send the log, from level INFO on, to standard error. Everything that Python writes to standard error is queued,
    so that no write blocks."""
    sys.stderr = never_blocking(sys.stderr)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Human() if is_for_people(log_format, sys.stderr) else _Json())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the supervisor logs starts and stops itself


def count_dropped_lines(store: Store) -> None:
    """Have a store count the log lines that this process drops, from now on; the first store also counts the lines
    dropped before."""
    if isinstance(sys.stderr, LogOutput):
        sys.stderr.on_dropped(Counter(store, "headwater_log_lines_dropped").add)


def finish_log() -> None:
    """Wait, for a limited time, until queued lines have been written (`LogOutput.finish`). To be called before the
    process ends without Python's exit handlers."""
    if isinstance(sys.stderr, LogOutput):
        sys.stderr.finish()


def is_for_people(log_format: LogFormat, stream: IO[str]) -> bool:
    """Whether the log on this stream is text for people rather than JSON."""
    return log_format == "human" or (log_format == "auto" and stream.isatty())


def utc(time_s: float) -> str:
    """A Unix time in ISO 8601, in UTC with milliseconds, such as ``2026-01-31T12:34:56.789Z``."""
    return _utc_ms(int(time_s * 1000))


@functools.lru_cache(maxsize=4)
def _utc_ms(time_ms: int) -> str:
    return f"{_utc_seconds(time_ms // 1000)}.{time_ms % 1000:03d}Z"


@functools.lru_cache(maxsize=4)
def _utc_seconds(time_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_s))


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """A record's fields from ``extra``, without fields that a library adds to all records, such as
    ``_ray_timestamp_ns``."""
    return {name: value for name, value in vars(record).items() if name not in _OWN and not name.startswith("_")}


def json_line(content: Mapping[str, Any] | msgspec.Struct) -> str:
    """A line of JSON, without the line break. Lone surrogates in strings are escaped."""
    try:
        return _JSON_ENCODER.encode(content).decode()
    except UnicodeEncodeError:  # lone surrogates, which stand for undecodable bytes
        fields = msgspec.structs.asdict(content) if isinstance(content, msgspec.Struct) else dict(content)
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = value.encode(errors="backslashreplace").decode()
        return _JSON_ENCODER.encode(fields).decode()


def json_lines(contents: Sequence[Mapping[str, Any] | msgspec.Struct]) -> str:
    """Several lines of JSON, encoded together; each ends with a line break. See `json_line`."""
    try:
        return _JSON_ENCODER.encode_lines(contents).decode()
    except UnicodeEncodeError:
        return "".join(f"{json_line(content)}\n" for content in contents)


def printable(text: str) -> str:
    """Escape a text that a client may have sent, so that it can neither forge a line nor control the terminal."""
    return text if text.isprintable() else ascii(text)


def _word(value: object) -> str:
    text = printable(str(value))
    return text if text and " " not in text else repr(text)


class _Line(msgspec.Struct, gc=False):
    """The fields of an access-log line in JSON."""

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
    """Writes a line for each request, as text or JSON.

    Args:
        stream: the output stream; default: standard error.
        log_format: text or JSON; auto: text on a terminal.
        payloads: whether to log error messages that may quote a client's data or a callable's message
            (`HeadwaterError.may_quote`); otherwise such an error's class name is logged.
    """

    def __init__(self, stream: IO[str] | None = None, log_format: LogFormat = "auto", payloads: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._is_human = is_for_people(log_format, self._stream)
        self._payloads = payloads
        self._lines: list[str] = []
        self._contents: list[_Line | dict[str, Any]] = []
        """Contents of the JSON lines to write. They are encoded together, which costs a fraction of encoding each."""

    def write(self, scope: Mapping[str, Any], status: int, took_s: float, state: Mapping[str, Any]) -> None:
        """Log an answer, without the request's query string. The line is written within `FLUSH_AFTER_S`. ``status``
        499: the client disconnected.

        ``state`` provides ``request_id``, ``note``, ``error`` (a `HeadwaterError`) and ``log_fields`` (a mapping).
        """
        method, path = scope["method"], printable(scope["path"])
        error: HeadwaterError | None = state.get("error")
        note = state.get("note", "")
        fields: Mapping[str, Any] | None = state.get("log_fields")
        if error is not None:
            may_show = self._payloads or not error.may_quote
            fields = {**(fields or {}), "error": error.message[:NOTE_CHARS] if may_show else type(error).__name__}
        if not self._lines and not self._contents:
            asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self.flush)
        if self._is_human:
            took = f"{took_s * 1000:.1f} ms"
            suffix = "".join(f" {name}={printable(str(value))}" for name, value in (fields or {}).items())
            line = f"{method} {path} {status} {took} {printable(note)} {state['request_id']}{suffix}"
            self._lines.append(f"{utc(time.time())[11:]} {line}\n")
        else:
            client = scope["client"][0] if scope.get("client") else None
            message = f"{method} {path} {status}"
            ms = int(took_s * 100_000 + 0.5) / 100  # `round` takes eight times as long
            content = _Line(
                utc(time.time()), "info", "access", message, method, path, status, ms, client, note, state["request_id"]
            )
            self._contents.append({**msgspec.structs.asdict(content), **fields} if fields else content)

    def flush(self) -> None:
        """Write the gathered lines."""
        lines, self._lines, contents, self._contents = self._lines, [], self._contents, []
        if text := "".join(lines) + json_lines(contents):
            self._stream.write(text)
            self._stream.flush()
