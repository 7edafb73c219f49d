"""Files that arrive as BYTES: as they are, in base64, or as a data URL, so that JSON can carry them."""

from __future__ import annotations

import base64
import binascii
import string
from typing import Final

from headwater.errors import BadInput

__all__ = ["file_of"]

_SPACE: Final = b" \t\n\r\f\v"
_ALPHABET: Final = string.ascii_letters.encode() + string.digits.encode() + b"+/" + _SPACE
_LEAST_BYTES: Final = 16
"""Of a text in base64 without a data URL: a shorter one is no file."""


def file_of(name: str, raw: bytes) -> bytes:
    """A file's bytes; raises `BadInput` if a data URL has no valid base64."""
    is_url = raw.startswith(b"data:")
    text = raw.partition(b",")[2] if is_url else raw
    if not is_url and not _is_base64(text):
        return raw
    try:
        return base64.b64decode(text.translate(None, _SPACE), validate=True)
    except binascii.Error as error:
        raise BadInput(f"input {name!r}: expected a file's bytes, or these in base64: {error}") from error


def _is_base64(text: bytes) -> bool:
    """Whether bytes are of base64's alphabet and spaces only, with its padding at the end."""
    stripped = text.rstrip(_SPACE)
    content = stripped.rstrip(b"=")
    padding = len(stripped) - len(content)
    return padding <= 2 and len(content) >= _LEAST_BYTES and not content.translate(None, _ALPHABET)
