"""Recognizes Triton's error messages and log lines by their wording, since Triton has no codes for them.

tests/end_to_end/test_triton_words.py provokes them in a real Triton where that is possible; a server that is stopping
mostly closes the connection instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["error_lines", "is_ending", "is_stub_lost", "says_instance_failed"]

_STUB_LOST = re.compile(r"Stub process .*is not healthy")
_ENDING = re.compile(r"Request for unknown model\b|Server is stopping\b")
_NO_INSTANCE = "Failed to create instance"
_ERROR = re.compile(r"[EF]\d{4} |error: ")
_NO_GPU = "CudaDriverHelper has not been initialized"
"""Logged on every machine without a GPU."""


def is_stub_lost(message: str) -> bool:
    """Whether a call failed because the model's process is gone."""
    return _STUB_LOST.search(message) is not None


def is_ending(message: str) -> bool:
    """Whether a call was refused because Triton is stopping: once its host has ended, it unloads its models first, and
    nothing else unloads them."""
    return _ENDING.search(message) is not None


def says_instance_failed(log: str) -> bool:
    """Whether an instance of a model failed to start. The log says so at once, while Triton keeps waiting for the other
    instances, which wait for the failed one."""
    return _NO_INSTANCE in log


def error_lines(log: Sequence[str]) -> list[str]:
    """The lines of a log that report errors."""
    return [line for line in log if _ERROR.match(line) and _NO_GPU not in line]
