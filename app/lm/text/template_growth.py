"""How long the result of one call in a chat template can be, known before the call is made: characters of a string, or
elements of a list.

Loops and output are counted while a template runs; a single call such as ``"".ljust(10 ** 10)`` takes its memory at
once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final

__all__ = ["GROWING_FILTERS", "growth"]

GROWING_FILTERS: Final = ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson")
ENDLESS: Final = 10**20
_PADDING: Final = ("batch", "center", "ljust", "rjust", "slice", "zfill")
_TAB: Final = 8
_LINES: Final = 1024
"""Lines of JSON that an indentation is counted for."""
_DIGITS: Final = 20
_NESTED: Final = re.compile(r"\{[^{}]*\{")
"""A field of a format whose width is another value."""
_NUMBER: Final = re.compile(r"\d+", re.ASCII)


def growth(name: str, text: str, args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """A bound on the characters or elements that a method of `str`, or a filter, makes beyond its arguments' own; 0 if
    it makes none.

    Args:
        name: of the method or filter; ``format`` also for `str.format_map` and the operator ``%``.
        text: the string that it is called on, if any.
        args, named: what it is called with.
    """
    values = [*args, *named.values()]
    most = max((abs(value) for value in values if isinstance(value, int)), default=0)
    if name in _PADDING:
        return most
    if name == "expandtabs":
        return text.count("\t") * (most or _TAB)
    if name == "indent":
        return (text.count("\n") + 1) * most
    if name == "tojson":
        return _LINES * most
    if name == "join":
        return len(text) * len(args[0]) if args and isinstance(args[0], Sized) else 0
    if name == "replace":
        old, new = (str(value) for value in values[:2]) if len(values) > 1 else ("", "")
        return text.count(old) * len(new)
    if name == "format":
        if _NESTED.search(text) and not all(isinstance(value, (int, str)) for value in values):
            return ENDLESS  # a width within another value
        fields = text.count("{") + text.count("%")
        own = sum(int(number) if len(number) < _DIGITS else ENDLESS for number in _NUMBER.findall(text))
        return own + fields * most
    return 0
