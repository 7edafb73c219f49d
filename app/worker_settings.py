"""What a gateway worker is started with; in a file, because a command line can be read by everybody."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["WorkerSettings"]


class WorkerSettings(msgspec.Struct, frozen=True):
    """Written by the supervisor, read by `app.worker`."""

    control: str
    """Path of the control socket."""
    server: dict[str, Any]
    """The configuration's `app.config.schema.Server`."""
    security: dict[str, Any] = {}
    """The configuration's `app.config.sections.SecuritySection`."""
    index: int = 0
    """Which of the workers this is."""
    metrics: str = ""
    """Path of the file that it counts in; empty: in memory only."""
