"""Which of Triton's words say that a process is lost."""

from __future__ import annotations

import pytest

from inference.wire.triton_words import is_process_lost


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("Stub process 'm_0_0' is not healthy.", True),
        ("the callable's process has ended", True),
        ("is not healthy: Stub process ", False),
        ("Stub process 'm_0_0' is healthy", False),
        ("is not healthy", False),
    ],
)
def test_a_lost_process_is_recognized(message: str, is_lost: bool) -> None:
    assert is_process_lost(message) is is_lost
