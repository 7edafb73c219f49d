"""Copies of files in memory, for processes that start while the files are missing or unusable."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from headwater_server.errors import ConfigError
from headwater_server.security.file_watch import FileWatch
from headwater_server.security.regular_file import read_regular

__all__ = ["KeptFiles"]


class KeptFiles:
    """Copies of the last version of some files that was usable together. The copies are never on a disk.

    Args:
        paths: the files.
        check: raises `ConfigError` if the files can't be used together; called with the paths of new copies.
    """

    def __init__(self, paths: Sequence[Path], check: Callable[[Sequence[Path]], object]) -> None:
        self._paths = paths
        self._check = check
        self._watch = FileWatch(paths)
        self._kept: list[int] = []
        """File descriptors of the copies, in the files' order."""
        self._take()

    @property
    def copies(self) -> list[Path]:
        """Paths of the copies, in the files' order; processes of the same user can read them while this process
        runs. Empty: the files were never usable."""
        return _under_proc(self._kept)

    def renew(self) -> None:
        """Copy the files again if a file has changed and the files are usable together; otherwise keep the present
        copies."""
        if self._watch.has_changed():
            self._take()

    def _take(self) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(ConfigError, OSError):  # readers log the reason
            new = []
            for path in self._paths:
                new.append(os.memfd_create(path.name, os.MFD_CLOEXEC))
                stack.callback(os.close, new[-1])
                content, mode = read_regular(path)
                os.fchmod(new[-1], mode)
                os.write(new[-1], content or b"")
            self._check(_under_proc(new))
            if not self._kept:
                self._kept = new
                weakref.finalize(self, stack.pop_all().close)
            for fd, kept in zip(new, self._kept, strict=True):
                if fd != kept:
                    os.dup2(fd, kept, inheritable=False)  # keeps the copies' paths


def _under_proc(fds: Sequence[int]) -> list[Path]:
    return [Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in fds]
