"""API keys: what may stand in a file of them, which text is which key, and where a request shows it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import ConfigError
from headwater_server.security.key_check import shown_key
from headwater_server.security.keys import MAX_KEYS, Key, Keys, make_key, read_keys


def entry(**fields: Any) -> dict[str, Any]:
    """One key as a file has it."""
    return {"name": "a", "sha256": hashlib.sha256(b"secret").hexdigest(), "scopes": ["infer"], **fields}


def key(text: str, name: str = "a") -> Key:
    return Key(name, hashlib.sha256(text.encode()).hexdigest(), ("infer",))


def test_an_entry_says_name_hash_scopes_and_limits() -> None:
    (found,) = read_keys({"keys": [entry(requests_per_second=2, concurrent=3, tokens_per_minute=4)]}, "file")
    assert (found.name, found.scopes, found.requests_per_second) == ("a", ("infer",), 2)
    assert found.is_limited
    assert not key("secret").is_limited


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "expected {keys"),
        ([], "expected {keys"),
        ({}, "keys"),
        ({"keys": "a"}, r"\$\.keys"),
        ({"keys": [entry()], "more": 1}, "more"),
        ({"keys": [entry(scope="infer")]}, "scope"),
        ({"keys": [entry(scopes=["root"])]}, r"keys\[0\]\.scopes"),
        ({"keys": [entry(scopes=[])]}, r"keys\[0\]\.scopes: expected at least one"),
        ({"keys": [entry(name="")]}, r"keys\[0\]\.name"),
        ({"keys": [entry(name="a b")]}, r"keys\[0\]\.name"),
        ({"keys": [entry(name="a:b")]}, r"keys\[0\]\.name"),
        ({"keys": [entry(name="a\n")]}, r"keys\[0\]\.name"),
        ({"keys": [entry(sha256="secret")]}, r"keys\[0\]\.sha256"),
        ({"keys": [entry(sha256=12)]}, r"keys\[0\]\.sha256"),
        ({"keys": [entry(sha256="A" * 64)]}, r"keys\[0\]\.sha256"),
        ({"keys": [entry(requests_per_second=0)]}, "requests_per_second"),
        ({"keys": [entry(requests_per_second=float("nan"))]}, "requests_per_second"),
        ({"keys": [entry(concurrent=0)]}, "concurrent"),
        ({"keys": [entry(concurrent=True)]}, "concurrent"),
        ({"keys": [entry(tokens_per_minute=-1)]}, "tokens_per_minute"),
        ({"keys": [entry(), entry()]}, "a twice"),
        ({"keys": [entry(), entry(name="b")]}, "expected each key once"),
        ({"keys": [entry()] * (MAX_KEYS + 1)}, f"at most {MAX_KEYS}"),
    ],
)
def test_what_is_wrong_is_named_without_telling_a_hash(content: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_keys(content, "file")
    assert "file" in str(caught.value)
    assert entry()["sha256"] not in str(caught.value)


def test_a_text_is_found_among_several() -> None:
    keys = Keys([key("one", "a"), key("two", "b")])
    assert [found and found.name for found in map(keys.find, (b"one", b"two", b"three", b"", b"ONE", b"one "))] == [
        "a", "b", None, None, None, None,
    ]  # fmt: skip
    assert Keys().find(b"one") is None


def test_a_text_that_only_begins_with_a_known_hash_is_none() -> None:
    right = hashlib.sha256(b"one").hexdigest()
    assert Keys([Key("a", right[:16] + "0" * 48, ("infer",))]).find(b"one") is None


def test_what_is_too_long_is_not_looked_at() -> None:
    assert Keys([key("x" * 512)]).find(b"x" * 512) is not None
    assert Keys([key("x" * 513)]).find(b"x" * 513) is None


def test_new_keys_differ_and_are_found_by_their_hash() -> None:
    made = [make_key() for _ in range(100)]
    assert len({text for text, _ in made}) == 100
    text, digest = made[0]
    assert text.startswith("hw_")
    assert len(text) >= 43
    assert Keys([Key("a", digest, ("infer",))]).find(text.encode()) is not None


@given(st.binary(max_size=600))
def test_no_other_text_is_taken_for_a_key(text: bytes) -> None:
    found = Keys([key("secret")]).find(text)
    assert (found is not None) == (text == b"secret")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"bearer  k ")], b"k"),
        ([(b"authorization", b"BEARER k")], b"k"),
        ([(b"authorization", b"k")], None),
        ([(b"authorization", b"Bearer")], None),
        ([(b"authorization", b"Bearer ")], b""),
        ([(b"authorization", b"Basic k")], None),
        ([(b"authorization", b"Basic k"), (b"x-api-key", b"k")], b"k"),
        ([(b"authorization", b"Bearer other"), (b"x-api-key", b"k")], b"k"),
        ([(b"x-api-key", b"k"), (b"x-api-key", b"k")], b"k"),
        ([(b"x-api-key", b"k"), (b"x-api-key", b"other")], None),
        ([(b"authorization", b"Bearer k"), (b"authorization", b"Bearer other")], None),
        ([(b"x-api-key", b"\xff\x00")], b"\xff\x00"),
    ],
)
def test_where_a_request_shows_its_key(headers: list[tuple[bytes, bytes]], expected: bytes | None) -> None:
    assert shown_key(headers) == expected


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"host"]), st.binary(max_size=600))))
def test_any_headers_show_a_text_or_none(headers: list[tuple[bytes, bytes]]) -> None:
    text = shown_key(headers)
    assert text is None or any(text in value for _, value in headers)
