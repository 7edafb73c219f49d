"""Parsers of option values for argparse's ``type``, options that several commands share, and the files of reports."""

from __future__ import annotations

import argparse
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from headwater_server.errors import CommandError, ConfigError

__all__ = [
    "add_python_option",
    "add_report_options",
    "add_set_option",
    "check_writable",
    "config_flags",
    "listed",
    "named",
    "number",
    "read_size",
    "whole",
    "write_file",
]

_T = TypeVar("_T")


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """A parser of integers from ``minimum`` to ``maximum``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise ArgumentTypeError(f"expected a whole number from {minimum:,} to {maximum:,}, got {text!r}")
        return value

    return read


def listed(read: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """A parser of comma-separated values, each parsed by ``read``; duplicates are dropped."""
    return lambda text: tuple(dict.fromkeys(read(part) for part in text.split(",")))


def number(accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """A parser of finite numbers.

    Args:
        accepts: returns whether a number is in bounds.
        expected: the bounds in words, for the error message.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accepts(value)):
            raise ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return read


def named(text: str, names: Collection[str], read: Callable[[str], _T]) -> dict[str, _T]:
    """Parse comma-separated ``name=value`` pairs.

    Raises:
        ArgumentTypeError: a name is unknown or repeated, or ``read`` rejects a value.
    """
    values: dict[str, _T] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names:
            raise ArgumentTypeError(f"expected one of {', '.join(names)}, got {name!r}")
        if name in values:
            raise ArgumentTypeError(f"{name}: expected once, got it twice")
        try:
            values[name] = read(value)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{name}: {error}") from None
    return values


def read_size(text: str) -> int:
    """Parse a size such as ``4GiB``. Returns bytes.

    Raises:
        ArgumentTypeError: the text is not a size.
    """
    from pydantic import TypeAdapter, ValidationError  # imported late: most commands read no configuration

    from headwater_server.config.sections import MemorySize

    try:
        size: int = TypeAdapter(MemorySize).validate_python(text.strip())
        return size
    except ValidationError:
        raise ArgumentTypeError(f"expected a size such as 4GiB or 512MiB, got {text!r}") from None


def add_report_options(command: argparse.ArgumentParser, page: str) -> None:
    """Add ``--json`` and ``--html``; ``page`` describes the HTML page in the help text."""
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    command.add_argument("--html", type=Path, metavar="FILE", help=f"write {page}; needs headwater-server[reports]")


def add_set_option(command: argparse.ArgumentParser) -> None:
    """Add ``--set``, which `config_flags` reads."""
    command.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields",
        help="set any field of the configuration, such as deployments.text.timeout_s=5; may be repeated",
    )  # fmt: skip


def add_python_option(command: argparse.ArgumentParser) -> None:
    """Add ``--python``, which `headwater_server.cli.script_config.load_with_scripts` takes."""
    command.add_argument(
        "--python", metavar="PATH",
        help="the interpreter of models without `python` in the configuration; own: Headwater's interpreter; default: "
        "the interpreter of the active environment, or of .venv in the configuration's folder, or Headwater's",
    )  # fmt: skip


def config_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the configuration that the command line sets, by dotted path: by ``--set``, and by ``--host``,
    ``--port`` and ``--workers`` if the command has them.

    Raises:
        ConfigError: a value of ``--set`` has no ``=``, or two options set the same field.
    """
    from headwater_server.config.reader import Unparsed

    flags: dict[str, Any] = {}
    for pair in options.fields:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"flag --set: expected FIELD=VALUE, got {pair!r}")
        flags[name] = Unparsed(value)
    for name in ("host", "port", "grpc_port", "workers"):
        if getattr(options, name, None) is not None:
            if f"server.{name}" in flags:
                raise ConfigError(f"--{name}: can't be used with --set server.{name}, which sets the same field")
            flags[f"server.{name}"] = getattr(options, name)
    return flags


def check_writable(option: str, path: Path | None) -> None:
    """Check that a file can be written, before a measurement of minutes produces its content; do nothing if ``path`` is
    None.

    `write_file` creates missing folders.

    Raises:
        CommandError: the file can't be written.
    """
    if path is None:
        return
    there = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    if path.is_dir() or not (there.is_dir() or there == path) or not os.access(there, os.W_OK):
        raise CommandError(f"{option}: {path}: can't be written: expected a file in a writable folder")


def write_file(option: str, path: Path | None, text: str) -> None:
    """Write a file, and create its folders; do nothing if ``path`` is None.

    Raises:
        CommandError: the file can't be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option}: {path}: can't be written: {error.strerror}") from error
