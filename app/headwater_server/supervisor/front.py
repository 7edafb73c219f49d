"""A server's side towards clients: the listening socket, the gateway workers and their routing table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from io import FileIO
from typing import Final, Protocol

import msgspec

from headwater.errors import Problem
from headwater.signature import Signature
from headwater_server.config.schema import Config
from headwater_server.config.sections import Tls
from headwater_server.control.control_server import ControlServer
from headwater_server.control.messages import WorkerSettings
from headwater_server.control.routing import DeploymentRoute, RoutingTable
from headwater_server.errors import StartError
from headwater_server.process.sweep import sweep_stale
from headwater_server.security.kept_files import KeptFiles
from headwater_server.security.keys_file import keys_are_wanted
from headwater_server.security.operator import warn_if_exposed
from headwater_server.security.peer_tls import check_peer_files, peer_files
from headwater_server.security.tls import Certificate
from headwater_server.supervisor import preflight
from headwater_server.supervisor.child_processes import Backoff, ChildProcesses, kill, until
from headwater_server.supervisor.runtime_folder import RuntimeFolder
from headwater_server.telemetry.observer import Observer, ReplicaView, deployment_view
from headwater_server.telemetry.recorder import recorder

__all__ = ["Backend", "Front", "Workers", "watch_folder"]

logger = logging.getLogger("headwater")

PING_EVERY_S: Final = 1.0
PING_TIMEOUT_S: Final = 10.0
"""A worker that answers no ping for this many seconds, counted in pings every `PING_EVERY_S`, is killed and
replaced."""
CONTROL: Final = "control"
"""The control socket's name in the runtime folder."""
FOLDER_EVERY_S: Final = 1.0
"""Seconds between checks whether somebody has removed the runtime folder or files in it."""
WORKER_END_TIMEOUT_S: Final = 5.0
"""Seconds after ``shutdown_timeout_s`` at which a stop kills gateway workers; both count from the stop's beginning."""


