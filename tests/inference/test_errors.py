"""What clients are shown of an error's text, and which errors show that the machine lacks something."""

from __future__ import annotations

import errno
import os

import pytest

from headwater.errors import CAUSE_CHARACTERS, LoadError, Problem, shortage_in, shortage_of, text_for_clients


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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "lacks space on a disk"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "lacks processes or threads"),
        (RuntimeError("can't start new thread"), "lacks processes or threads"),
    ],
)
def test_a_shortage_says_what_the_machine_lacks(error: Exception, text: str) -> None:
    assert text in str(shortage_of(error))
    assert text in str(shortage_in(["one line", f"another: {error}"])) or isinstance(error, RuntimeError)


def test_a_load_errors_shortage_is_in_its_cause_or_without_a_cause_in_its_reason() -> None:
    text = os.strerror(errno.EMFILE)
    in_words = LoadError(Problem("model m", f"config.json can't be read: {text}", "correct it"))
    assert "lacks" in str(shortage_of(in_words))
    caused = LoadError(Problem("model m", f"its code logged: {text}", "correct it"))
    caused.__cause__ = ValueError("no weights")
    assert shortage_of(caused) is None


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "none"), RuntimeError("no weights"), ValueError()])
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert shortage_of(error) is None
    assert shortage_in([str(error)]) is None
