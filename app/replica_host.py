"""What a replica set needs of who has it: the supervisor, or a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from app.config.schema import Deployment
from app.control.messages import Drained
from app.replica_process import ReplicaProcess

if TYPE_CHECKING:
    from app.replica_memory import ReplicaMemory

__all__ = ["Host", "Launched"]


class Launched(NamedTuple):
    """A replica's process on its way."""

    replica: ReplicaProcess
    exited: asyncio.Future[int]
    """Done when its guardian has been reaped."""


class Host(Protocol):
    """Who has the replica sets: the supervisor."""

    @property
    def is_stopping(self) -> bool:
        """Whether everything is about to end."""
        ...

    start_slots: asyncio.Semaphore
    """Bounds how many replicas start at once."""
    memory: ReplicaMemory
    """Finds room for replicas."""

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None]) -> Launched:
        """Start a replica's process.

        Args:
            name: of the deployment whose it is.
            config: what it is started with; during a reload this is not yet the set's own.
            on_progress: called with each stage of its start.

        Raises:
            OSError: the machine lacks what it takes.
        """
        ...

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that the end of everything waits for."""
        ...

    async def wait_for_stop(self, timeout_s: float) -> None:
        """Sleep, unless everything is about to end."""
        ...

    async def drain(self, name: str, timeout_s: float, replicas: list[str] | None) -> Drained:
        """See `app.control.server.ControlServer.drain`."""
        ...

    def on_change(self) -> None:
        """Called when a set's state or replicas have changed."""
        ...
