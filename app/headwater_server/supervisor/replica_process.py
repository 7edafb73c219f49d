"""The supervisor's view of a replica: its guardian process, its status lines, its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from headwater.errors import shortage_in
from headwater.signature import Signature
from headwater.wire.handshake import COMMAND, GO, HOST, STATUS, ForkRequest, ReplicaSpec, ReplicaStatus
from headwater_server.config.schema import Deployment
from headwater_server.control.routing import ReplicaRoute
from headwater_server.process.machine import cpu_count
from headwater_server.process.priority import START_NICE, may_raise_priority, set_priority, set_session_priority
from headwater_server.process.proc import GroupUse, group_members, group_uses, working_folder
from headwater_server.process.socket_http import ask_socket
from headwater_server.process.sweep import Journal, kill_group, sweep_replica
from headwater_server.supervisor.kind_programs import program_of
from headwater_server.supervisor.replica_log import ReplicaLog
from headwater_server.telemetry.logs import REPLICA_LOGGER

__all__ = ["Child", "Fork", "Forked", "ReplicaProcess", "changes_between", "environment_of"]

logger = logging.getLogger("headwater")
replica_logger = logging.getLogger(REPLICA_LOGGER)

PIPES_TIMEOUT_S = 2.0
"""Seconds that the pipes of a replica whose guardian was killed may stay open."""
LAST_LINES_S = 0.1
"""Seconds after a guardian's end in which its last lines may still give the reason, before its death is the reason."""
KILLED_TIMEOUT_S = 5.0
"""Seconds that the processes of an ended replica may take to be gone."""
KILLED_POLL_S = 0.02
LINE_LIMIT_BYTES = 16 * 1024 * 1024
"""Limit of a line from a replica's pipes; see `_read_lines`."""
GUARDIAN_LOST = "its guardian was killed"
LOG_LINES = 200
"""Number of last log lines that are kept: a crash writes the stacks of all threads."""
REPORTED_LINES = 10
"""Number of log lines in `ReplicaProcess.account`."""
REPORTED_CHARACTERS = 2000
"""Limit of the characters of these lines together."""
CRASH = "Fatal Python error"
"""Start of the output of `faulthandler`; the stack of the thread that crashed comes next."""
IDLE_S = 2.0
"""Seconds for which a start, at first, runs only where a processor has nothing else to do. It then gets a low but
normal priority: where the kernel doesn't give each session its share (``autogroup``), an idle-only start would make no
progress on a fully loaded machine."""


class Forked:
    """A child that another process forked, with the part of `subprocess.Popen` that `ChildProcesses` uses, which sets
    ``returncode``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has been reaped."""
        if self.returncode is None:
            os.kill(self.pid, number)


Child = subprocess.Popen[bytes] | Forked
Fork = Callable[[ForkRequest, Sequence[int]], int]
"""Forks a guardian with its replica, and returns the guardian's process id; see
`headwater_server.supervisor.preloaded.Preloaded.fork`."""


class _StartPriority:
    """The priority of a guardian and its replica, which rises in two steps during the start.

    Args:
        guardian: the guardian's process id.
        replica: the replica's id, for the log.
        directory: the replica's folder, which names its process group once it has one.
        session_nice: the nice value of the replica's session while it serves.
    """

    def __init__(self, guardian: int, replica: str, directory: Path, session_nice: int) -> None:
        self._guardian = guardian
        self._replica = replica
        self._directory = directory
        self._session_nice = session_nice

    def lower(self) -> None:
        """Lower the priority of the guardian, before it does anything; the replica inherits it."""
        if may_raise_priority():
            set_session_priority(self._guardian, START_NICE, tries=1)  # the event loop must not wait
            set_priority([self._guardian], _nice() + START_NICE, is_idle=True)

    async def follow(self, ready: asyncio.Future[bool]) -> None:
        """Raise the priority of guardian and replica after `IDLE_S`, and again when the replica is ready.

        Until the replica is ready or ends, the first step is repeated every `IDLE_S`, for processes that have started
        meanwhile.
        """
        if not may_raise_priority():
            return
        try:
            while not (await asyncio.wait([ready], timeout=IDLE_S))[0]:
                await asyncio.to_thread(self._set, START_NICE)
            if ready.result():
                await asyncio.to_thread(self._set, 0)
        except OSError as error:
            logger.warning("%s: its priority stays low: %s", self._replica, error)

    def _set(self, by: int) -> None:
        set_session_priority(self._guardian, by)
        if group := Journal(self._directory).host_pid:
            set_session_priority(group, max(by, self._session_nice))
        with contextlib.suppress(psutil.NoSuchProcess):  # the guardian has ended
            # Processes that the callable starts in other sessions are outside the replica's group, but inherit the
            # priority too.
            descendants = psutil.Process(self._guardian).children(recursive=True)
            set_priority([self._guardian, *(process.pid for process in descendants)], _nice() + by)


