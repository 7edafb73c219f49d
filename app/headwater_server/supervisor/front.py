"""A server's side towards clients: its socket, its gateway workers and what they are told, from start to stop."""

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
from headwater_server.control.routing import DeploymentRoute, RoutingTable
from headwater_server.control.server import ControlServer
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
"""How often to see whether somebody has removed the runtime folder, or something in it."""
WORKER_END_TIMEOUT_S = 5.0
"""How long a gateway worker may take to end once nothing is under way in it."""


class Backend(Protocol):
    """What decides about deployments: the `Orchestrator` in this process, or a cluster's supervisor."""

    @property
    def is_decided(self) -> bool:
        """Whether the first start of every deployment has succeeded or failed."""
        ...

    @property
    def failure(self) -> str:
        """Why no deployment serves any more; empty: some serve, or may yet."""
        ...

    async def prepare(self) -> None:
        """Wait until routes are known, or the server is to stop: no worker starts before."""
        ...

    def start(self) -> None:
        """Begin."""
        ...

    async def end(self, is_hurried: Callable[[], bool]) -> None:
        """End what was started, at once if it ``is_hurried``."""
        ...

    def routes(self, workers: int) -> list[DeploymentRoute]:
        """What each of so many gateway workers gets of every deployment."""
        ...

    def replica_views(self) -> list[ReplicaView]:
        """All replicas that have not ended, for metrics."""
        ...

    def problems(self) -> Iterable[Problem]:
        """What on this machine is in the way of serving."""
        ...

    def warnings(self) -> Iterable[Problem]:
        """What on this machine is less than it should be, now that the deployments' signatures are known."""
        ...


class Front:
    """Serves what a backend decides, until a signal stops it.

    Args:
        config: what to serve, and how.
        on_serving: called once the first start of every deployment has succeeded or failed, with the base URL and each
            deployment's name, signature and reason.
        control: talks to the gateway workers.
        host: has the processes; it must call `on_change`.
        backend: see there.
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
        """Whether a signal came while it was stopping."""
        self._config = config
        self._on_serving = on_serving
        self._control = control
        self._host = host
        self._backend = backend
        self._is_leaving = False
        """Whether it is about to stop: still serving, but no longer ready."""
        self._is_announced = False
        self._url = ""
        self._failure = ""
        """Why the server stops by itself: every deployment has failed."""

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP; `nohup` has SIGHUP ignored. Returns the exit status.

        Raises:
            StartError: the address can't be bound, or the runtime folder can't be made.
        """
        self._host.adopt_orphans()  # as PID 1 it does anyway
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
            listener.close()  # the workers have it, too; when the last of them has ended, connections are refused
            await self._stop(workers)
        finally:
            for task in watching:
                task.cancel()
            listener.close()
            await self._control.close()
            folder.close()
        if self._failure:  # last, where the operator looks first
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
        """Make again what somebody removes of the runtime folder, and replace what can't do without."""
        is_lost = False
        """Whether workers may still use what was in a removed folder."""
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
        # Without these checks some problems would show late; a socket's path that is too long, only in a call.
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
            # Triton's own message for it is a bus error.
            for problem in self._backend.problems():
                raise StartError(str(problem))
            folder = RuntimeFolder(parent)
            self._host.folder = folder.path
            self.observer = Observer(self._host.folder / "metrics" if "metrics" in self._config.server.pages else None)
        except OSError as error:
            raise StartError(f"server.runtime_dir: can't make a folder there: {error}") from error
        return folder

    def on_change(self) -> None:
        """Pass on to the workers what has changed."""
        routes = self._publish()
        if not self._is_announced and self._backend.is_decided:
            self._is_announced = True
            served = [(one.name, one.signature, one.reason) for one in routes if one.part_of is None]
            self._on_serving(self._url, served)
            for problem in self._backend.warnings():
                logger.warning("%s", problem)
        # A server of which every deployment has failed ends, so that the operator notices.
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
            return  # one terminal that closes sends several: the kernel's, and the shell's
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
        self._publish()  # workers are then no longer ready, answer what is in flight, and end
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
