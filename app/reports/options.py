"""Options of commands that write a report, and the files that these name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from app.errors import CommandError

__all__ = ["add_report_options", "check_writable", "write_file"]


def add_report_options(command: argparse.ArgumentParser, page: str) -> None:
    """Add ``--json`` and ``--html``.

    Args:
        command: whose.
        page: what the page is, for the help.
    """
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    command.add_argument("--html", type=Path, metavar="FILE", help=f"write {page}; needs headwater[reports]")


def check_writable(option: str, path: Path | None) -> None:
    """See that a file can be written, before it takes minutes to have something to write.

    Folders that are not there are made by `write_file`.

    Raises:
        CommandError: it can't.
    """
    if path is None:
        return
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if path.is_dir() or not (there.is_dir() or there == path) or not os.access(there, os.W_OK):
        raise CommandError(f"{option}: {path}: can't be written: expected a file in a folder that can be written to")


def write_file(option: str, path: Path | None, text: str) -> None:
    """Write a file, and its folders; nothing if there is no path.

    Raises:
        CommandError: it can't be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option}: {path}: can't be written: {error.strerror}") from error
