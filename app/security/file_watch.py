"""Watches files for changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["FileWatch"]

POLL_S: Final = 0.25


class FileWatch:
    """Polls some files. A poll costs microseconds, and works where notifications don't, such as on network file systems
    and behind the links through which Kubernetes mounts secrets.

    Args:
        paths: the files; construct the watch before reading them for the first time.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen = list(map(_state, paths))

    def has_changed(self) -> bool:
        """Whether any file was changed, created or removed since the last call."""
        before, self._seen = self._seen, list(map(_state, self._paths))
        return self._seen != before

    async def run(self, on_change: Callable[[], None]) -> None:
        """Poll until cancelled, and call ``on_change`` after each change."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.has_changed():
                on_change()


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    # The change time too: it shows a change of mode, and a file that others may write is refused.
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns
