"""What is said of rows whose call raised."""

from __future__ import annotations

import pytest

from headwater.errors import BadInput, BadOutput, ReplicaError
from headwater.runtime.failure_log import CallFailed, Failures
from headwater.wire.report import RowReport, Status


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (BadInput("too long"), RowReport(Status.BAD_INPUT, "too long")),
        (BadInput("too long", status=413), RowReport(Status.TOO_LARGE, "too long")),
        (BadOutput("no `y`"), RowReport(Status.BAD_OUTPUT, "step `a`: no `y`")),
        (BadOutput("step `b`, input `x`: no"), RowReport(Status.BAD_OUTPUT, "step `b`, input `x`: no")),
        (CallFailed("all of it"), RowReport(Status.RAISED, "all of it")),
        (KeyError(), RowReport(Status.RAISED, "step `a`: KeyError")),
        (SystemExit("bye"), RowReport(Status.RAISED, "step `a`: SystemExit: bye")),
    ],
)
def test_what_a_row_is_reported_to_have_failed_of(error: BaseException, report: RowReport) -> None:
    assert Failures("cpu", lambda reason: None, "step `a`: ").report(error) == report


def test_a_callable_may_end_its_replica() -> None:
    ended: list[str] = []
    report = Failures("cpu", ended.append).report(ReplicaError("can't go on"))
    assert report == RowReport(Status.BROKEN, "ReplicaError: can't go on")
    assert ended == [report.message]
