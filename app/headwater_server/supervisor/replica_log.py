"""Turns lines that a replica writes into log records: a Python traceback becomes a single record, and so does any other
line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

__all__ = ["ReplicaLog"]

QUIET_S: Final = 0.2
"""A traceback is complete at the latest this many seconds after its last line; later lines are separate records."""
LONGEST_S: Final = 2.0
"""A traceback is complete at the latest this many seconds after its first line."""
MAX_LINES: Final = 1000
"""Maximum number of lines of a record."""
_FIRST: Final = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
_LINK: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
"""Lines that separate a traceback from the next, with an empty line before and after."""


class ReplicaLog:
    """Joins the lines of each traceback, chained exceptions included, and calls ``on_record`` with each record.

    Lines of an exception's message after its first line are recognised only if they are indented.
    """

    def __init__(self, on_record: Callable[[str], None]) -> None:
        self._on_record = on_record
        self._lines: list[str] = []
        """Lines of a traceback that may continue."""
        self._has_message = False
        """Whether `_lines` include the line with the exception's class and message."""
        self._loop = asyncio.get_running_loop()
        self._longest_until_s = 0.0
        """When the present traceback is complete, whatever follows (loop time)."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, line: str) -> None:
        """Take the next line."""
        if self._lines and len(self._lines) < MAX_LINES and self._continues(line):
            self._lines.append(line)
            self._expect_more()
            return
        self.flush()
        if _FIRST.match(line):
            self._lines = [line]
            self._has_message = line.startswith(" ")  # all lines of an exception group are indented
            self._longest_until_s = self._loop.time() + LONGEST_S
            self._expect_more()
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

    def _expect_more(self) -> None:
        """End the present traceback unless another of its lines comes soon."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(self._loop.time() + QUIET_S, self._longest_until_s), self.flush)

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
