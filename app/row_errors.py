"""How rows fared in a replica, as errors that a client sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from app.errors import BadRequest, CallableFailed, HeadwaterError, ReplicaLost, Unavailable
from app.routing import LAST_LINES, DeploymentRoute, State
from inference.report import RowReport, Status

__all__ = ["RETRY_AFTER_LOST_S", "row_error", "unavailable"]

RETRY_AFTER_LOST_S: Final = 2
RETRY_AFTER_S: Final = {State.LOADING: 5, State.FAILED: 60}
RETRY_AFTER_UNLOADED_S: Final = 60


def unavailable(route: DeploymentRoute) -> Unavailable:
    """Says that a deployment can't take requests, and why."""
    wait_s = RETRY_AFTER_S.get(route.state, RETRY_AFTER_UNLOADED_S if route.is_set_aside else RETRY_AFTER_LOST_S)
    reason = route.failure or route.reason.partition(LAST_LINES)[0] or "no replica is ready"
    return Unavailable(f"model `{route.name}` is {route.state.value}: {reason}", retry_after_s=wait_s)


def row_error(reports: Sequence[RowReport], first_row: int, rows: int) -> HeadwaterError | None:
    """The error of the first row that failed.

    Args:
        reports: of some of a request's rows.
        first_row: which of the request's rows is the first of these.
        rows: how many the request has.
    """
    for index, report in enumerate(reports):
        if report.status is Status.OK:
            continue
        where = f"row {first_row + index}: " if rows > 1 else ""
        if report.status is Status.BAD_INPUT:
            return BadRequest(f"{where}{report.message}", field="inputs")
        if report.status is Status.BROKEN:
            return ReplicaLost(f"the replica's device failed: {report.message}", retry_after_s=RETRY_AFTER_LOST_S)
        return CallableFailed(f"{where}{report.message}")
    return None
