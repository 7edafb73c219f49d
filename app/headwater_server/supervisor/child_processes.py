"""Child processes and tasks of the supervisor, and what all replica sets share: memory, whether the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from headwater_server.config.schema import Deployment
from headwater_server.control.messages import Drained
from headwater_server.process.interpreter import asked
from headwater_server.process.machine import cpu_count
from headwater_server.process.proc import working_folder
from headwater_server.process.sweep import process_stats
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.memory_budget import ReplicaMemory
from headwater_server.supervisor.replica_process import Child, Fork, ReplicaProcess
from headwater_server.telemetry.model_counts import ModelCounts

__all__ = ["Backoff", "ChildProcesses", "kill", "until"]

logger = logging.getLogger("headwater")

PR_SET_CHILD_SUBREAPER: Final = 36
ORPHANS_TIMEOUT_S: Final = 5.0
"""Seconds that processes left behind by a killed guardian may take to end."""
WATCH_EVERY_S: Final = 0.5
UNTIL_POLL_S: Final = 0.02
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
STEADY_AFTER_S: Final = 60.0
"""A process that lived this many seconds is restarted soon, without the backoff of earlier crashes."""


@dataclass
class _Child:
    """A child process that is followed until it exits."""

    process: Child
    role: str
    replica: ReplicaProcess | None
    exited: asyncio.Future[int]


class ChildProcesses:
    """Owns the processes and tasks of everything that is served.

    Args:
        memory: finds capacity for replicas.
        user_paths: folders of the user's modules, for every replica's ``sys.path``.
        drain: see `headwater_server.control.control_server.ControlServer.drain`.
        on_change: called when a deployment's route may have changed.
    """

    def __init__(
        self,
        memory: ReplicaMemory,
        user_paths: tuple[str, ...],
        drain: Callable[..., Awaitable[Drained]],
        on_change: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.drain = drain
        self.on_change = on_change
        # A start sometimes waits for files or for Triton, hence a slot more than CPUs. Further starts would only make
        # each start slower.
        self.start_slots = asyncio.Semaphore(cpu_count() + 1)
        self.first_generation = 0
        """The first generation of a new deployment; see
        `headwater_server.control.routing.DeploymentRoute.generation`."""
        self.folder = Path()
        """The instance's folder; it is made before any process is launched."""
        self.model_counts = ModelCounts(None)
        """The files of the models' custom metrics; it is set before any process is launched."""
        self.replicas: dict[str, ReplicaHandle] = {}
        """All replicas that have not ended, by id."""
        self.imported: dict[str, set[str]] = {}
        """The files of the user's modules that replicas have imported, by replica set."""
        self.stopping = asyncio.Event()
        """Set once the server is to stop."""
        self.status = 0
        """The server's exit status."""
        self._user_paths = user_paths
        self._launched = 0
        self._followed: dict[int, _Child] = {}
        """The followed children, by process id."""
        self._stopped: set[int] = set()
        """Process ids of children that were stopped (SIGSTOP) at the last call of `stopped`."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_adopting = False
        self._cut_off: set[str] = set()
        """Ids of replicas with missing files at the last call of `end_cut_off`."""

    @property
    def search(self) -> list[str]:
        """The folders in which relative paths of models and adapters are looked up."""
        return [working_folder(), *self._user_paths]

    @property
    def is_stopping(self) -> bool:
        """Whether the server is stopping."""
        return self.stopping.is_set()

    def stop(self, status: int = 0) -> None:
        """Stop the server. Its exit status is the first status given that is not 0."""
        self.status = self.status or status
        self.stopping.set()

    async def wait_for_stop(self, timeout_s: float) -> None:
        """Sleep until ``timeout_s`` has passed or the server stops."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), timeout_s)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that `finish` waits for; if it fails, the server stops with status 1."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self.note_done)
        return task

    def note_done(self, task: asyncio.Task[None]) -> None:
        """Drop a task that is done, and stop the server if the task has failed."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the supervisor can't go on", exc_info=error)
            self.stop(1)

    async def finish(self) -> None:
        """Wait for the spawned tasks."""
        await asyncio.gather(*self._tasks)

    def launch(
        self, name: str, config: Deployment, on_progress: Callable[[str], None], fork: Fork | None
    ) -> ReplicaHandle:
        """Start a replica of a deployment, and follow it to its end.

        Args:
            name: the deployment's name.
            config: its configuration, with a single device.
            on_progress: called with each stage of the start.
            fork: forks the replica; None: it is started without forking.

        Raises:
            OSError: the machine lacks space, processes or file descriptors.
        """
        self._launched += 1
        # The folder's name is short, since it is part of socket paths, which have a limited length.
        folder = self.folder / f"r{self._launched}"
        id, counts = f"{name}-{self._launched}", self.model_counts
        replica = ReplicaProcess(name, id, config, folder, self._user_paths, on_progress, counts.path(id))
        exited = self.follow(replica.start(fork), f"the guardian of {replica.id}", replica)
        replica.exited = self.spawn(replica.follow(exited, self.end_orphans))
        self.replicas[replica.id] = replica
        replica.ready.add_done_callback(lambda _: self.imported.setdefault(name, set()).update(replica.imported))
        replica.exited.add_done_callback(lambda _: self.replicas.pop(id))
        replica.exited.add_done_callback(lambda _: counts.end(id))
        return replica

    def replacing(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context for starting replicas that are about to replace the deployment's present replicas. It matters only
        in a cluster; see `headwater_server.cluster.cluster_supervisor.ClusterProcesses`."""
        return contextlib.nullcontext()

    def follow(self, process: Child, role: str, replica: ReplicaProcess | None = None) -> asyncio.Future[int]:
        """Follow a child process. Returns a future of its exit code. Call it right after the start, without an
        await in between.

        ``role`` is the name in the log; ``replica`` is the replica of a guardian.
        """
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._followed[process.pid] = _Child(process, role, replica, exited)
        return exited

    def adopt_orphans(self) -> None:
        """Have the kernel make this process the parent of processes that a killed guardian leaves behind."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._is_adopting = True

    async def end_orphans(self) -> None:
        """Kill the processes that killed guardians left behind, in any session, and all their descendants; nothing
        happens without `adopt_orphans`. Takes at most `ORPHANS_TIMEOUT_S`.

        Descendants become children of this process as their parents end.
        """
        deadline = time.monotonic() + ORPHANS_TIMEOUT_S
        while (orphans := self._orphans()) and time.monotonic() < deadline:
            for pid in orphans:
                kill(pid)
            await asyncio.sleep(UNTIL_POLL_S)
            self.reap()
        for pid in orphans:
            logger.error("process %d, which a replica started, doesn't end", pid)

    def _orphans(self) -> list[int]:
        """Process ids of adopted children. Children that the supervisor started without following them are in the
        supervisor's session or in `asked`. An orphan of a replica is in the session of a guardian's child, or in a
        session that the orphan opened."""
        if not self._is_adopting:
            return []
        supervisor_pid, session = os.getpid(), os.getsid(0)
        return [
            pid
            for pid, stat in process_stats()
            if stat.parent == supervisor_pid
            and stat.session != session
            and pid not in self._followed
            and pid not in asked
        ]

    def reap(self) -> None:
        """Reap all children that have ended, adopted orphans included; call this at SIGCHLD."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._followed.pop(pid, None)
            if child is not None:
                # Without this Popen would wait for a process that is already reaped.
                child.process.returncode = os.waitstatus_to_exitcode(status)
                if not child.exited.done():
                    child.exited.set_result(child.process.returncode)

    async def watch(self) -> None:
        """Kill children that are stopped, since they neither work nor end. New processes replace them."""
        while True:
            for pid in self.stopped():
                child = self._followed[pid]
                if child.replica is not None:
                    child.replica.mark_ending("its guardian is stopped")
                logger.error("%s (%d) is stopped: killing it", child.role, pid)
                kill(pid)
            await asyncio.sleep(WATCH_EVERY_S)

    def end_cut_off(self) -> None:
        """End replicas with a folder or socket missing now and at the last call: no new request reaches them."""
        before, self._cut_off = self._cut_off, {replica.id for replica in self.replicas.values() if replica.is_cut_off}
        for id in before & self._cut_off:
            replica = self.replicas[id]
            replica.reason = replica.reason or "its folder was removed, or its socket in it"
            logger.error("%s: %s: replacing it", id, replica.reason)
            replica.kill()

    def stopped(self) -> list[int]:
        """The followed children that are stopped (SIGSTOP), and were already stopped at the last call."""
        before, self._stopped = self._stopped, set()
        for pid in self._followed:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    self._stopped.add(pid)
        return sorted(before & self._stopped)


class Backoff:
    """The pause before a process is started again. It doubles each time, from ``first_s`` to ``longest_s``; it begins
    anew after a process that lived longer than `STEADY_AFTER_S`."""

    def __init__(self, first_s: float = FIRST_BACKOFF_S, longest_s: float = LONGEST_BACKOFF_S) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a process that lived ``lived_s`` seconds."""
        wait_s = self._first_s if lived_s > STEADY_AFTER_S else self._next_s
        self._next_s = min(wait_s * 2, self._longest_s)
        return wait_s


def kill(pid: int) -> None:
    """Kill a process (SIGKILL), if it exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until the condition holds or ``timeout_s`` has passed."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(UNTIL_POLL_S)