class Workers:
    """All gateway workers of a server."""

    def __init__(self, config: Config, children: ChildProcesses, control: ControlServer, observer: Observer) -> None:
        self.pids: dict[int, int] = {}
        """Process ids of the running workers, by index."""
        self._leaving: set[int] = set()
        """Process ids of workers that were asked to end."""
        self._config = config
        self._children = children
        self._control = control
        self._observer = observer
        self._kept: dict[str, KeptFiles] = {}
        """Copies of the certificates that a worker reads when it starts, by field of `WorkerSettings`."""
        if (tls := config.server.tls) is not None:
            pair = [tls.certificate, tls.key]
            self._kept["kept_tls"] = KeptFiles(pair, lambda paths: Certificate(Tls(certificate=paths[0], key=paths[1])))
        if config.cluster is not None and config.cluster.tls is not None:
            self._kept["kept_cluster_tls"] = KeptFiles(peer_files(config.cluster.tls), check_peer_files)

    def start(self, listener: socket.socket, grpc_port: int | None) -> None:
        """Have tasks start the workers, which accept connections from the listener, and replace workers that end, until
        the server stops. The workers listen on ``grpc_port`` themselves; None: they serve no gRPC."""
        cluster = self._config.cluster
        settings = WorkerSettings(
            control=str(self._children.folder / CONTROL),
            server={**self._config.server.model_dump(mode="json"), "grpc_port": grpc_port},
            security=self._config.security.model_dump(mode="json"),
            cluster_tls=str(cluster.tls) if cluster is not None and cluster.tls is not None else "",
        )
        for index in range(self._config.server.workers):
            self._children.spawn(self._keep(index, listener, settings))

    def kill(self) -> None:
        """Kill all workers that still run."""
        for pid in self.pids.values():
            kill(pid)

    def replace_those_without_files(self, *, all: bool = False) -> None:
        """Have workers with a removed file of counts, or all workers, end (SIGTERM); they are then replaced."""
        for index, pid in self.pids.items():
            if (all or not self._observer.has_file(index)) and pid not in self._leaving:
                self._leaving.add(pid)
                logger.warning("gateway worker %d (%d) is replaced, since files of it were removed", index, pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    async def watch(self) -> None:
        """Kill workers with an event loop that hangs; they are replaced. Copy new certificates."""
        while True:
            self.end_silent()
            for kept in self._kept.values():
                kept.renew()
            await asyncio.sleep(PING_EVERY_S)

    def end_silent(self) -> None:
        """Ping all workers, and kill workers that have not answered for too long."""
        unanswered = self._control.ping()
        for index, pid in self.pids.items():
            # Counted in pings, not by a clock: while the supervisor itself is stopped, no worker can answer it.
            if unanswered.get(pid, 0) * PING_EVERY_S >= PING_TIMEOUT_S:
                text = "gateway worker %d (%d) has given no sign of life for %g s: killing it"
                logger.error(text, index, pid, PING_TIMEOUT_S)
                kill(pid)

    async def _keep(self, index: int, listener: socket.socket, settings: WorkerSettings) -> None:
        backoff = Backoff()
        with open(os.memfd_create("reason"), "w+b", buffering=0) as reason:  # noqa: ASYNC230 - it is in memory
            while not self._children.is_stopping:
                began_s = time.monotonic()
                try:
                    process = self._start(index, listener, settings, reason)
                except OSError as error:
                    logger.error("gateway worker %d can't be started: %s", index, error)
                else:
                    self.pids[index] = process.pid
                    code = await self._children.follow(process, f"gateway worker {index}")
                    del self.pids[index]
                    self._observer.end_worker(index)
                    if self._children.is_stopping:
                        return
                    self._leaving.discard(process.pid)
                    reason.seek(0)
                    why = signal.strsignal(-code) if code < 0 else reason.read().decode()
                    logger.error("gateway worker %d ended with %d%s; starting another", index, code, why and f": {why}")
                    recorder().count("headwater_worker_restarts")
                await self._children.wait_for_stop(backoff.after(time.monotonic() - began_s))

    def _start(
        self, index: int, listener: socket.socket, settings: WorkerSettings, reason: FileIO
    ) -> subprocess.Popen[bytes]:
        """Start a worker. If it ends by itself, it writes the reason to the file ``reason``.

        Raises:
            OSError: the process can't be started.
        """
        reason.seek(0)
        reason.truncate()
        kept = {}
        for field, files in self._kept.items():
            files.renew()
            kept[field] = list(map(str, files.copies))
        worker_settings = msgspec.structs.replace(
            settings, index=index, metrics=self._observer.start_worker(index), **kept
        )
        # In memory, since a worker must be able to start while the disk is full.
        with open(os.memfd_create("settings", os.MFD_CLOEXEC), "wb", buffering=0) as file:
            file.write(msgspec.json.encode(worker_settings))
            fds = (file.fileno(), listener.fileno(), reason.fileno())
            return subprocess.Popen(
                [sys.executable, "-m", "headwater_server.gateway.worker", settings.control, *map(str, fds)],
                cwd=self._children.folder,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",  # batches of one
                },
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


class Backend(Protocol):
    """Decides about deployments: the `Orchestrator` in this process; or, in a gateway, an `Uplink` to a cluster's
    supervisor."""

    @property
    def is_decided(self) -> bool:
        """Whether the outcome of every deployment's first start is known; `Front` then calls ``on_serving``."""
        ...

    @property
    def failure(self) -> str:
        """Why no deployment serves any more; empty while a deployment serves or may still start."""
        ...

    async def prepare(self) -> None:
        """Wait until routes are known or the server is to stop. No worker starts before."""
        ...

    def start(self) -> None:
        """Start the deployments."""
        ...

    async def end(self, is_hurried: Callable[[], bool]) -> None:
        """End everything that was started; at once when ``is_hurried`` returns true, which may change meanwhile."""
        ...

    def routes(self, workers: int) -> list[DeploymentRoute]:
        """The routes of all deployments, as each of ``workers`` gateway workers gets them."""
        ...

    def replica_views(self) -> list[ReplicaView]:
        """All replicas that have not ended, for metrics."""
        ...

    def problems(self) -> Iterable[Problem]:
        """Problems of this machine that prevent serving."""
        ...

    def warnings(self) -> Iterable[Problem]:
        """Shortcomings of this machine that don't prevent serving, as the deployments' signatures show them."""
        ...


class Front:
    """Serves a backend's deployments until a signal or `ChildProcesses.stop` ends that.

    Args:
        config: the configuration to serve.
        on_serving: called once, when `Backend.is_decided` holds, with the base URL and each deployment's name,
            signature (None: it has never served) and reason; without steps and versions.
        control: the control socket to the gateway workers.
        children: owns the processes; must call `on_change` when a deployment has changed.
        backend: decides about the deployments.
    """

    def __init__(
        self,
        config: Config,
        on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
        control: ControlServer,
        children: ChildProcesses,
        backend: Backend,
    ) -> None:
        self.observer = Observer(None)
        self.is_hurried = False
        """Whether another SIGTERM or SIGINT came while the server was stopping."""
        self._config = config
        self._on_serving = on_serving
        self._control = control
        self._children = children
        self._backend = backend
        self._is_leaving = False
        """Whether the server is about to stop: it still serves, but is no longer ready."""
        self._is_announced = False
        self._url = ""
        self._failure = ""
        """Why the server stops by itself: every deployment has failed."""

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT, SIGHUP (ignored under `nohup`) or `ChildProcesses.stop`. Returns the status.

        Raises:
            StartError: the address can't be bound, a check of `preflight` found a problem, or the runtime folder can't
                be made.
        """
        self._children.adopt_orphans()  # a process with PID 1 adopts orphans anyway
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._children.reap)
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_stop_signal, number)
        listener = self._listen()
        grpc_holder = self._hold_grpc_port()
        folder = self._make_folder()
        watching: list[asyncio.Task[None]] = []
        try:
            host, port = listener.getsockname()[:2]
            scheme = "http" if self._config.server.tls is None else "https"
            self._url = f"{scheme}://{_url_host(host)}:{port}"
            logger.info("listening on %s", self._url)
            grpc_port: int | None = None
            if grpc_holder is not None:
                grpc_port = grpc_holder.getsockname()[1]
                logger.info("listening for gRPC on %s:%d", _url_host(host), grpc_port)
            if not keys_are_wanted(self._config.security.keys_file):
                warn_if_exposed(listener.getsockname())
            await self._control.start(self._children.folder / CONTROL)
            await self._backend.prepare()
            self._publish()
            workers = Workers(self._config, self._children, self._control, self.observer)
            workers.start(listener, grpc_port)
            for watch in (
                self._children.watch(),
                workers.watch(),
                self.observer.watch(self._backend.replica_views),
                watch_folder(folder, self._control, self.observer, workers, self._children),
            ):
                watching.append(asyncio.create_task(watch))
                watching[-1].add_done_callback(self._children.note_done)
            self._backend.start()
            await self._children.stopping.wait()
            listener.close()  # the workers hold it too: connections are refused once the last worker has ended
            await self._stop(workers)
        finally:
            for task in watching:
                task.cancel()
            listener.close()
            if grpc_holder is not None:
                grpc_holder.close()
            await self._control.close()
            folder.close()
        if self._failure:  # logged last, since an operator reads the end of the log first
            logger.critical("every deployment has failed: %s", self._failure)
        return self._children.status

    def _listen(self) -> socket.socket:
        server = self._config.server
        try:
            return preflight.open_listener(server.host, server.port)
        except OSError as error:
            raise self._taken("server.host, server.port", server.port, "--port", error) from error

    def _hold_grpc_port(self) -> socket.socket | None:
        """A socket that keeps the port of gRPC for the workers; None: there is no gRPC.

        Raises:
            StartError: the port is taken.
        """
        server = self._config.server
        if server.grpc_port is None:
            return None
        try:
            return preflight.hold_port(server.host, server.grpc_port)
        except OSError as error:
            raise self._taken("server.grpc_port", server.grpc_port, "--grpc-port", error) from error

    def _taken(self, fields: str, port: int, option: str, error: OSError) -> StartError:
        where = f"{self._config.server.host}:{port}"
        return StartError(
            f"{fields}: can't listen on {where}: {error.strerror}; is another server running there? Choose another "
            f"with {option}"
        )

    def _make_folder(self) -> RuntimeFolder:
        # Without these checks a socket path that is too long would show only in a call.
        for problem in (
            *preflight.security_problems(self._config),
            *preflight.runtime_dir_problems(self._config.server, self._config.all_deployments()),
            *preflight.tracing_problems(self._config.server),
            *preflight.open_files_problems(),
        ):
            raise StartError(str(problem))
        parent = self._config.server.runtime_dir
        try:
            for stale in sweep_stale(parent):
                logger.warning("removed leftovers of an earlier instance: %s", stale)
            for problem in self._backend.problems():
                raise StartError(str(problem))
            folder = RuntimeFolder(parent)
            self._children.folder = folder.path
            self.observer = Observer(
                self._children.folder / "metrics" if "metrics" in self._config.server.pages else None
            )
            self._children.model_counts = self.observer.model_counts
        except OSError as error:
            raise StartError(f"server.runtime_dir: can't make a folder there: {error}") from error
        return folder

    def on_change(self) -> None:
        """Publish the deployments to the workers. Call ``on_serving`` if the time has come; stop the server if every
        deployment has failed."""
        routes = self._publish()
        if not self._is_announced and self._backend.is_decided:
            self._is_announced = True
            served = [(route.name, route.signature, route.reason) for route in routes if route.part_of is None]
            self._on_serving(self._url, served)
            for problem in self._backend.warnings():
                logger.warning("%s", problem)
        # The server ends, so that the operator notices.
        if not self._children.is_stopping and (failure := self._backend.failure):
            self._failure = failure
            self._children.stop(1)

    def _publish(self) -> list[DeploymentRoute]:
        routes = self._backend.routes(self._config.server.workers)
        self._control.publish(
            RoutingTable(tuple(routes), draining=self._children.is_stopping, leaving=self._is_leaving)
        )
        self.observer.see_deployments(map(deployment_view, routes))
        return routes

    def _on_stop_signal(self, number: int) -> None:
        if number == signal.SIGHUP and (self._is_leaving or self._children.is_stopping):
            return  # a terminal that closes sends several SIGHUPs: from the kernel and from the shell
        if self._children.is_stopping:
            self.is_hurried = True
            return
        name, delay_s = signal.Signals(number).name, self._config.server.drain_delay_s
        if number != signal.SIGINT and delay_s and not self._is_leaving:
            logger.info("%s: not ready from now on; stopping in %g s", name, delay_s)
            self._is_leaving = True
            self._publish()
            asyncio.get_running_loop().call_later(delay_s, self._children.stop)
            return
        logger.info("%s: stopping", name)
        self._children.stop()

    async def _stop(self, workers: Workers) -> None:
        self._publish()  # workers are then no longer ready, answer requests in flight, and end
        timeout_s = self._config.server.shutdown_timeout_s + WORKER_END_TIMEOUT_S
        await until(lambda: self.is_hurried or not workers.pids, timeout_s)
        workers.kill()
        await self._backend.end(lambda: self.is_hurried)
        await self._control.finish()
        await self._children.finish()
        logger.info("stopped")


async def watch_folder(
    folder: RuntimeFolder, control: ControlServer, observer: Observer, workers: Workers, children: ChildProcesses
) -> None:
    """Restore parts of the runtime folder that somebody removes, and replace processes that depend on them."""
    is_lost = False
    """Whether workers may still use files of a removed folder."""
    while True:
        await asyncio.sleep(FOLDER_EVERY_S)
        try:
            if folder.is_lost:
                is_lost = True
                text = "the runtime folder %s was removed; it is made again, and workers and replicas are replaced"
                logger.critical(text, folder.path)
                logger.critical("keep cleaners of temporary files away from it, or set server.runtime_dir")
                folder.make_again()
            if is_lost or not (folder.path / CONTROL).exists():
                logger.error("the control socket is made again")
                await control.start(folder.path / CONTROL)
            if is_lost or observer.is_damaged:
                logger.error("metrics: counts of running workers were removed, and begin anew")
                observer.restore()
            workers.replace_those_without_files(all=is_lost)
            is_lost = False
            children.end_cut_off()
        except OSError as error:
            logger.error("server.runtime_dir: can't restore the removed files of %s: %s", folder.path, error)


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
