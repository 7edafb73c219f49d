"""Reads an image's size from its header, without decoding the image: PNG, JPEG, GIF, WebP and BMP.

A small file may decode to gigabytes, so the size must be known first. Sources: the PNG specification (W3C), ITU-T T.81,
the GIF89a specification, the WebP container specification (RFC 9649), and Microsoft's BITMAPINFOHEADER.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["FORMATS", "pixel_count"]

FORMATS: Final = "PNG, JPEG, GIF, WebP or BMP"
_JPEG_SIZED: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the JPEG segments that have the image's size (SOF)."""
_JPEG_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers of JPEG without a segment."""
_JPEG_LAST: Final = frozenset({0xD9, 0xDA})
"""Markers of JPEG at which the header ends."""


def pixel_count(head: bytes) -> int | None:
    """The number of pixels of an image (of an animation: of the largest frame that its header and first frame declare).

    Args:
        head: the beginning of the file.

    Returns:
        None if the file is in none of the `FORMATS`, or if its size isn't in ``head``.
    """
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
            return _product(*struct.unpack_from(">II", head, 16))
        if head.startswith(b"\xff\xd8\xff"):
            return _jpeg(head)
        if head.startswith((b"GIF87a", b"GIF89a")):
            return _gif(head)
        if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            return _webp(head)
        if head.startswith(b"BM"):
            is_old = struct.unpack_from("<I", head, 14)[0] == 12
            return _product(*struct.unpack_from("<HH" if is_old else "<ii", head, 18))
    except (struct.error, IndexError):  # the file is cut short
        pass
    return None


def _product(width: int, height: int) -> int | None:
    return abs(width * height) or None  # the height of a BMP whose first row is the top row is negative


def _jpeg(head: bytes) -> int | None:
    place, largest = 2, None
    while True:
        if head[place] != 0xFF:
            return None
        marker = head[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in _JPEG_BARE:
            place += 2
        elif marker in _JPEG_LAST:
            return largest
        else:
            if marker in _JPEG_SIZED:
                height, width = struct.unpack_from(">HH", head, place + 5)
                largest = max(largest or 0, width * height) or None
            place += 2 + max(2, struct.unpack_from(">H", head, place + 2)[0])


def _gif(head: bytes) -> int | None:
    """The larger of the screen and the first frame, since decoders enlarge the screen to the frame."""
    width, height, flags = struct.unpack_from("<HHB", head, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while head[place] == 0x21:  # an extension: a label and sub-blocks
        place += 2
        while head[place]:
            place += 1 + head[place]
        place += 1
    if head[place] != 0x2C:
        return None
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", head, place + 1)
    return _product(max(width, left + frame_width), max(height, top + frame_height))


def _webp(head: bytes) -> int | None:
    if head[12:16] == b"VP8X":
        width, height = (int.from_bytes(head[place : place + 3], "little") for place in (24, 27))
        return _product(width + 1, height + 1) if len(head) >= 30 else None
    if head[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return _product((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", head, 26)
        return _product(width & 0x3FFF, height & 0x3FFF)
    return None
