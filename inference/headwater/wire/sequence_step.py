"""What the gateway tells a repository's replica of a sequence's request, by parameters."""

from __future__ import annotations

from typing import Final

__all__ = ["FILE_IDLE_S", "MOVED", "STEP"]

STEP: Final = "headwater_step"
"""The request's number in its sequence, from 1; the same when the request is sent again."""
MOVED: Final = "headwater_moved"
"""Whether the sequence was at another replica before. Triton is told that the sequence begins; the model isn't."""
FILE_IDLE_S: Final = 3600.0
"""Seconds after its last request in which the states of a sequence are kept."""
