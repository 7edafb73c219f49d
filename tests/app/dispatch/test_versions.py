"""Which version of a deployment answers a request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.dispatch.versions import version_for

SHARES = st.lists(st.integers(1, 100), min_size=1, max_size=5).map(
    lambda parts: {str(n): part / sum(parts) for n, part in enumerate(parts)}
)


@pytest.mark.parametrize(
    "shares", [{"1": 0.95, "2": 0.05}, {"1": 0.5, "2": 0.5}, {"a": 0.2, "b": 0.3, "c": 0.5}], ids=str
)
def test_the_shares_of_many_requests_are_those_configured(shares: dict[str, float]) -> None:
    found = Counter(version_for(f"classify\n{n:032x}", shares) for n in range(20_000))
    for version, share in shares.items():
        assert abs(found[version] / 20_000 - share) < 0.01


@given(SHARES, st.text(max_size=40))
def test_a_key_gets_the_same_version_again_and_none_without_a_share(shares: dict[str, float], key: str) -> None:
    version = version_for(key, {**shares, "none": 0.0})
    assert version in shares
    assert version == version_for(key, {**shares, "none": 0.0})


@given(st.floats(0, 1), st.floats(0, 1), st.text(max_size=40))
def test_who_has_the_second_version_keeps_it_while_its_share_grows(one: float, other: float, key: str) -> None:
    less, more = sorted((one, other))
    if version_for(key, {"1": 1 - less, "2": less}) == "2":
        assert version_for(key, {"1": 1 - more, "2": more}) == "2"


def test_the_hash_is_the_same_on_every_machine() -> None:
    assert [version_for(key, {"1": 0.5, "2": 0.5}) for key in "abcdefgh"] == list("12121111")
