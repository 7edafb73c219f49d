"""Whether a replica's calls of the user's code take too long, from the file that `inference.runtime.pulse` keeps.

Imports the standard library only, and so not `inference`; see `app.guardian`.
"""

from __future__ import annotations

import contextlib
from array import array
from pathlib import Path
from typing import Final

__all__ = ["PulseWatch"]

PULSE_FILE: Final = "pulse"


class PulseWatch:
    """Looks at a replica's calls.

    Args:
        directory: the replica's folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / PULSE_FILE
        self._late: set[int] = set()
        """When the calls began that had taken too long at the last look."""

    def look(self, now_ns: int) -> str | None:
        """What is wrong, if it was so at the last look too: one that follows a pause of the machine proves nothing.

        Args:
            now_ns: on the monotonic clock.
        """
        slots = array("q")
        with contextlib.suppress(OSError):  # there is none: calls may take as long as they like
            slots.frombytes(self._path.read_bytes())
        if not slots:
            return None
        limit_ns = slots[0]
        late = {began_ns for began_ns in slots[1:] if began_ns and now_ns - began_ns > limit_ns}
        is_hanging = bool(late & self._late)
        self._late = late
        return f"a call has taken longer than max_compute_s = {limit_ns / 1e9:g} s" if is_hanging else None
