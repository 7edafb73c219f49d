"""Reads bodies of ``multipart/form-data`` (RFC 7578): forms with files."""

from __future__ import annotations

import logging
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headwater_server.errors import BadRequest

__all__ = ["MAX_HEAD_BYTES", "MAX_PARTS", "read_form"]

MAX_PARTS: Final = 100
MAX_HEAD_BYTES: Final = 8 * 1024
"""Limit on a part's headers together. Also the limit, per part on average, on all bytes of a body that are not
content."""
_MAX_HEADERS: Final = 16
_MAX_BOUNDARY_BYTES: Final = 70
"""Limit of RFC 2046, 5.1.1."""
_CHUNK_BYTES: Final = 16 * 1024
"""Bytes that a single call of the parser reads. No other thread may run during the call."""

# The parser logs a warning for each fault, although the client's answer already reports the fault.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def read_form(body: bytes, content_type: bytes) -> dict[str, memoryview]:
    """The fields' contents by name, as views of the body.

    The time is proportional to the body's size, and is mostly spent in the search for the boundary. At most
    `MAX_HEAD_BYTES` for each of `MAX_PARTS` parts are read byte by byte.

    Raises:
        BadRequest: the body isn't a valid form, has too many parts, a part whose head is too large, a part without a
            name, or a field twice.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
        got = f"one of {len(boundary)}" if boundary else "none"
        message = f"header Content-Type: expected a boundary of 1 to {_MAX_BOUNDARY_BYTES} bytes, got {got}"
        raise BadRequest(message, field="body")
    form = _Form(body, boundary)
    try:
        form.read()
    except FormParserError as error:
        raise BadRequest(f"body: expected a form of the header's boundary: {error}"[:200], field="body") from None
    if not form.is_complete:
        raise BadRequest("body: expected parts between the header's boundary, up to the closing one", field="body")
    return form.fields


class _Form:
    """A form that is being read: the parser calls the methods whose names begin with ``_on``.

    Args:
        body: the form.
        boundary: the boundary between the form's parts.
    """

    def __init__(self, body: bytes, boundary: bytes) -> None:
        self._body = body
        self._mark = b"\r\n--" + boundary
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=MAX_HEAD_BYTES,
        )
        self.fields: dict[str, memoryview] = {}
        self.is_complete = False
        self._parts = 0
        self._chunk = b""
        self._chunk_at = 0
        self._content_bytes = 0
        """Bytes of content in all parts so far."""
        self._name = ""
        self._names = 0
        self._head_bytes = 0
        self._field = self._value = b""
        self._start = self._end = 0
        """Offsets of the current part's content in the body."""

    def read(self) -> None:
        """Read the body.

        Raises:
            BadRequest: the body exceeds a limit, or a field has no name or occurs twice.
            FormParserError: the body is not a form.
        """
        marks = 0
        for at in range(0, len(self._body), _CHUNK_BYTES):
            end = min(at + _CHUNK_BYTES, len(self._body))
            # After a boundary's text the parser reads byte by byte even if content follows: each occurrence counts.
            marks += self._body.count(self._mark, at, end + len(self._mark) - 1)
            if marks > MAX_PARTS:
                raise BadRequest(f"body: expected at most {MAX_PARTS} parts, got more", field="body")
            self._chunk, self._chunk_at = self._body[at:end], at
            self._parser.write(self._chunk)
            if self.is_complete:
                return
            if end - self._content_bytes > (self._parts + 1) * MAX_HEAD_BYTES + _MAX_BOUNDARY_BYTES:
                raise _head_too_large()

    def _on_part_begin(self) -> None:
        self._parts += 1
        self._names = self._head_bytes = self._start = self._end = 0

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += self._of_head(data, start, end)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._of_head(data, start, end)

    def _of_head(self, data: bytes, start: int, end: int) -> bytes:
        self._head_bytes += end - start
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()
        return data[start:end]

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            name = parse_options_header(self._value)[1].get(b"name")
            if name is not None:
                self._names += 1
                self._name = name.decode("utf-8", "replace")
        self._field = self._value = b""

    def _on_headers_finished(self) -> None:
        if self._names != 1:
            raise BadRequest("body: expected a name in each part's Content-Disposition", field="body")
        if self._name in self.fields:
            raise BadRequest(f"{self._name[:80]}: expected once, got twice", field=self._name[:80])

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        size = end - start
        # If the last chunk ended like the beginning of a boundary, the parser passes these bytes from its own buffer.
        begin = self._chunk_at + start if data is self._chunk else self._chunk_at - size
        if self._start == self._end:
            self._start = self._end = begin
        self._end += size
        self._content_bytes += size

    def _on_part_end(self) -> None:
        self.fields[self._name] = memoryview(self._body)[self._start : self._end]

    def _on_end(self) -> None:
        self.is_complete = self._parts > 0


def _head_too_large() -> BadRequest:
    return BadRequest(f"body: expected at most {MAX_HEAD_BYTES} bytes in a part's head, got more", field="body")
