"""Conditions that a command needs from its process: standard streams, environment variables, and folders."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

from headwater_server.errors import CommandError

__all__ = ["complete", "require_folders"]


def complete() -> None:
    """Open standard streams that are closed, to /dev/null; set the variable PATH if it is missing; and make PYTHONPATH
    absolute.

    If a standard stream were closed, the next opened file would get its number, and output would be written to that
    file. PyTriton and shells fail without PATH. PYTHONPATH must be absolute because the processes that import models
    run in other folders.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - it stays open
    os.environ.setdefault("PATH", os.defpath)
    if path := os.environ.get("PYTHONPATH"):
        with contextlib.suppress(FileNotFoundError):  # the working folder was removed: `require_folders` reports it
            os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))


def require_folders() -> None:
    """Check that the working folder and a folder for temporary files exist.

    Raises:
        CommandError: a folder is missing.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise CommandError("the working folder was removed; cd to an existing folder, and start again") from None
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tried = "can't write in $TMPDIR, /tmp, /var/tmp or the working folder"
        raise CommandError(f"no folder for temporary files: {tried}; mount a tmpfs at /tmp") from None
