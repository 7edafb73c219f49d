"""Which of Triton's words say that a process is lost."""

from __future__ import annotations

import pytest

from headwater.wire.triton_words import is_process_lost, is_shared_memory_full


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


def test_a_full_shared_memory_is_recognized() -> None:
    failed = (
        "Failed to increase the shared memory pool size for key 'k' to 4194304 bytes. Error: No space left on device"
    )
    assert is_shared_memory_full(failed)
    assert is_shared_memory_full(f"Failed to process the request(s) for model 'm_0_0', message: {failed}")
    assert not is_shared_memory_full("OSError: [Errno 28] No space left on device")
