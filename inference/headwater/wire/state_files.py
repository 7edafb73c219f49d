"""The files of the states of sequences, one folder for each deployment."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from headwater.wire.sequence_step import FILE_IDLE_S

__all__ = ["STATES", "sweep_states"]

STATES: Final = "states"
"""The folder of the deployments' folders, in the server's folder."""
MAX_STATES_BYTES: Final = 4 * 1024**3
"""Most bytes of the files of the states of a deployment's sequences."""


def sweep_states(folder: Path) -> None:
    """Remove the files of states that were not used for long, and the oldest of more than `MAX_STATES_BYTES`."""
    ages = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # another replica's host sweeps, too
                stat = entry.stat()
                ages.append((stat.st_mtime, stat.st_size, entry.path))
    total = sum(size for _, size, _ in ages)
    for used_s, size, path in sorted(ages):
        if total <= MAX_STATES_BYTES and time.time() - used_s < FILE_IDLE_S:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
