"""Reading request bodies."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest

from app.errors import BadRequest, BodyTooLarge, BodyTooSlow, ClientGone, HeadwaterError, UnsupportedMediaType
from app.gateway.http.bodies import BodyReader

LIMIT = 1000


def read(*chunks: bytes | None, timeout_s: float = 5, **headers: str) -> bytes:
    """Read a body that arrives in chunks; None stands for the client's end, and after the last chunk nothing comes."""
    messages: list[dict[str, Any]] = []
    for index, chunk in enumerate(chunks):
        if chunk is None:
            messages.append({"type": "http.disconnect"})
        else:
            messages.append({"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)})
    if "stalls" in headers:
        headers.pop("stalls")
        messages[-1]["more_body"] = True

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": pairs}
    return asyncio.run(BodyReader(LIMIT, timeout_s).read(scope, receive))[0]


def test_chunks_are_joined() -> None:
    assert read(b"ab", b"", b"c") == b"abc"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/octet-stream"])
def test_json_and_octets_are_taken(kind: str) -> None:
    assert read(b"{}", content_type=kind) == b"{}"


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("kind", [FORM, f"{FORM}; charset=utf-8", None])
def test_what_curl_says_and_no_type_are_taken_but_not_of_a_web_page(kind: str | None) -> None:
    headers: dict[str, Any] = {} if kind is None else {"content_type": kind}
    assert read(b"{}", content_length="2", **headers) == b"{}"
    for origin in ("http://elsewhere", "null"):
        lengths: tuple[dict[str, Any], ...] = ({"content_length": "2"}, {"transfer_encoding": "chunked"})
        for length in lengths:
            with pytest.raises(UnsupportedMediaType, match="a web page must say so"):
                read(b"{}", **headers, **length, origin=origin)


def test_a_page_need_not_say_the_type_of_no_body() -> None:
    assert read(b"", origin="http://here", content_length="0") == read(b"", origin="http://here") == b""


@pytest.mark.parametrize("kind", ["text/plain", "none", "multipart/form-data", ""])
def test_other_types_are_not(kind: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="Content-Type: expected application/json"):
        read(b"{}", content_type=kind)


@pytest.mark.parametrize("length", ["1001", "1001 ", "1001\t"])
def test_a_length_over_the_limit_is_refused_before_a_byte_is_read(length: str) -> None:
    with pytest.raises(BodyTooLarge, match=r"expected at most 1000 bytes .*got 1001"):
        read(content_length=length)


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_over() -> None:
    with pytest.raises(BodyTooLarge):
        read(b"x" * 600, b"x" * 600, stalls="yes")


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with pytest.raises(BodyTooSlow, match=r"within 0\.01 s"):
        read(b"x", timeout_s=0.01, stalls="yes")


@pytest.mark.parametrize("chunks", [(None,), (b"x", None)])
def test_a_client_that_goes_away_is_noticed(chunks: tuple[bytes | None, ...]) -> None:
    with pytest.raises(ClientGone):
        read(*chunks)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_are_unpacked(encoding: str, pack: Any) -> None:
    assert read(pack(b"hello" * 100), content_encoding=encoding) == b"hello" * 100


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (gzip.compress(b"x" * 1001, mtime=0), BodyTooLarge, "at most 1000 bytes"),
        (gzip.compress(b"\0" * 500_000, mtime=0), BodyTooLarge, "at most 1000 bytes"),
        (gzip.compress(b"hello", mtime=0)[:-4], BadRequest, "cut short"),
        (gzip.compress(b"hello", mtime=0) + b"more", BadRequest, "bytes follow"),
        (b"not gzip at all", BadRequest, "not valid gzip data"),
        (b"", BadRequest, "cut short"),
    ],
)
def test_what_can_not_be_unpacked_is_said(body: bytes, error: type[HeadwaterError], message: str) -> None:
    with pytest.raises(error, match=message):
        read(body, content_encoding="gzip")


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(UnsupportedMediaType, match="Content-Encoding: expected gzip"):
        read(b"x", content_encoding="br")
