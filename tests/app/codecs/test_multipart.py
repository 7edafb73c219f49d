"""Forms are read as httpx writes them, whatever bytes their files have."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.codecs.multipart import read_form
from headwater_server.errors import BadRequest

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\\r\n', exclude_categories=["C"]), min_size=1, max_size=9
)
TYPE = b"multipart/form-data; boundary=b"

HEAD = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'

WORST: dict[str, tuple[bytes, bytes, bytes, str]] = {
    "a name without an end": (
        b'--b\r\nContent-Disposition: form-data; name="',
        b"a",
        b"",
        "Maximum header size exceeded",
    ),
    "a head of lines without a colon": (b"--b\r\n", b"ab\r\n", b"", "Maximum header size exceeded"),
    "a head of many lines": (b"--b\r\n", b"a:\r\n", b"", "Maximum header count exceeded"),
    "a boundary and then spaces": (HEAD + b"x\r\n--b", b" ", b"", "at most 8192 bytes|up to the closing"),
    "contents that begin as a boundary": (HEAD, b"\r\n--bx", b"\r\n--b--", "at most 100 parts"),
    "contents that nearly begin so": (HEAD, b"\r\n--\r\n-", b"\r\n--b--", ""),
    "parts without an end": (
        b"",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n',
        b"",
        "at most 100 parts",
    ),
    "what follows the closing boundary": (HEAD + b"x\r\n--b--", b"\r\n--b", b"", "at most 100 parts"),
    "newlines before the first boundary": (b"", b"\r\n", HEAD + b"\r\n--b--", "at most 8192 bytes in a part's head"),
    "a file": (HEAD, bytes(range(256)), b"\r\n--b--", ""),
}
"""What begins a form, what is repeated, what ends it, and the refusal; empty: it is a form."""


def steps(body: bytes, refusal: str) -> int:
    """The lines of Python that are run to read a form, or to refuse it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    refused = pytest.raises(BadRequest, match=refusal) if refusal else contextlib.nullcontext()
    before = sys.gettrace()
    with refused:
        sys.settrace(trace)
        try:
            read_form(body, TYPE)
        finally:
            sys.settrace(before)
    return count


@pytest.mark.parametrize("what", WORST)
def test_a_worst_form_costs_a_few_lines_for_each_chunk(what: str) -> None:
    begin, repeated, end, refusal = WORST[what]
    for size in (1 << 20, 1 << 22):
        count = steps(begin + repeated * (size // len(repeated)) + end, refusal)
        assert count < 500_000 + 500 * (size >> 14)


@pytest.mark.parametrize("what", WORST)
def test_a_worst_form_takes_little_memory(what: str) -> None:
    begin, repeated, end, _ = WORST[what]
    body = begin + repeated * ((1 << 23) // len(repeated)) + end
    tracemalloc.start()
    try:
        with contextlib.suppress(BadRequest):
            read_form(body, TYPE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.dictionaries(NAMES, st.binary(max_size=60), min_size=1, max_size=5))
def test_what_httpx_writes_is_read_back(fields: dict[str, bytes]) -> None:
    files = {name: ("a b.wav", content) for name, content in fields.items()}
    request = httpx.Request("POST", "http://x", files=files)
    assert read_form(request.read(), request.headers["content-type"].encode()) == fields


@given(st.lists(st.sampled_from([b"\r", b"\n", b"\r\n--b", b"-", b"b", b"x"])).map(b"".join), st.integers(1, 9))
def test_where_a_body_is_cut_for_the_parser_makes_no_difference(content: bytes, size: int) -> None:
    body = HEAD + content + b"\r\n--b--"
    with pytest.MonkeyPatch.context() as patch:
        try:
            whole = {name: bytes(value) for name, value in read_form(body, TYPE).items()}
        except BadRequest:
            whole = {}
        patch.setattr("headwater_server.codecs.multipart._CHUNK_BYTES", size)
        try:
            cut = {name: bytes(value) for name, value in read_form(body, TYPE).items()}
        except BadRequest:
            cut = {}
    assert cut == whole


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"", b"multipart/form-data", "expected a boundary"),
        (b"", TYPE, "expected parts between"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx', TYPE, "up to the closing one"),
        (b"--b\r\nContent-Type: x\r\n\r\ny\r\n--b--", TYPE, "expected a name in each part"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n--b--', TYPE, "up to the closing one"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r--b--', TYPE, "expected a form of the header's boundary"),
        (b"--c\r\n", TYPE, "expected a form of the header's boundary"),
        (b"--b--", TYPE, "expected parts between"),
        (b"", TYPE + b"b" * 70, "a boundary of 1 to 70 bytes, got one of 71"),
        (
            HEAD
            + b"".join(b"\r\n--b\r\nContent-Disposition: form-data; name=%d\r\n\r\n" % n for n in range(100))
            + b"\r\n--b--",
            TYPE,
            "at most 100 parts, got more",
        ),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx' * 2 + b"\r\n--b--", TYPE, None),
        ((b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n') * 2 + b"--b--", TYPE, "a: expected once"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, kind: bytes, message: str | None) -> None:
    if message is None:
        assert list(read_form(body, kind)) == ["a"]
        return
    with pytest.raises(BadRequest, match=message):
        read_form(body, kind)
