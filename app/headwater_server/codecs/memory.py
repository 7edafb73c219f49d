"""Estimates the most memory that decoding a body's JSON takes, in addition to the body, without decoding it.

The estimate counts characters of the text. The figures are CPython's sizes of the objects, including the second copy
that exists while duplicate keys are searched for. `tests/app/codecs/test_memory.py` measures the figures with the worst
known texts.
"""

from __future__ import annotations

from typing import Final

from headwater_server.codecs.faults import MAX_CONTAINERS, MAX_VALUES, is_narrow
from headwater_server.codecs.json_data import occurrences

__all__ = ["MOST_TIMES", "PIECE_BYTES", "object_bytes"]

MOST_TIMES: Final = 80
"""The most bytes of objects for each byte of a text."""
_LIST_BYTES: Final = 150
_OBJECT_BYTES: Final = 100
_KEY_BYTES: Final = 100
_VALUE_BYTES: Final = 50
_STRING_BYTES: Final = 180
_NARROW: Final = 3
"""Bytes of memory for each byte of a string with ASCII characters only."""
_WIDE: Final = 16
"""Bytes of memory for each byte of a string with characters beyond ASCII: a single such character may make every
character of the string take 4 bytes."""
_FEW_STRINGS: Final = 10_000
"""In a text with more quotes, strings are not told apart: a single wide character makes all strings count as wide."""
PIECE_BYTES: Final = 1 << 20
"""Bytes of a large text that are looked at together."""


def object_bytes(text: bytes) -> int:
    """The most memory in bytes of the objects that `headwater_server.codecs.faults.read_json` makes of a text.

    Args:
        text: the JSON; need not be valid.
    """
    lists, objects, keys, values, quotes = (
        occurrences(character, text, len(text)) for character in (b"[", b"{", b":", b",", b'"')
    )
    structure = min(lists, MAX_CONTAINERS) * _LIST_BYTES + min(objects, MAX_CONTAINERS) * _OBJECT_BYTES
    structure += min(keys, MAX_CONTAINERS) * _KEY_BYTES + min(values, MAX_VALUES) * _VALUE_BYTES
    structure += min(quotes // 2, MAX_VALUES + MAX_CONTAINERS) * _STRING_BYTES
    return min(structure + _character_bytes(text, quotes), MOST_TIMES * len(text))


def _character_bytes(text: bytes, quotes: int) -> int:
    """The most memory in bytes of the characters of a text's strings."""
    if len(text) <= PIECE_BYTES and is_narrow(text):
        return len(text) * _NARROW
    total = length = 0
    factor = _NARROW
    is_escaped = False
    for start in range(0, len(text), PIECE_BYTES):
        end = start + PIECE_BYTES
        piece = text[start:end]
        has_wide = not is_narrow(piece)
        parts = [piece] if quotes > _FEW_STRINGS else piece.split(b'"')
        for number, part in enumerate(parts):
            if number and not is_escaped:  # the part begins a string, or the text between two strings
                total += length * factor
                length, factor = 0, _NARROW
            length += len(part)
            if has_wide and not is_narrow(part):
                factor = _WIDE
            is_escaped = part.endswith(b"\\") or (is_escaped and not number and not part)
        if text[end - 1 : end + 1] == b"\\u":  # an escape that is cut by the end of the piece
            factor = _WIDE
    return total + length * factor