class ReplicaProcess:
    """Starts a replica on this machine and follows it to its end; see
    `headwater_server.supervisor.handle.ReplicaHandle`.

    Everything happens in the event loop of the supervisor, or of a cluster's agent.

    Args:
        name: the deployment's name.
        id: unique among all replicas, past replicas included.
        deployment: the configuration, with a single device.
        directory: the replica's folder; `start` makes it.
        user_paths: folders of the user's modules, for the replica's ``sys.path``.
        on_progress: called with each stage of the start.
        counts: the file for the model's custom metrics, which the replica creates; None: metrics are off.
    """

    def __init__(
        self,
        name: str,
        id: str,
        deployment: Deployment,
        directory: Path,
        user_paths: tuple[str, ...],
        on_progress: Callable[[str], None],
        counts: Path | None = None,
    ) -> None:
        self.id = id
        self.device = deployment.placements[0]
        self.directory = directory
        self.adapters = deployment.adapters
        self.token = secrets.token_urlsafe(24)
        self.signature: Signature | None = None
        self.facts: dict[str, str] = {}
        self.imported: list[str] = []
        """Files of the user's modules that the replica has imported; known once it is ready or has failed."""
        self.batch_limit = 0
        self.reason = ""
        self.is_permanent = self.is_shortage = False
        self.leftovers: list[str] = []
        """Files and segments that could not be swept."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ending = asyncio.Event()
        self.exited: asyncio.Future[None]
        """Done when `follow` has returned; the caller of `start` sets it."""
        self._name = name
        self._deployment = deployment
        self._session_nice = program_of(deployment.kind).nice
        self._user_paths = user_paths
        self._on_progress = on_progress
        self._counts = counts
        self._log = ReplicaLog(lambda record: replica_logger.info("%s", record, extra={"replica": id}))
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        """The last lines of its log."""
        self._cause = ""
        self._has_explained = False
        """Whether the replica, or its guardian, said why the start failed."""
        self._command_fd: int | None = None
        self._group = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def group(self) -> int:
        """See `ReplicaHandle.group`."""
        self._group = Journal(self.directory).host_pid or self._group  # the folder may go before the last process
        return self._group

    @property
    def is_cut_off(self) -> bool:
        """See `ReplicaHandle.is_cut_off`."""
        serves = self.ready.done() and self.ready.result()
        return not self.ending.is_set() and not (self.directory / "h" if serves else self.directory).exists()

    @property
    def has_place(self) -> bool:
        """See `ReplicaHandle.has_place`."""
        return True

    @property
    def is_lost_with_node(self) -> bool:
        """See `ReplicaHandle.is_lost_with_node`."""
        return False

    async def wait_for_place(self, timeout_s: float) -> None:
        """See `ReplicaHandle.wait_for_place`."""

    @property
    def is_reachable(self) -> bool:
        """See `ReplicaHandle.is_reachable`."""
        return True

    def start(self, fork: Fork | None = None) -> Child:
        """Start the guardian, which starts the replica, and return the guardian. The caller must reap the guardian and
        run `follow`.

        Args:
            fork: forks guardian and replica; if it can't, or is None, both are started without forking.

        Raises:
            OSError: the machine lacks space, processes or file descriptors.
        """
        if fork is not None:
            try:
                return self._start(fork)
            except OSError as error:
                logger.warning("%s: it is started anew, rather than forked: %s", self.id, error)
        return self._start(None)

    def _start(self, fork: Fork | None) -> Child:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            # The guardian's ends of the pipes are closed here in any case. If the start fails, our ends are closed, and
            # the folder is removed.
            self.directory.mkdir(mode=0o700)
            ours.callback(shutil.rmtree, self.directory, ignore_errors=True)
            (self.directory / "tmp").mkdir(mode=0o700)
            status_read, status_write = _pipe(ours, theirs)
            output_read, output_write = _pipe(ours, theirs)
            command_read, command_write = _pipe(theirs, ours)
            self._write_spec(changes_between(os.environ, environment_of(self._deployment)))
            temporary = {"TMPDIR": str(self.directory / "tmp")}
            models_temporary = {} if "TMPDIR" in self._deployment.environment else temporary
            if fork is None:
                guardian: Child = subprocess.Popen(
                    [*self._guardian(str(status_write), str(command_read)), "--", *self._command(status_write)],
                    cwd=self.directory,  # so that neither guardian nor replica imports files from the user's folder
                    env={**os.environ, **temporary},
                    pass_fds=(status_write, command_read),
                    stdin=subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=output_write,
                    start_new_session=True,
                )
            else:
                request = ForkRequest(
                    self._name, str(self.directory), self._user_paths, models_temporary,
                    [*self._guardian(STATUS, COMMAND), HOST],
                )  # fmt: skip
                guardian = Forked(fork(request, (status_write, command_read, output_write)))
            priority = _StartPriority(guardian.pid, self.id, self.directory, self._session_nice)
            priority.lower()
            if fork is not None:
                os.write(command_write, GO)
            ours.pop_all()
        self._command_fd = command_write
        self._tasks = [
            asyncio.create_task(_read_lines(status_read, self._take_status)),
            asyncio.create_task(_read_lines(output_read, self._take_log)),
            asyncio.create_task(priority.follow(self.ready)),
        ]
        return guardian

    def stop(self) -> None:
        """See `ReplicaHandle.stop`."""
        if self._command_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._command_fd, b"stop\n")

    def kill(self) -> None:
        """See `ReplicaHandle.kill`."""
        if self._command_fd is not None:
            os.close(self._command_fd)
            self._command_fd = None

    async def follow(
        self, exited: asyncio.Future[int], end_orphans: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Wait until the guardian has exited, and read its last lines. If the guardian was killed, end the replica's
        processes and sweep.

        Args:
            exited: the exit code of the guardian.
            end_orphans: ends processes that a killed guardian left behind in other sessions; None: they go on.
        """
        await exited
        # A guardian reports why it ends, unless it is killed.
        asyncio.get_running_loop().call_later(LAST_LINES_S, self.mark_ending, GUARDIAN_LOST)
        if self.directory.exists():
            # The guardian has not swept. The group is killed first, since it holds our pipes open.
            await self.ending.wait()
            host_pid = Journal(self.directory).host_pid
            segments: set[str] = set()
            if host_pid:
                segments = await asyncio.to_thread(kill_group, host_pid)
            if end_orphans is not None:
                await end_orphans()
            # A process that doesn't end may hold the pipes open for ever.
            await asyncio.wait(self._tasks, timeout=PIPES_TIMEOUT_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.leftovers = sweep_replica(self.directory, segments)
        else:
            await asyncio.gather(*self._tasks)
        self._log.flush()
        if not self._has_explained:
            self.is_shortage = shortage_in(self._lines) is not None
        self.mark_ending()
        self.kill()
        for leftover in self.leftovers:
            logger.error("%s: could not be removed: %s", self.id, leftover)

    def mark_ending(self, reason: str = "") -> None:
        """Note that the replica can no longer be used. A reason that is already known stays."""
        self.reason = self.reason or reason
        self.ending.set()
        if not self.ready.done():
            self.ready.set_result(False)

    def account(self) -> str:
        """See `ReplicaHandle.account`."""
        lines = [line.strip() for line in self._lines if line.strip()]
        if self._has_explained or not lines:
            return self.reason
        crash = next((index for index, line in enumerate(lines) if line.startswith(CRASH)), None)
        first = max(0, len(lines) - REPORTED_LINES if crash is None else crash - 2)
        text = " | ".join(lines[first : first + REPORTED_LINES])
        if len(text) > REPORTED_CHARACTERS:
            text = "..." + text[-REPORTED_CHARACTERS:]
        return f"{self.reason or 'it ended'}; the last lines of its log: {text}"

    def cause(self) -> str:
        """See `ReplicaHandle.cause`."""
        return self._cause or self.reason or "it ended before it was ready"

    async def use(self) -> GroupUse:
        """See `ReplicaHandle.use`."""
        group = self.group
        return (await asyncio.to_thread(group_uses, {group}))[group] if group else GroupUse()

    async def remains(self) -> list[str]:
        """See `ReplicaHandle.remains`."""
        leftovers = list(self.leftovers)
        if not self.exited.done():
            leftovers.append(f"replica {self.id}: its guardian has not ended")
        if self.directory.exists():
            leftovers.append(f"folder {self.directory}")
        deadline, groups = time.monotonic() + KILLED_TIMEOUT_S, {self._group}
        try:
            while (pids := await asyncio.to_thread(group_members, groups)) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(KILLED_POLL_S)
        except OSError as error:
            return [*leftovers, f"perhaps processes, which can't be listed: {error}"]
        return [*leftovers, *(f"process {pid}" for pid in pids)]

    async def ask_vllm(self, url: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        """See `ReplicaHandle.ask_vllm`."""
        return await asyncio.to_thread(ask_socket, self.directory / "h", "POST", url, body, timeout_s)

    def route(self) -> ReplicaRoute:
        """See `ReplicaHandle.route`."""
        signature = self.signature
        has_grpc = signature is not None and (signature.is_framed or signature.triton is not None)
        return ReplicaRoute(
            self.id, f"unix:{self.directory / 'h'}", self.token, f"unix:{self.directory / 'g:1'}" if has_grpc else "",
            self.facts,
        )  # fmt: skip

    def _write_spec(self, changes: dict[str, str | None]) -> None:
        deployment = self._deployment
        spec = ReplicaSpec(
            name=self._name,
            model=deployment.model or "",
            token=self.token,
            user_paths=self._user_paths,
            working_dir=working_folder(),
            options=deployment.checked_options,
            adapters=deployment.adapters,
            pipeline=deployment.pipeline_spec,
            max_batch_size=deployment.batching.max_batch_size,
            device=deployment.placements[0],
            instances=deployment.instances,
            threads=deployment.threads,
            warmup_batch_sizes=deployment.warmup_batch_sizes,
            load_timeout_s=deployment.load_timeout_s,
            max_compute_s=deployment.max_compute_s,
            is_cached=deployment.cache is not None,
            counts=str(self._counts or ""),
            environment=changes,
        )
        path = self.directory / "spec.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(spec))

    def _command(self, status_fd: int) -> list[str]:
        program = program_of(self._deployment.kind).module
        # Absolute, but not resolved: Python finds its virtual environment by the path of the link.
        interpreter = self._deployment.interpreter
        python = "" if interpreter is None else os.path.abspath(interpreter)
        return [sys.executable, "-m", program, python, self._name, str(self.directory), str(status_fd)]

    def _guardian(self, status: str, command: str) -> list[str]:
        nice = str(max(START_NICE * may_raise_priority(), self._session_nice))
        return [
            sys.executable,
            "-m",
            "headwater_server.process.guardian",
            self._name,
            str(self.directory),
            status,
            command,
            nice,
        ]

    def _take_log(self, line: str) -> None:
        self._lines.append(line)
        self._log.take(line)

    def _take_status(self, line: str) -> None:
        try:
            status = msgspec.json.decode(line, type=ReplicaStatus)
        except msgspec.MsgspecError as error:  # a callable wrote to the pipe
            self._log.take(f"not a status: {line[:200]!r} ({error})")
            return
        if status.event == "progress":
            logger.info("%s: %s", self.id, status.text)
            self._on_progress(status.text)
        elif status.event == "warning":
            logger.warning("%s: %s", self.id, status.text)
        elif status.event == "ready":
            self.imported = status.imported
            self.signature = msgspec.convert(status.signature, Signature)
            self.facts = status.facts
            if not self.ready.done():
                self.ready.set_result(True)
        elif status.event == "limited":
            self.batch_limit = status.batch_limit
            logger.warning("%s: %s", self.id, status.text)
        elif status.event == "failed":
            self.imported = status.imported
            self.reason = status.text
            self.is_permanent = status.is_permanent
            self.is_shortage = status.is_shortage
            self._cause = status.cause
            self._has_explained = True
        elif status.event == "ending":
            self.mark_ending(status.text)
        elif status.event == "ended":
            self.leftovers = status.leftovers


def environment_of(deployment: Deployment) -> dict[str, str]:
    """The environment of a deployment's replicas, except ``TMPDIR``, which differs for each replica."""
    program = program_of(deployment.kind)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(program.hidden_variables)}
    environment["PYTHONUNBUFFERED"] = "1"
    if deployment.threads is not None:
        for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON"):
            environment[f"{library}_NUM_THREADS"] = str(deployment.threads)
    elif program.limits_threads and (cpus := cpu_count()) < len(os.sched_getaffinity(0)):
        # Math libraries see the CPUs, but not the quota, and all of them read this variable. Tokenizers see the quota.
        environment.setdefault("OMP_NUM_THREADS", str(cpus))
    return environment | deployment.environment


def changes_between(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ between two environments, with their values in ``after``; None: ``after`` lacks the
    variable."""
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def _nice() -> int:
    """The nice value of this process."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe. Each of its ends is closed by the stack given for it."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


async def _read_lines(fd: int, take: Callable[[str], None]) -> None:
    """Call ``take`` with each line from a pipe until its other end is closed everywhere. Of a line longer than
    `LINE_LIMIT_BYTES` only an end may arrive. Closes ``fd``."""
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # the line exceeds the limit: the part that was read is dropped
                continue
            if not line:
                return
            take(line.decode(errors="replace").rstrip("\n"))
    finally:
        transport.close()
