"""Notices that files have changed, and has them read again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["LOOK_EVERY_S", "FileWatch"]

LOOK_EVERY_S: Final = 0.25


class FileWatch:
    """Looks at some files again and again: a look costs microseconds, and works where notifications don't, such as on
    network file systems and under the links by which Kubernetes mounts secrets.

    Args:
        paths: of the files; make this before they are read for the first time.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen = self._marks()

    def has_changed(self) -> bool:
        """Whether any of them has changed, come or gone since the last look."""
        before, self._seen = self._seen, self._marks()
        return self._seen != before

    async def run(self, on_change: Callable[[], None]) -> None:
        """Look until cancelled, and call that after each change."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.has_changed():
                on_change()

    def _marks(self) -> list[tuple[int, ...]]:
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    # The change time too: a mode that others may write by is refused.
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns
