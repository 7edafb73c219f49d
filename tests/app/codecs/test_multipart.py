"""Forms are read as httpx writes them, whatever bytes their files have."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.codecs.multipart import read_form
from app.errors import BadRequest

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\\r\n', exclude_categories=["C"]), min_size=1, max_size=9
)
TYPE = b"multipart/form-data; boundary=b"


@given(st.dictionaries(NAMES, st.binary(max_size=60), min_size=1, max_size=5))
def test_what_httpx_writes_is_read_back(fields: dict[str, bytes]) -> None:
    files = {name: ("a b.wav", content) for name, content in fields.items()}
    request = httpx.Request("POST", "http://x", files=files)
    assert read_form(request.read(), request.headers["content-type"].encode()) == fields


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"", b"multipart/form-data", "expected a boundary"),
        (b"", TYPE, "expected parts between"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx', TYPE, "up to the closing one"),
        (b"--b\r\nContent-Type: x\r\n\r\ny\r\n--b--", TYPE, "expected a name in each part"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n--b--', TYPE, "expected a name in each part"),
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
