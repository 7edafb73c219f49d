"""Watches files for changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

__all__ = ["POLL_S", "FileWatch"]

POLL_S: Final = 0.25


class FileWatch:
    """Polls files for changes. A poll costs microseconds, and works where notifications don't, such as on network file
    systems and behind the symbolic links with which Kubernetes mounts secrets.

    Args:
        paths: the files; construct the watch before reading them for the first time.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seen = {path: _state(path) for path in paths}

    def changed(self) -> set[Path]:
        """The files that were changed, created or removed since the last call."""
        before, self._seen = self._seen, {path: _state(path) for path in self._seen}
        return {path for path, state in self._seen.items() if state != before[path]}

    def has_changed(self) -> bool:
        """Whether any file was changed, created or removed since the last call."""
        return bool(self.changed())

    def watch(self, paths: Iterable[Path], since_s: float) -> None:
        """Watch these files instead. A change since the last call of `changed` is not lost if the file was watched
        before. A file that was not watched before counts as changed if it changed after ``since_s``, on the clock of
        `time.time`; a file that doesn't exist does not."""
        self._seen = {path: self._seen.get(path) or _state_since(path, since_s) for path in paths}

    async def run(self, on_change: Callable[[], None]) -> None:
        """Poll until cancelled, and call ``on_change`` once for each poll that finds changes."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.has_changed():
                on_change()


def _state_since(path: Path, since_s: float) -> tuple[int, ...]:
    """A file's state; if the file changed after ``since_s``, a value that differs from every state."""
    state = _state(path)
    return () if len(state) > 1 and state[-1] > since_s * 1e9 else state


def _state(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    # Includes the inode's change time, which shows a change of mode: a file that other users may write is refused.
    return status.st_ino, status.st_dev, status.st_size, status.st_mtime_ns, status.st_ctime_ns
