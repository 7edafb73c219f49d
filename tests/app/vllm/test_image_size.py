"""The sizes of images, read from their headers; Pillow is the oracle."""

from __future__ import annotations

import io
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headwater_server.vllm.image_size import pixel_count
from tests.app.vllm.pictures import png, png_header


def written(format: str, width: int, height: int, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (10, 200, 30)).save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"exif": b"Exif\0\0" + b"x" * 60_000, "icc_profile": b"y" * 200_000}),
        ("GIF", {}),
        ("GIF", {"comment": b"z" * 5000}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0xx"}),
        ("BMP", {}),
    ],
)
def test_sizes_of_each_format(format: str, options: dict[str, object]) -> None:
    for width, height in ((1, 1), (3, 2), (257, 300), (1000, 17)):
        image = written(format, width, height, **options)
        assert pixel_count(image) == width * height
        for end in (4, 12, 20, len(image) // 3):  # cut short
            assert pixel_count(image[:end]) in (None, width * height)


def test_an_animation_has_the_size_of_its_screen() -> None:
    buffer = io.BytesIO()
    frames = [Image.new("L", (30, 20), grey) for grey in (1, 2, 3)]
    for format in ("GIF", "WEBP", "PNG"):
        buffer.seek(0)
        frames[0].save(buffer, format, save_all=True, append_images=frames[1:])
        assert pixel_count(buffer.getvalue()) == 600


def test_our_own_pngs_are_images() -> None:
    assert Image.open(io.BytesIO(png(7, 5))).size == (7, 5)


def test_a_bomb_is_told_by_its_header() -> None:
    assert pixel_count(png_header(100_000, 100_000)) == 10**10
    jpeg = written("JPEG", 8, 8)
    place = jpeg.index(b"\xff\xc0") + 5
    assert pixel_count(jpeg[:place] + struct.pack(">HH", 65_535, 65_535) + jpeg[place + 4 :]) == 65_535**2


def test_the_largest_size_that_a_jpeg_declares_counts() -> None:
    jpeg = written("JPEG", 8, 8)
    start = jpeg.index(b"\xff\xc0")
    end = start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big")
    second = bytearray(jpeg[start:end])
    second[5:9] = struct.pack(">HH", 60_000, 60_000)
    assert pixel_count(jpeg[:end] + second + jpeg[end:]) == 60_000**2


def test_a_frame_of_a_gif_that_exceeds_its_screen_counts() -> None:
    gif = written("GIF", 8, 8)
    place = gif.index(b"\x2c", 13 + 3 * 2 ** ((gif[10] & 7) + 1))
    large = gif[: place + 5] + struct.pack("<HH", 50_000, 40_000) + gif[place + 9 :]
    assert pixel_count(large) == 50_000 * 40_000


def test_a_bmp_may_begin_with_its_top_row() -> None:
    bmp = written("BMP", 6, 4)
    assert pixel_count(bmp[:22] + struct.pack("<i", -4) + bmp[26:]) == 24


@pytest.mark.parametrize("content", [
    b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<?xml version='1.0'?><svg/>", b"%PDF-1.7",
    b"II*\0" + b"\0" * 40,
    b"%!PS-Adobe-3.0 EPSF-3.0", b"\0\0\1\0\1\0" + b"\0" * 40, b"\0\0\0\x20ftypavif" + b"\0" * 40, b"text" * 20,
    png_header(0, 5),
])  # fmt: skip
def test_other_files_are_no_images(content: bytes) -> None:
    assert pixel_count(content) is None


@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8", b"BM"]),
    st.binary(max_size=300),
)
def test_any_bytes_have_a_size_or_none(start: bytes, rest: bytes) -> None:
    pixels = pixel_count(start + rest)
    assert pixels is None or pixels > 0


@pytest.mark.parametrize("unit", [b"\xff", b"\xff\x01", b"\xff\xe0\0\0", b"\xff\xe0\0\2"])
def test_a_hostile_header_is_read_in_linear_time(unit: bytes) -> None:
    began_s = time.process_time()
    assert pixel_count(b"\xff\xd8\xff\xe0\0\2" + unit * (2**20 // len(unit))) is None
    assert pixel_count(b"GIF89a" + bytes(7) + b"\x21\xf9\0" * (2**20 // 3)) is None
    assert time.process_time() - began_s < 5
