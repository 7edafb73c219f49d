"""Files that arrive as BYTES: raw, or in base64 or as a data URL, which JSON can carry."""

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
"""The least length of base64 text outside a data URL; shorter input is taken as a raw file."""


def file_of(name: str, raw: bytes) -> bytes:
    """A file's bytes, decoded from base64 or a data URL if necessary; raises `BadInput` if the base64 is invalid."""
    is_url = raw.startswith(b"data:")
    text = raw.partition(b",")[2] if is_url else raw
    if not is_url and not _is_base64(text):
        return raw
    try:
        return base64.b64decode(text.translate(None, _SPACE), validate=True)
    except binascii.Error as error:
        raise BadInput(f"input {name!r}: expected a file's bytes, or these in base64: {error}") from error


def _is_base64(text: bytes) -> bool:
    """Whether bytes contain only characters of base64 and white space, with padding only at the end, and are long
    enough."""
    stripped = text.rstrip(_SPACE)
    content = stripped.rstrip(b"=")
    padding = len(stripped) - len(content)
    return padding <= 2 and len(content) >= _LEAST_BYTES and not content.translate(None, _ALPHABET)
