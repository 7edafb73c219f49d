"""Recognizes Triton's error messages by their wording, since Triton has no codes for them.

tests/end_to_end/test_triton_words.py provokes them in a real Triton where that is possible; a server that is stopping
mostly closes the connection instead.
"""

from __future__ import annotations

import re

__all__ = ["is_ending", "is_stub_lost"]

_STUB_LOST = re.compile(r"Stub process .*is not healthy")
_ENDING = re.compile(r"Request for unknown model\b|Server is stopping\b")


def is_stub_lost(message: str) -> bool:
    """Whether a call failed because the model's process is gone."""
    return _STUB_LOST.search(message) is not None


def is_ending(message: str) -> bool:
    """Whether a call was refused because Triton is stopping: once its host has ended, it unloads its models first, and
    nothing else unloads them."""
    return _ENDING.search(message) is not None
