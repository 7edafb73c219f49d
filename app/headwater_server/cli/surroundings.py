"""What the commands need of the place in which they are started."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

from headwater_server.errors import CommandError

__all__ = ["complete", "require_folders"]


def complete() -> None:
    """Fill in what may be missing: standard streams that are closed, and the variable PATH. Make PYTHONPATH absolute.

    Without the streams other files would get their numbers, and what is printed would go there. PyTriton and shells
    fail without PATH. Models are imported by processes that run in folders of their own.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - it stays open
    os.environ.setdefault("PATH", os.defpath)
    if path := os.environ.get("PYTHONPATH"):
        with contextlib.suppress(FileNotFoundError):  # `require_folders` reports a working folder that was removed
            os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))


def require_folders() -> None:
    """See that there are a working folder and one for temporary files.

    Raises:
        CommandError: one is missing.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise CommandError("the working folder was removed; cd to a folder that is there, and start again") from None
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tried = "of $TMPDIR, /tmp, /var/tmp and the working folder none can be written"
        raise CommandError(f"no folder for temporary files: {tried}; mount a tmpfs at /tmp") from None
