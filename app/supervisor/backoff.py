"""How long to wait before a process is started again."""

from __future__ import annotations

from typing import Final

__all__ = ["Backoff"]

FIRST_S: Final = 0.5

LAST_S: Final = 30.0

STEADY_AFTER_S: Final = 60.0
"""A process that lived this long is replaced soon, without the backoff of earlier crashes."""


class Backoff:
    """Twice as long each time."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a process that lived so long."""
        wait_s = FIRST_S if lived_s > STEADY_AFTER_S else self._next_s
        self._next_s = min(wait_s * 2, LAST_S)
        return wait_s
