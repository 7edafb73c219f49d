"""Upper bounds of the growth of a call's result in a chat template, computed before the call: in characters of a
string, or elements of a list.

Loops and output are counted while a template runs, but a single call such as ``"".ljust(10 ** 10)`` would allocate its
memory at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final

__all__ = ["GROWING_FILTERS", "growth", "size_of"]

GROWING_FILTERS: Final = (
    "batch", "center", "format", "indent", "join", "pprint", "replace", "slice", "string", "sum", "tojson", "wordwrap",
    "xmlattr",
)  # fmt: skip
ENDLESS: Final = 10**20
"""A bound above every limit: the call must be refused."""
_PADDING: Final = ("batch", "center", "ljust", "rjust", "slice", "zfill")
_TAB: Final = 8
_LINES: Final = 1024
"""Number of lines of JSON that the bound assumes for an indentation."""
_DIGITS: Final = 20
_NESTED: Final = re.compile(r"\{[^{}]*\{")
"""A field of a format string with a nested field, which takes its width from another value."""
_NUMBER: Final = re.compile(r"\d+", re.ASCII)


def growth(name: str, text: str, args: Sequence[Any], named: Mapping[str, Any]) -> int:
    """An upper bound of the number of characters or elements that a method of `str`, or a filter, adds to the size of
    its arguments; 0 for a method or filter that adds nothing.

    Args:
        name: name of the method or filter; ``format`` also for `str.format_map` and the operator ``%``.
        text: the string that the method or filter is called on, for ``join`` the separator; empty for other values.
        args, named: the other arguments of the call; for ``join`` the joined values come first.
    """
    values = [*args, *named.values()]
    largest = max((abs(value) for value in values if isinstance(value, int)), default=0)
    if name in _PADDING:
        return largest
    largest = max(largest, *map(size_of, values), 0)
    if name == "expandtabs":
        return text.count("\t") * max(largest, _TAB)
    if name == "indent":
        return (text.count("\n") + 1) * largest
    if name == "tojson":
        return _LINES * largest if values else 0
    if name == "join":
        return largest + len(text) * (len(args[0]) if args and isinstance(args[0], Sized) else 0)
    if name == "wordwrap":
        return len(text) * largest
    if name == "replace":
        old, new = (str(value) for value in values[:2]) if len(values) > 1 else ("", "")
        return text.count(old) * len(new)
    if name == "format":
        if _NESTED.search(text) and not all(isinstance(value, (int, str)) for value in values):
            return ENDLESS  # the width could come from within a container
        fields = text.count("{") + text.count("%")
        total_width = sum(int(number) if len(number) < _DIGITS else ENDLESS for number in _NUMBER.findall(text))
        return total_width + fields * largest
    return 0


def size_of(value: object) -> int:
    """A lower bound of the number of characters of a value as text. A part that the value contains several times is
    counted each time."""
    return _size_of(value, {})


def _size_of(value: object, sizes: dict[int, int]) -> int:
    """Like `size_of`. ``sizes`` caches the sizes of containers, by identity."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (dict, list, tuple)):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = 0  # a placeholder during the count: a value may contain itself
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        sizes[id(value)] = sum(_size_of(part, sizes) for part in parts)
    return sizes[id(value)]
