"""Leaves out a gateway worker's bookkeeping: with this folder on PYTHONPATH, Python runs this as it starts.

Only in workers; `benchmarks.bookkeeping` sees by a scrape that nothing is counted. What is replaced is what a request
for a tensor model passes.
"""

from __future__ import annotations

import sys
from typing import Any


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Instead."""


if "headwater_server.gateway.worker" in sys.orig_argv:
    from headwater_server.dispatch import dispatcher as dispatch
    from headwater_server.gateway.http import connections
    from headwater_server.gateway.http import entry as middleware
    from headwater_server.gateway.routes import infer
    from headwater_server.telemetry import instruments, recorder

    for owner, names in (
        (instruments.Counter, ("add",)),
        (instruments.Histogram, ("observe", "observe_all")),
        (instruments.Requests, ("accept", "end")),
        (recorder.DeploymentMeter, ("note_request", "note_call")),
        (infer, ("accept",)),
        (middleware, ("leave", "current")),
        (dispatch, ("add_model",)),
        (connections.Connections, ("begin", "end")),
    ):
        for name in names:
            if not hasattr(owner, name):
                raise AttributeError(f"{owner!r}: expected {name}, which is to be left out")
            setattr(owner, name, _nothing)
