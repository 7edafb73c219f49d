"""Where every request is counted in and out: `app.middleware.RequestRecords` sees each, however it ends.

A request is accepted as soon as its deployment is known (`accept`), and from then on ends with exactly one outcome
(`leave`): so accepted = the sum over all outcomes + in flight, for every deployment and route. What is refused before,
for its method, its JSON or a model that there isn't, is among `headwater_http_requests_total` only.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from app.errors import HeadwaterError
from app.metrics.catalogue import Route
from app.metrics.instruments import Requests
from app.metrics.recorder import outcome_of, outcome_of_status, recorder

__all__ = ["UNMATCHED", "accept", "leave", "note_error"]

UNMATCHED: Final = "unmatched"
"""The route of a path that there isn't."""
_OUTCOME: Final = "outcome"
_REQUESTS: Final = "requests"


def accept(scope: MutableMapping[str, Any], deployment: str, route: Route) -> None:
    """A request's deployment is known.

    Args:
        scope: the request's.
        deployment: a name from the routing table, never one that only the client knows.
        route: over which it came.
    """
    requests = recorder().requests(deployment, route)
    requests.accept()
    scope["state"][_REQUESTS] = requests


def note_error(state: MutableMapping[str, Any], error: HeadwaterError) -> None:
    """A request has failed, whatever status it has begun to answer with."""
    state[_OUTCOME] = outcome_of(error)


def leave(scope: MutableMapping[str, Any], status: int, took_ns: int) -> None:
    """A request is over.

    Args:
        scope: the request's.
        status: that it was answered with; 499: the client went away before the end.
        took_ns: since its head was here.
    """
    state = scope["state"]
    path = getattr(scope.get("route"), "path", UNMATCHED)
    recorder().http_requests(path, status).add()
    requests: Requests | None = state.get(_REQUESTS)
    if requests is not None:
        requests.end(state.get(_OUTCOME) or outcome_of_status(status), took_ns)
