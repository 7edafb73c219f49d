"""Bodies of ``multipart/form-data`` (RFC 7578), as clients send forms with files."""

from __future__ import annotations

import re
from typing import Final

from app.errors import BadRequest

__all__ = ["read_form"]

_BOUNDARY: Final = re.compile(rb"""boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_NAME: Final = re.compile(rb"""[;\s]name=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))""", re.IGNORECASE)
_MAX_PARTS: Final = 100


def read_form(body: bytes, content_type: bytes) -> dict[str, bytes]:
    """The fields' contents by name.

    Raises:
        BadRequest: the body is no such form, or has a field twice.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadRequest("header Content-Type: expected a boundary, got none", field="body")
    mark = b"\r\n--" + (found[1] or found[2])
    pieces = (b"\r\n" + body).split(mark, _MAX_PARTS + 2)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise BadRequest("body: expected parts between the header's boundary, up to the closing one", field="body")
    fields: dict[str, bytes] = {}
    for piece in pieces[1:-1]:
        head, separator, content = piece.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")]
        name = _NAME.search(lines[0]) if lines and separator else None
        if name is None:
            raise BadRequest("body: expected a name in each part's Content-Disposition", field="body")
        key = (name[1] if name[1] is not None else name[2]).decode("utf-8", "replace")
        if key in fields:
            raise BadRequest(f"{key[:80]}: expected once, got twice", field=key[:80])
        fields[key] = content
    return fields
