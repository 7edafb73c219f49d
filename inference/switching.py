"""How soon Python's threads give each other the interpreter."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["switch_soon"]

SWITCH_INTERVAL_S: Final = 0.0005


def switch_soon() -> None:
    """For a replica that streams: one thread computes while others send what is there.

    Python's own 5 ms is half a step of a small language model, which would wait for it with each answer that leaves.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
