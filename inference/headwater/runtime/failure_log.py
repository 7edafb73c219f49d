"""Failures of a user's code: row reports for clients, and tracebacks in the log at a limited rate for each place."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final

from headwater.errors import BadInput, BadOutput, ModelError, ReplicaError
from headwater.runtime.device import breaks_device, is_out_of_memory
from headwater.wire.report import CLIENT_FAULTS, RowReport, Status

__all__ = ["CallFailed", "FailureLog", "Failures", "text_of"]

logger = logging.getLogger(__name__)

QUIET_S: Final = 60.0
PLACES_KEPT: Final = 1000


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


class CallFailed(ModelError):
    """All rows of a call fail with exactly this message; retrying with fewer rows would not help."""


class Failures(FailureLog):
    """Turns a model's exceptions into row reports, and logs them.

    `where` begins the messages, except those of `BadInput`, `CallFailed` and `Status.BROKEN`, and those that begin
    with a step. `on_broken` is called with the reason when the device is unusable or the model raised a `ReplicaError`;
    the replica then ends.
    """

    def __init__(self, device: str, on_broken: Callable[[str], None], where: str = "") -> None:
        super().__init__()
        self._device = device
        self._on_broken = on_broken
        self._where = where

    def report(self, error: BaseException) -> RowReport:
        """The report of rows whose call raised this exception."""
        text = text_of(error)
        if isinstance(error, BadInput):
            return RowReport(CLIENT_FAULTS[error.status], text)
        self.note(error)
        if isinstance(error, CallFailed):
            return RowReport(Status.RAISED, text)
        if isinstance(error, BadOutput):
            # The message of a handover already names the step.
            message = text if text.startswith("step `") else f"{self._where}{text}"
            return RowReport(Status.BAD_OUTPUT, message, error.mismatch)
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if isinstance(error, ReplicaError) or breaks_device(reason, self._device):
            self._on_broken(reason)
            return RowReport(Status.BROKEN, reason)
        status = Status.OUT_OF_MEMORY if is_out_of_memory(reason) else Status.RAISED
        return RowReport(status, f"{self._where}{reason}")
