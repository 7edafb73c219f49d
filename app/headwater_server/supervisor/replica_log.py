"""Turns lines that a replica writes into records of the log: a Python traceback is one record, so is any other line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

__all__ = ["ReplicaLog"]

QUIET_S: Final = 0.2
"""A traceback is complete when nothing follows within this time."""
MAX_LINES: Final = 1000
"""The most lines of one record."""
_FIRST: Final = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
_LINK: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
"""Separates a traceback from the next one, with an empty line before and after it."""


class ReplicaLog:
    """Joins the lines of each traceback, chained exceptions included, and calls ``on_record`` with each record.

    Of an exception's message, lines after the first one are recognised only if they are indented.
    """

    def __init__(self, on_record: Callable[[str], None]) -> None:
        self._on_record = on_record
        self._lines: list[str] = []
        """The lines of a traceback that may go on."""
        self._has_message = False
        """Whether they include the exception's own line."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, line: str) -> None:
        """Take the next line."""
        if self._lines and len(self._lines) < MAX_LINES and self._continues(line):
            self._lines.append(line)
            return
        self.flush()
        if _FIRST.match(line):
            self._lines = [line]
            self._has_message = line.startswith(" ")  # all lines of an exception group are indented
            self._timer = asyncio.get_running_loop().call_later(QUIET_S, self.flush)
        else:
            self._on_record(line)

    def flush(self) -> None:
        """End the present traceback."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        self._has_message = False
        if lines:
            self._on_record("\n".join(lines).rstrip("\n"))

    def _continues(self, line: str) -> bool:
        """Whether a line belongs to the present traceback."""
        if not self._has_message:
            self._has_message = not line.startswith(" ") and bool(line)
            return True
        if not line or line.startswith(" ") or line in _LINK:
            return True
        if _FIRST.match(line) and self._lines[-1] == "" and self._lines[-2] in _LINK:
            self._has_message = False
            return True
        return False
