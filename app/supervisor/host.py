"""What a replica set needs of who has it: the supervisor, or a test.

What came of ending replicas: who was in flight, what was freed, what remains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from app.config.schema import Deployment
from app.control.messages import Drained
from app.process.proc import NOTHING, GroupMemory
from app.supervisor.replica_process import ReplicaProcess

if TYPE_CHECKING:
    from app.supervisor.replica_memory import ReplicaMemory

__all__ = ["Host", "Launched", "Retired"]


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


@dataclass
class Retired:
    """What came of ending replicas."""

    drained: Drained = field(default_factory=Drained)
    before: GroupMemory = NOTHING
    after: GroupMemory = NOTHING
    leftovers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """As an operator is told."""
        gpu = None
        if self.before.gpu_bytes is not None and self.after.gpu_bytes is not None:
            gpu = self.before.gpu_bytes - self.after.gpu_bytes
        told: dict[str, Any] = {
            "drained": self.drained.drained,
            "ended": self.drained.ended,
            "freed": {"host_bytes": self.before.host_bytes - self.after.host_bytes, "gpu_bytes": gpu},
            "leftovers": self.leftovers,
        }
        if self.warnings:
            told["warnings"] = self.warnings
        return told

    def __add__(self, other: Retired) -> Retired:
        """Both together."""
        return Retired(
            self.drained + other.drained,
            _sum(self.before, other.before),
            _sum(self.after, other.after),
            self.leftovers + other.leftovers,
            self.warnings + other.warnings,
        )


def _sum(one: GroupMemory, other: GroupMemory) -> GroupMemory:
    gpu = [found for found in (one.gpu_bytes, other.gpu_bytes) if found is not None]
    return GroupMemory(one.host_bytes + other.host_bytes, sum(gpu) if gpu else None)
