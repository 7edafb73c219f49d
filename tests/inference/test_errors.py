"""What clients are shown of an error's text."""

from __future__ import annotations

import pytest

from inference.errors import CAUSE_CHARACTERS, text_for_clients


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file /srv/models/a.pt", "no file a.pt"),
        ("in ~/models/a.pt: damaged\nTraceback", "in a.pt: damaged"),
        ("'/srv/models/lm/' is empty", "'lm/' is empty"),
        ("http://host/a/b", "http://host/a/b"),
        ("expected 3 / 2, got //", "expected 3 / 2, got //"),
        ("1/2 of a/b", "1/2 of a/b"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, shown: str) -> None:
    assert text_for_clients(text) == shown


def test_a_long_text_is_cut() -> None:
    assert len(text_for_clients("/a " * 100_000)) == CAUSE_CHARACTERS
