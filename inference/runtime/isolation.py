"""Isolates the rows that make a model fail, by halving the batch, so that only they fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from inference.errors import BadInput, BadOutput, ModelError
from inference.runtime.device import breaks_device
from inference.runtime.failure_log import FailureLog, text_of
from inference.wire.report import RowReport, Status

__all__ = ["CallFailed", "Errors", "Isolation", "RaggedPieces"]

P = TypeVar("P")
J = TypeVar("J")


class CallFailed(ModelError):
    """All rows of a call fail with this message as it is; retrying with fewer rows would not help."""


class RaggedPieces(Exception):
    """The pieces of a batch can't be joined because their shapes differ."""


class Errors:
    """Turns a model's exceptions into row reports, and logs them for the operator.

    Args:
        device: the model's device.
        on_broken: called once the device is unusable; the replica then ends.
        where: prefix of the messages, such as ``step `name`: ``.
    """

    def __init__(self, device: str, on_broken: Callable[[str], None], where: str = "") -> None:
        self._device = device
        self._on_broken = on_broken
        self._where = where
        self._log = FailureLog()

    def log(self, error: BaseException) -> None:
        """Log an exception that appears in no row's report."""
        self._log.note(error)

    def report(self, error: BaseException) -> RowReport:
        """The report of rows whose call raised this exception."""
        text = text_of(error)
        if isinstance(error, BadInput):
            return RowReport(Status.BAD_INPUT, text)
        self._log.note(error)
        if isinstance(error, CallFailed):
            return RowReport(Status.RAISED, text)
        if isinstance(error, BadOutput):
            # The message of a handover already names the step.
            return RowReport(Status.BAD_OUTPUT, text if text.startswith("step `") else f"{self._where}{text}")
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if breaks_device(reason, self._device):
            self._on_broken(reason)
            return RowReport(Status.BROKEN, reason)
        return RowReport(Status.RAISED, f"{self._where}{reason}")


class Isolation(Generic[P]):
    """Makes the calls of one batch.

    Args:
        call: calls the model with these rows, given whether that is a retry, and returns a piece. Later calls must not
            change a piece that a retry returned.
        errors: makes the reports of the model's errors.
        may_split: whether rows may be computed twice, so that a failed call may be retried with half of them.
    """

    __slots__ = ("_call", "_errors", "_may_split", "failures")

    def __init__(self, call: Callable[[list[int], bool], Awaitable[P]], errors: Errors, *, may_split: bool) -> None:
        self._call = call
        self._errors = errors
        self._may_split = may_split
        self.failures: dict[int, RowReport] = {}
        """Reports by row."""

    async def run(self, rows: int, join: Callable[[Sequence[P]], J], *, is_retry: bool = False) -> J:
        """Compute a batch.

        Args:
            rows: the number of rows.
            join: joins the pieces, which are in the order of their rows. If it raises `RaggedPieces`, all rows that
                succeeded are computed once more in one call, which gives one piece or none.
            is_retry: whether the first call counts as a retry, too.
        """
        pieces = await self._attempt(list(range(rows)), is_retry=is_retry, may_split=self._may_split)
        try:
            return join(pieces)
        except RaggedPieces:
            good = [row for row in range(rows) if row not in self.failures]
            return join(await self._attempt(good, is_retry=True, may_split=False))

    async def _attempt(self, rows: list[int], *, is_retry: bool, may_split: bool) -> list[P]:
        try:
            return [await self._call(rows, is_retry)]
        except BaseException as error:
            # SystemExit and the like too: they would end PyTriton's thread, and the replica would hang.
            report = self._errors.report(error)
            may_split = may_split and not isinstance(error, CallFailed)
        if may_split and report.status is not Status.BROKEN and len(rows) > 1:
            middle = len(rows) // 2
            left = await self._attempt(rows[:middle], is_retry=True, may_split=True)
            return left + await self._attempt(rows[middle:], is_retry=True, may_split=True)
        self.failures.update(dict.fromkeys(rows, report))
        return []
