"""What all replica sets share: processes, tasks, memory, and whether everything is about to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from app.config.schema import Deployment
from app.control.messages import Drained
from app.process.children import Children
from app.supervisor.replica_memory import ReplicaMemory
from app.supervisor.replica_process import ReplicaProcess
from app.telemetry.logs import REPLICA_LOGGER

__all__ = ["WATCH_EVERY_S", "Host", "kill"]

logger = logging.getLogger("headwater")
replica_logger = logging.getLogger(REPLICA_LOGGER)

WATCH_EVERY_S: Final = 0.5


class Host:
    """Has the processes and tasks of everything that is served.

    Args:
        memory: finds room for replicas.
        user_paths: put first on every replica's ``sys.path``.
        drain: see `app.control.server.ControlServer.drain`.
        on_change: called when a set's state or replicas have changed.
    """

    def __init__(
        self,
        memory: ReplicaMemory,
        user_paths: tuple[str, ...],
        drain: Callable[[str, float, list[str] | None], Awaitable[Drained]],
        on_change: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.drain = drain
        self.on_change = on_change
        # Loading is mostly imports and disk; more at once than cores only makes each slower.
        self.start_slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self.folder = Path()
        """The instance's, which is made before anything is launched."""
        self.children = Children()
        self.replicas: dict[str, ReplicaProcess] = {}
        """By id, until they have ended."""
        self.stopping = asyncio.Event()
        """Set when everything is to end."""
        self.status = 0
        """Of the whole, once it has ended."""
        self._user_paths = user_paths
        self._launched = 0
        self._followed: dict[int, tuple[str, ReplicaProcess | None]] = {}
        """By process id: what it is, and whose guardian."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_stopping(self) -> bool:
        """Whether everything is about to end."""
        return self.stopping.is_set()

    def stop(self, status: int = 0) -> None:
        """Let everything end."""
        self.status = self.status or status
        self.stopping.set()

    async def wait_for_stop(self, timeout_s: float) -> None:
        """Sleep, unless everything is about to end."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), timeout_s)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that `finish` waits for; if it fails, everything ends."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self.note_done)
        return task

    def note_done(self, task: asyncio.Task[None]) -> None:
        """Called with each task that has ended."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the supervisor can't go on", exc_info=error)
            self.stop(1)

    async def finish(self) -> None:
        """Wait for the tasks that were spawned."""
        await asyncio.gather(*self._tasks)

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None]) -> ReplicaProcess:
        """Start a replica's process.

        Args:
            name: of the deployment whose it is.
            config: what it is started with; during a reload this is not yet the set's own.
            on_progress: called with each stage of its start.

        Raises:
            OSError: the machine lacks what it takes.
        """
        self._launched += 1
        id = f"{name}-{self._launched}"

        def progress(text: str) -> None:
            logger.info("%s: %s", id, text)
            on_progress(text)

        def log(line: str) -> None:
            replica_logger.info("%s", line, extra={"replica": id})

        # A folder's name is short, because sockets lie in it, whose paths must be.
        folder = self.folder / f"r{self._launched}"
        replica = ReplicaProcess(name, id, config, folder, self._user_paths, on_progress=progress, on_log=log)
        exited = self.follow(replica.start(), f"the guardian of {id}", replica)
        replica.exited = self.spawn(replica.follow(exited))
        self.replicas[id] = replica
        replica.exited.add_done_callback(lambda _: self.replicas.pop(id))
        return replica

    def follow(
        self, process: subprocess.Popen[bytes], role: str, replica: ReplicaProcess | None = None
    ) -> asyncio.Future[int]:
        """A future of a process's exit code; must be called in the same step as the process is started.

        Args:
            process: a child of this process.
            role: what it is, for the log.
            replica: whose guardian it is.
        """
        pid = process.pid
        self._followed[pid] = role, replica
        exited = self.children.follow(process)
        exited.add_done_callback(lambda _: self._followed.pop(pid))
        return exited

    async def watch(self) -> None:
        """Kill processes that are stopped, which neither work nor end; others take their places."""
        while True:
            for pid in self.children.look():
                role, replica = self._followed[pid]
                if replica is not None:
                    replica.mark_ending("its guardian is stopped")
                logger.error("%s (%d) is stopped: killing it", role, pid)
                kill(pid)
            await asyncio.sleep(WATCH_EVERY_S)


def kill(pid: int) -> None:
    """End a process at once, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
