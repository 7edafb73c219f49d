"""The task of frameworks: they add two numbers by a tool that the model calls, twice at once, and say the last sum."""

from __future__ import annotations

from cases import script

__all__ = ["ANSWER", "SUMS", "TASK", "add", "asked", "is_reasoning"]

TASK = f"Add the numbers. {script([('add', {'a': 2, 'b': 3}), ('add', {'a': 40, 'b': 2})], 'The sum is {result}')}"
"""What the user asks."""
SUMS = [5, 42]
"""What the tool must have been asked for."""
ANSWER = "The sum is 42"
_ASKED: list[int] = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    _ASKED.append(a + b)
    return a + b


def asked() -> list[int]:
    """The sums that the tool has computed since the last call of this function."""
    sums = sorted(_ASKED)
    _ASKED.clear()
    return sums


def is_reasoning(text: str | None, number: int) -> bool:
    """Whether a text is what the model thinks before its answer of this number, from 1."""
    return (text or "").strip() == f"This is answer {number}."
