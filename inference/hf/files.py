"""Files that arrive as BYTES: as they are, in base64, or as a data URL, so that JSON can carry them."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from inference.errors import BadInput

__all__ = ["file_of"]

_BASE64: Final = re.compile(rb"[A-Za-z0-9+/\s]{16,}={0,2}\s*\Z")


def file_of(name: str, raw: bytes) -> bytes:
    """A file's bytes; raises `BadInput` if a data URL has no valid base64."""
    is_url = raw.startswith(b"data:")
    text = raw.partition(b",")[2] if is_url else raw
    if not is_url and not _BASE64.match(text):
        return raw
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error as error:
        raise BadInput(f"input {name!r}: expected a file's bytes, or these in base64: {error}") from error
