"""Recognizes the error messages of Triton, and of our script in it, by their wording, since Triton has no codes.

tests/end_to_end/test_triton_words.py provokes them in a real Triton where that is possible; a server that is stopping
mostly closes the connection instead.
"""

from __future__ import annotations

import re

__all__ = ["SHARED_MEMORY_FULL", "is_ending", "is_process_lost", "is_shared_memory_full"]

SHARED_MEMORY_FULL = (
    "/dev/shm is full: the tensors of the call don't fit into what is free of it; expected fewer or smaller rows in a "
    "request, or a larger /dev/shm (docker run --shm-size, in Kubernetes the `sizeLimit` of an emptyDir in memory)"
)
"""What to say in place of Triton's own words."""

_ENDING = re.compile(r"Request for unknown model\b|Server is stopping\b")


def is_process_lost(message: str) -> bool:
    """Whether a call failed because a process of the model is gone: Triton's, or the callable's."""
    _, stub, rest = message.partition("Stub process ")
    return (stub != "" and "is not healthy" in rest) or "the callable's process has ended" in message


def is_shared_memory_full(message: str) -> bool:
    """Whether a call failed because its tensors don't fit into /dev/shm, through which Triton's backend passes them."""
    return "shared memory pool size" in message


def is_ending(message: str) -> bool:
    """Whether a call was refused because Triton is stopping: once its host has ended, it unloads its models first, and
    nothing else unloads them."""
    return _ENDING.search(message) is not None
