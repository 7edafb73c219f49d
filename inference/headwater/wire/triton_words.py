"""Recognizes error messages of Triton and of Headwater's script in Triton by their wording: Triton has no error codes.

tests/end_to_end/test_triton_words.py provokes the messages in a real Triton where that is possible. A Triton that is
stopping mostly closes the connection instead.
"""

from __future__ import annotations

import re

__all__ = ["SHARED_MEMORY_FULL", "is_ending", "is_process_lost", "is_shared_memory_full"]

SHARED_MEMORY_FULL = (
    "/dev/shm is full: the tensors of the call don't fit into its free space; expected fewer or smaller rows in a "
    "request, or a larger /dev/shm (docker run --shm-size, in Kubernetes the `sizeLimit` of an emptyDir in memory)"
)
"""The error message for clients in place of Triton's message."""

_ENDING = re.compile(r"Request for unknown model\b|Server is stopping\b")


def is_process_lost(message: str) -> bool:
    """Whether a call failed because the model's process has ended: Triton's stub, or the callable's process."""
    _, stub, rest = message.partition("Stub process ")
    return (stub != "" and "is not healthy" in rest) or "the callable's process has ended" in message


def is_shared_memory_full(message: str) -> bool:
    """Whether a call failed because /dev/shm is too small: Triton's backend passes the call's tensors through it."""
    return "shared memory pool size" in message


def is_ending(message: str) -> bool:
    """Whether a call was refused because Triton is stopping. When its host has ended, Triton first unloads its models,
    so "unknown model" means stopping too: models are never unloaded for another reason."""
    return _ENDING.search(message) is not None
