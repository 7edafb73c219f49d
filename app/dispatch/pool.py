"""One replica as a dispatcher has it: how to reach it, and what it has been given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from app.control.routing import ReplicaRoute
from app.dispatch.queue import Item
from app.transport.protocol import FrameReplicaClient, ReplicaClient

__all__ = ["Connect", "ReplicaCalls"]


@dataclass(slots=True, eq=False)
class ReplicaCalls:
    """A replica and the calls that it has."""

    route: ReplicaRoute
    client: ReplicaClient | FrameReplicaClient
    calls: int = 0
    rows: int = 0
    """Outstanding."""
    batches: dict[int, list[Item]] = field(default_factory=dict)
    """Under way, by identity."""
    is_retiring: bool = False
    """Others have replaced it: it gets no call any more, and finishes those that it has."""
    is_lost: bool = False
    """It failed as a whole; it gets no call any more, and the supervisor will take it from the table."""

    is_sharing: bool = True
    """Whether it can open this worker's memory."""

    @property
    def is_able(self) -> bool:
        """Whether it gets calls."""
        return not self.is_lost and not self.is_retiring


LOST_RETRY_S = 2.0
"""A replica that ended is out of the table within this time."""

Connect = Callable[[str, ReplicaRoute], "ReplicaClient | FrameReplicaClient"]
