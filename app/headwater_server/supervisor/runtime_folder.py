"""The server's folder for sockets, workspaces and counts: made, locked, and made again if somebody removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from headwater_server.process.sweep import lock_instance_folder, make_instance_folder

__all__ = ["RuntimeFolder"]


class RuntimeFolder:
    """A new folder of mode 0700, with a lock on it that systemd-tmpfiles respects. It exists until `close`.

    Args:
        parent: the folder to make it in; None: the system's folder for temporary files.

    Raises:
        OSError: the folder can't be made.
    """

    def __init__(self, parent: Path | None) -> None:
        self.path, self._lock = make_instance_folder(parent)
        self._folder = _locked(self.path)

    @property
    def is_lost(self) -> bool:
        """Whether the folder was removed, or another file has its path."""
        ours = os.fstat(self._folder)
        try:
            there = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def make_again(self) -> None:
        """Make the folder again with the same path, empty except for its lock file. After an error it still counts as
        lost.

        Raises:
            OSError: the folder can't be made, or another file has its path.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        before = self._folder, self._lock
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            folder = _locked(self.path)
            undo.callback(os.close, folder)
            self._lock = lock_instance_folder(self.path)
            self._folder = folder
            undo.pop_all()
        for handle in before:
            os.close(handle)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        for handle in (self._folder, self._lock):
            os.close(handle)


def _locked(folder: Path) -> int:
    """Lock the folder itself: systemd-tmpfiles leaves everything in a locked folder alone. Returns the descriptor that
    holds the lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle
