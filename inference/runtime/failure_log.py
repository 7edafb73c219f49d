"""Logs where in the user's code a callable failed, at a limited rate for each place."""

from __future__ import annotations

import logging
import time
import traceback

__all__ = ["FailureLog", "text_of"]

logger = logging.getLogger(__name__)

QUIET_S = 60.0
PLACES_KEPT = 1000


class FailureLog:
    """Logs a traceback for each place that raises, at most once per `QUIET_S`."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, int], tuple[float, int]] = {}

    def note(self, error: BaseException) -> None:
        """Log the exception, or only count it if its place was logged less than `QUIET_S` ago."""
        last = traceback.extract_tb(error.__traceback__, limit=-1)
        place = (type(error).__name__, last[0].filename if last else "", (last[0].lineno or 0) if last else 0)
        now = time.monotonic()
        logged, unlogged = self._places.get(place, (-QUIET_S, 0))
        if now - logged < QUIET_S:
            self._places[place] = (logged, unlogged + 1)
            return
        if len(self._places) >= PLACES_KEPT:
            self._places.clear()
        self._places[place] = (now, 0)
        more = f" ({unlogged} more of the same since the last)" if unlogged else ""
        try:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        except Exception:  # the exception's own `__str__` raises
            text = "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
        text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates make some handlers fail
        logger.warning("the callable failed%s\n%s", more, text.rstrip())


def text_of(error: BaseException) -> str:
    """An exception's message, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "(its message can't be read)"
