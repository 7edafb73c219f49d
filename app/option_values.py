"""Values of options on the command line, as argparse's ``type`` reads them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import TypeVar

__all__ = ["checked", "listed", "named", "number", "whole"]

_T = TypeVar("_T")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number, from ``least`` to ``most``."""

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
    """Reads several of what ``read`` reads, with commas between them, each once."""
    return lambda text: tuple(dict.fromkeys(read(part) for part in text.split(",")))


def checked(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Reads what ``read`` does; argparse then shows what its ValueError says."""

    def told(text: str) -> _T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return told


def number(accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """Reads a finite number that ``accepts`` holds for.

    Args:
        accepts: whether it is in bounds.
        expected: what is, in words.
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
    """``name=value``, several with commas between them: what ``read`` reads, by name.

    Raises:
        ValueError: a name is none of ``names``, or stands twice, or ``read`` raised it.
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
