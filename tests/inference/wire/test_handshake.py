"""What a replica that can't start says of it: all of it for operators, class and message for clients."""

from __future__ import annotations

import errno

import pytest

from headwater.errors import DeclarationError, LoadError, ModelUnfit, Problem, ReplicaError
from headwater.wire.handshake import failure_of


def wrapped() -> LoadError:
    """What the loader makes of an exception of the user's code."""
    problem = Problem("model m:M", "its constructor raised OSError: no weights at /srv/m.py:3", "correct /srv/m.py:3")
    try:
        try:
            raise OSError("no weights in /srv/models/big.pt")
        except OSError as error:
            raise LoadError(problem) from error
    except LoadError as error:
        return error


def after(first: Exception, second: Exception) -> Exception:
    """The second error, raised while the first one was handled."""
    try:
        try:
            raise first
        except Exception:
            raise second  # noqa: B904
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "cause", "is_permanent"),
    [
        (wrapped(), "OSError: no weights in big.pt", False),
        (LoadError(Problem("model m:M", "/srv/models/m.py has no M", "add it")), "m.py has no M", True),
        (DeclarationError("expected FP32, got FP99"), "expected FP32, got FP99", True),
        (RuntimeError("boom\nTraceback: more"), "RuntimeError: boom", False),
        (
            FileNotFoundError(2, "No such file", "/srv/a/b.bin"),
            "FileNotFoundError: [Errno 2] No such file: 'b.bin'",
            False,
        ),
        (ReplicaError("see https://example.org/a/b"), "see https://example.org/a/b", False),
        (ValueError(), "ValueError", True),
        (after(ConnectionError("refused"), ValueError("no weights")), "ValueError: no weights", False),
        (MemoryError("no memory"), "MemoryError: no memory", False),
        (type("Gone", (ValueError,), {})("a library's"), "Gone: a library's", False),
        (ModelUnfit("warm-up with a batch of 1: TypeError: no"), "warm-up with a batch of 1: TypeError: no", True),
    ],
)
def test_a_failure_has_class_and_message_for_clients(error: Exception, cause: str, is_permanent: bool) -> None:
    status = failure_of(error)
    assert (status.event, status.cause, status.is_permanent) == ("failed", cause, is_permanent)
    assert str(error) in status.text


def test_a_long_message_is_cut_for_clients() -> None:
    assert len(failure_of(RuntimeError("x" * 5000)).cause) == 300


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "lacks file descriptors"),
        (RuntimeError("can't start new thread"), "lacks processes or threads"),
        (ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"), "lacks memory"),
    ],
)
def test_a_model_that_could_not_be_made_for_a_shortage_is_tried_again(cause: Exception, text: str) -> None:
    error = LoadError(Problem("model m:C", f"its constructor raised {cause} at m.py:3", "correct m.py:3"))
    error.__cause__ = cause
    status = failure_of(error)
    assert status.is_shortage
    assert not status.is_permanent
    assert text in status.text
    assert "at m.py:3" in status.text
