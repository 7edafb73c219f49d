"""Readers of option values for argparse's ``type``, and the options and files of reports."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from app.config.sections import MemorySize
from app.errors import CommandError

__all__ = [
    "add_report_options",
    "check_writable",
    "checked",
    "listed",
    "named",
    "number",
    "read_size",
    "whole",
    "write_file",
]

_T = TypeVar("_T")


def whole(least: int, most: int) -> Callable[[str], int]:
    """A reader of integers from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least:,} to {most:,}, got {text!r}")
        return value

    return read


def listed(read: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """A reader of comma-separated values, each read by ``read``; duplicates are dropped."""
    return lambda text: tuple(dict.fromkeys(read(part) for part in text.split(",")))


def checked(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """The same reader, with a ValueError's message shown by argparse."""

    def checked_read(text: str) -> _T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked_read


def number(accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """A reader of finite numbers.

    Args:
        accepts: whether a number is in bounds.
        expected: the bounds in words.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accepts(value)):
            raise ValueError(f"expected {expected}, got {text!r}")
        return value

    return read


def named(text: str, names: Collection[str], read: Callable[[str], _T]) -> dict[str, _T]:
    """Read comma-separated ``name=value`` pairs.

    Raises:
        ValueError: a name is unknown or repeated, or ``read`` raised it.
    """
    found: dict[str, _T] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names:
            raise ValueError(f"expected one of {', '.join(names)}, got {name!r}")
        if name in found:
            raise ValueError(f"{name}: expected once, got it twice")
        try:
            found[name] = read(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def read_size(text: str) -> int:
    """``4GiB`` as bytes.

    Raises:
        ValueError: it is no size.
    """
    try:
        size: int = TypeAdapter(MemorySize).validate_python(text.strip())
        return size
    except ValidationError:
        raise ValueError(f"expected a size such as 4GiB or 512MiB, got {text!r}") from None


def add_report_options(command: argparse.ArgumentParser, page: str) -> None:
    """Add ``--json`` and ``--html``.

    Args:
        command: the command's parser.
        page: what the HTML page is, for the help.
    """
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    command.add_argument("--html", type=Path, metavar="FILE", help=f"write {page}; needs headwater[reports]")


def check_writable(option: str, path: Path | None) -> None:
    """Check that a file can be written, before the minutes that it takes to produce its content.

    `write_file` creates missing folders.

    Raises:
        CommandError: it can't be written.
    """
    if path is None:
        return
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if path.is_dir() or not (there.is_dir() or there == path) or not os.access(there, os.W_OK):
        raise CommandError(f"{option}: {path}: can't be written: expected a file in a writable folder")


def write_file(option: str, path: Path | None, text: str) -> None:
    """Write a file, and create its folders; do nothing if ``path`` is None.

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
