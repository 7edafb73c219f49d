"""Logging: lines for people on a terminal, JSON otherwise."""

from __future__ import annotations

import json
import logging
import sys

__all__ = ["set_up_logging"]


class _Human(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content)


def set_up_logging(level: int = logging.INFO) -> None:
    """Send the log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Human() if sys.stderr.isatty() else _Json())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the supervisor says what there is to say
