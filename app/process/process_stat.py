"""Reads /proc/<pid>/stat. Imports the standard library only; see `app.process.guardian`."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["BAD_STATES", "ProcessStat", "process_stat"]

BAD_STATES: Final = {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended", "": "has ended"}
"""The meaning of a process staying in one of these states; an empty state: there is no such process."""


class ProcessStat(NamedTuple):
    """From /proc/<pid>/stat."""

    name: str
    state: str
    """One letter."""
    parent: int
    group: int


def process_stat(pid: int | str) -> ProcessStat | None:
    """A process's name, state, parent and group; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(name, fields[0], int(fields[1]), int(fields[2]))
