"""Images as bytes, written without a library."""

from __future__ import annotations

import base64
import struct
import zlib

__all__ = ["data_url", "png", "png_header", "png_url"]


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG of this size, without its pixels: 33 bytes."""
    content = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + content + struct.pack(">I", zlib.crc32(content))


def png(width: int, height: int, grey: int = 128) -> bytes:
    """A whole PNG of one grey."""
    pixels = zlib.compress((b"\x00" + bytes([grey]) * width) * height)
    chunks = [b"IDAT" + pixels, b"IEND"]
    return png_header(width, height) + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def data_url(content: bytes, type: str = "image/png") -> str:
    return f"data:{type};base64,{base64.b64encode(content).decode()}"


def png_url(width: int, height: int) -> str:
    """A PNG as a ``data:`` URL."""
    return data_url(png(width, height))
