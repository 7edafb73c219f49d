"""The head of a request to a replica's port. It is parsed strictly, since only Headwater's clients send requests."""

from __future__ import annotations

import re
from typing import Final

from headwater_server.transport.address import UNSENT_HEADER

__all__ = ["MOST_HEAD_BYTES", "Refusal", "RequestHead"]

MOST_HEAD_BYTES: Final = 16 * 1024
_LINE: Final = re.compile(rb"([A-Z]{1,16}) ([\x21-\x7e]+) HTTP/1\.1")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_PAIR: Final = re.compile(r"([0-9]{1,15}) ([0-9]{1,15})")


class Refusal(Exception):
    """The refusal of a request.

    Args:
        status: the answer's status and reason phrase.
        message: the error message.
        unsent: whether the replica has not got the request, so that the client may send it to another replica.
    """

    def __init__(self, status: str, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.unsent = unsent

    def encoded(self) -> bytes:
        """The whole answer. The message contains no text from the request, so it needs no escapes."""
        body = f'{{"error":"{self.message}"}}'
        unsent = f"{UNSENT_HEADER.decode()}: 1\r\n" if self.unsent else ""
        head = f"HTTP/1.1 {self.status}\r\nContent-Type: application/json\r\nConnection: close\r\n{unsent}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class RequestHead:
    """The head of a request.

    Args:
        raw: the head's bytes, without the empty line at the end.

    Raises:
        Refusal: the bytes are no valid head.
    """

    def __init__(self, raw: bytes) -> None:
        first, *lines = raw.split(b"\r\n")
        line = _LINE.fullmatch(first)
        if line is None:
            raise _bad("request line: expected `METHOD PATH HTTP/1.1`, got something else")
        self.method, self.path = line[1].decode(), line[2].decode()
        self._headers: dict[str, str] = {}
        for header_line in lines:
            header = _HEADER.fullmatch(header_line)
            if header is None:
                raise _bad("headers: expected lines `NAME: VALUE`, got something else")
            name = header[1].decode().lower()
            if name in self._headers:
                raise _bad("headers: expected each header once, got a header more than once")
            self._headers[name] = header[2].decode("latin-1").strip(" \t")

    def header(self, name: str) -> str:
        """A header's value; empty: the request doesn't have it."""
        return self._headers.get(name, "")

    @property
    def length(self) -> int:
        """The body's length in bytes; 0 for a GET without Content-Length.

        Raises:
            Refusal: the length is not given by Content-Length alone.
        """
        if "transfer-encoding" in self._headers or "expect" in self._headers or "upgrade" in self._headers:
            raise _bad("headers: expected Content-Length only, got Transfer-Encoding, Expect or Upgrade")
        return self._number("content-length", "0" if self.method == "GET" else "")

    @property
    def json_length(self) -> int:
        """The length of the JSON in the body; without the header ``Inference-Header-Content-Length``, the whole body's
        length.

        Raises:
            Refusal: the header is no number, or as for `length`.
        """
        return self._number("inference-header-content-length", str(self.length))

    @property
    def segment(self) -> tuple[int, int] | None:
        """The length of the segment's inputs, which begin the body, and the segment's size; None: there is no segment.

        Raises:
            Refusal: the header is not two numbers.
        """
        text = self._headers.get("headwater-segment")
        if text is None:
            return None
        match = _PAIR.fullmatch(text)
        if match is None:
            raise _bad("Headwater-Segment: expected `INPUT_BYTES SIZE_BYTES`, got something else")
        return int(match[1]), int(match[2])

    def _number(self, name: str, default: str) -> int:
        text = self._headers.get(name, default)
        if _NUMBER.fullmatch(text) is None:
            raise _bad(f"{name}: expected a number of bytes, got something else")
        return int(text)


def _bad(message: str) -> Refusal:
    return Refusal("400 Bad Request", message)
