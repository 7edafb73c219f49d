"""Triton's own words: what its error messages and its log say, as far as we must tell one from another.

Triton has no codes for these. tests/end_to_end/test_triton_words.py has a real Triton say those that can be provoked; a
server that is stopping mostly hangs up instead.
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
"""Which it says of every machine without one."""


def is_stub_lost(message: str) -> bool:
    """Whether a call failed because the process that has the model is gone."""
    return _STUB_LOST.search(message) is not None


def is_ending(message: str) -> bool:
    """Whether a call was refused because Triton is ending: in good order when its host has ended, and its models go
    first. Nobody else unloads them."""
    return _ENDING.search(message) is not None


def says_instance_failed(log: str) -> bool:
    """Whether an instance of a model failed to start, which the log says at once. Triton goes on to wait for the other
    instances, which wait for the one that failed."""
    return _NO_INSTANCE in log


def error_lines(log: Sequence[str]) -> list[str]:
    """The lines of a log that tell of errors."""
    return [line for line in log if _ERROR.match(line) and _NO_GPU not in line]
