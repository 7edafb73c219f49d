"""A server's side towards clients, from start to stop: the listening socket, the gateway workers and their routing
table."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from headwater.errors import Problem
from headwater.signature import Signature
from headwater_server.config.schema import Config
from headwater_server.control.control_server import ControlServer
from headwater_server.control.routing import DeploymentRoute, RoutingTable
from headwater_server.errors import StartError
from headwater_server.process.sweep import sweep_stale
from headwater_server.security.keys_file import keys_are_wanted
from headwater_server.security.operator import warn_if_exposed
from headwater_server.supervisor import preflight
from headwater_server.supervisor.host import Host, until
from headwater_server.supervisor.runtime_folder import RuntimeFolder
from headwater_server.supervisor.workers import Workers
from headwater_server.telemetry.observer import Observer, ReplicaView, deployment_view

__all__ = ["Backend", "Front"]

logger = logging.getLogger("headwater")

CONTROL = "control"
"""The control socket's name in the runtime folder."""
FOLDER_EVERY_S = 1.0
"""Seconds between checks whether somebody has removed the runtime folder or files in it."""
WORKER_END_TIMEOUT_S = 5.0
"""Seconds that a gateway worker may take to end once nothing is in flight in it."""


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
    """Serves a backend's deployments until a signal stops the server.

    Args:
        config: the configuration to serve.
        on_serving: called once, when `Backend.is_decided` holds, with the base URL and each deployment's name,
            signature (None: it does not serve yet) and reason; without steps and versions.
        control: the control socket to the gateway workers.
        host: owns the processes; must call `on_change` when a deployment has changed.
        backend: decides about the deployments.
    """

    def __init__(
        self,
        config: Config,
        on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
        control: ControlServer,
        host: Host,
        backend: Backend,
    ) -> None:
        self.observer = Observer(None)
        self.is_hurried = False
        """Whether another SIGTERM or SIGINT came while the server was stopping."""
        self._config = config
        self._on_serving = on_serving
        self._control = control
        self._host = host
        self._backend = backend
        self._is_leaving = False
        """Whether the server is about to stop: it still serves, but is no longer ready."""
        self._is_announced = False
        self._url = ""
        self._failure = ""
        """Why the server stops by itself: every deployment has failed."""

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP (ignored under `nohup`). Returns the exit status.

        Raises:
            StartError: the address can't be bound, a check of `preflight` found a problem, or the runtime folder can't
                be made.
        """
        self._host.adopt_orphans()  # a process with PID 1 adopts orphans anyway
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._host.reap)
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_stop_signal, number)
        listener = self._listen()
        folder = self._make_folder()
        watching: list[asyncio.Task[None]] = []
        try:
            host, port = listener.getsockname()[:2]
            scheme = "http" if self._config.server.tls is None else "https"
            self._url = f"{scheme}://{_url_host(host)}:{port}"
            logger.info("listening on %s", self._url)
            if not keys_are_wanted(self._config.security.keys_file):
                warn_if_exposed(listener.getsockname())
            await self._control.start(self._host.folder / CONTROL)
            await self._backend.prepare()
            self._publish()
            workers = Workers(self._config, self._host, self._control, self.observer)
            workers.start(listener)
            for watch in (
                self._host.watch(),
                workers.watch(),
                self.observer.watch(self._backend.replica_views),
                self._watch_folder(folder, workers),
            ):
                watching.append(asyncio.create_task(watch))
                watching[-1].add_done_callback(self._host.note_done)
            self._backend.start()
            await self._host.stopping.wait()
            listener.close()  # the workers hold it too: connections are refused once the last worker has ended
            await self._stop(workers)
        finally:
            for task in watching:
                task.cancel()
            listener.close()
            await self._control.close()
            folder.close()
        if self._failure:  # logged last, since an operator reads the end of the log first
            logger.critical("every deployment has failed: %s", self._failure)
        return self._host.status

    def _listen(self) -> socket.socket:
        server = self._config.server
        try:
            return preflight.open_listener(server.host, server.port)
        except OSError as error:
            raise StartError(
                f"server.host, server.port: can't listen on {server.host}:{server.port}: {error.strerror}; "
                "is another server running there? Choose another with --port"
            ) from error

    async def _watch_folder(self, folder: RuntimeFolder, workers: Workers) -> None:
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
                    await self._control.start(folder.path / CONTROL)
                if is_lost or self.observer.is_damaged:
                    logger.error("metrics: counts of running workers were removed, and begin anew")
                    self.observer.restore()
                workers.replace_those_without_files(all=is_lost)
                is_lost = False
                self._host.end_cut_off()
            except OSError as error:
                logger.error("server.runtime_dir: what was removed of %s can't be made again: %s", folder.path, error)

    def _make_folder(self) -> RuntimeFolder:
        # Without these checks some problems would show late: a socket path that is too long shows only in a call.
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
                logger.warning("swept what an earlier instance left behind: %s", stale)
            # Triton itself would end with a mere bus error.
            for problem in self._backend.problems():
                raise StartError(str(problem))
            folder = RuntimeFolder(parent)
            self._host.folder = folder.path
            self.observer = Observer(self._host.folder / "metrics" if "metrics" in self._config.server.pages else None)
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
        # If every deployment has failed, the server ends, so that the operator notices.
        if not self._host.is_stopping and (failure := self._backend.failure):
            self._failure = failure
            self._host.stop(1)

    def _publish(self) -> list[DeploymentRoute]:
        routes = self._backend.routes(self._config.server.workers)
        self._control.publish(RoutingTable(tuple(routes), draining=self._host.is_stopping, leaving=self._is_leaving))
        self.observer.see_deployments(map(deployment_view, routes))
        return routes

    def _on_stop_signal(self, number: int) -> None:
        if number == signal.SIGHUP and (self._is_leaving or self._host.is_stopping):
            return  # a terminal that closes sends several SIGHUPs: from the kernel and from the shell
        if self._host.is_stopping:
            self.is_hurried = True
            return
        name, delay_s = signal.Signals(number).name, self._config.server.drain_delay_s
        if number != signal.SIGINT and delay_s and not self._is_leaving:
            logger.info("%s: not ready from now on; stopping in %g s", name, delay_s)
            self._is_leaving = True
            self._publish()
            asyncio.get_running_loop().call_later(delay_s, self._host.stop)
            return
        logger.info("%s: stopping", name)
        self._host.stop()

    async def _stop(self, workers: Workers) -> None:
        self._publish()  # workers are then no longer ready, answer requests in flight, and end
        timeout_s = self._config.server.shutdown_timeout_s + WORKER_END_TIMEOUT_S
        await until(lambda: self.is_hurried or not workers.pids, timeout_s)
        workers.kill()
        await self._backend.end(lambda: self.is_hurried)
        await self._control.finish()
        await self._host.finish()
        logger.info("stopped")


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
