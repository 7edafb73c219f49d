"""The arguments of earlier calls, as chat templates get them: objects whose numbers keep their texts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from numbers import Number
from typing import Any, Final

__all__ = ["NumberText", "decoded_arguments", "number_writer"]

_MAX_DIGITS: Final = 4000
"""Most digits of a number that becomes an integer: Python refuses to convert more than 4,300."""


class NumberText(Number):
    """A number that Python would write otherwise than it was written, such as ``1e9``. Templates write its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberText) and self.text == other.text

    def __float__(self) -> float:
        return float(self.text)


def decoded_arguments(text: str) -> dict[str, Any]:
    """Decode a call's arguments as a client sends them back. Of a key that occurs twice the last value counts. Text
    without an object, such as arguments that were cut, becomes the value of ``arguments`` in an object, which every
    template can write; no text, and null, become an object without keys."""
    try:
        arguments = json.loads(text or "null", strict=False, parse_int=_integer, parse_float=_number)
        if "\\ud" in text.lower():
            json.dumps(arguments, ensure_ascii=False, default=str).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        arguments = text if text.strip() else None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def number_writer() -> tuple[Callable[[Any], str], Callable[[str], str]]:
    """A function for ``json.dumps(default=...)`` that encodes `NumberText`, and a function that finishes the JSON."""
    mark = secrets.token_hex(16)
    numbers: list[str] = []

    def default(value: Any) -> str:
        if not isinstance(value, NumberText):
            raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
        numbers.append(value.text)
        return mark

    def finish(text: str) -> str:
        if not numbers:
            return text
        first, *others = text.split(f'"{mark}"')
        return first + "".join(number + part for number, part in zip(numbers, others, strict=True))

    return default, finish


def _integer(text: str) -> int | NumberText:
    return NumberText(text) if len(text) > _MAX_DIGITS or text == "-0" else int(text)


def _number(text: str) -> float | NumberText:
    value = float(text)
    return value if repr(value) == text else NumberText(text)
