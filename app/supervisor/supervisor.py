"""The supervisor: starts, watches and replaces replicas and gateway workers; holds no tensor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from app.config.schema import Config, Deployment
from app.control.load import DeploymentLoad, together
from app.control.messages import Drained, WorkerSettings
from app.control.routing import DeploymentRoute, RoutingTable, State
from app.control.server import ControlServer
from app.errors import StartError
from app.process.children import Children, ProcessWatch
from app.process.sweep import make_instance_folder, sweep_stale
from app.security.keys_file import keys_are_wanted
from app.security.operator import is_loopback
from app.supervisor.autoscaler import Autoscaler
from app.supervisor.deployments import Deployments
from app.supervisor.graph_state import StepState
from app.supervisor.host import Launched
from app.supervisor.lifecycle import Lifecycle
from app.supervisor.preflight import (
    region_problems,
    runtime_dir_problems,
    security_problems,
    shared_memory_warnings,
    tracing_problems,
)
from app.supervisor.replica_memory import ReplicaMemory
from app.supervisor.replica_process import GUARDIAN_LOST, ReplicaProcess
from app.supervisor.slot import FIRST_BACKOFF_S, LAST_BACKOFF_S, STEADY_AFTER_S
from app.supervisor.starter import REPLICA_END_TIMEOUT_S
from app.telemetry.logs import REPLICA_LOGGER
from app.telemetry.observer import DeploymentView, Observer, ReplicaView
from app.telemetry.recorder import recorder
from inference.signature import Signature

__all__ = ["Supervisor"]

logger = logging.getLogger("headwater")
replica_logger = logging.getLogger(REPLICA_LOGGER)

PR_SET_CHILD_SUBREAPER = 36
WORKER_END_TIMEOUT_S = 5.0
"""How long a gateway worker may take to end once nothing is under way in it."""
WATCH_EVERY_S = 0.5
PING_EVERY = 2
"""Looks at the processes, for each sign of life that a worker is asked for."""
LAST_LINES_S = 0.1
"""How long what a guardian wrote may take to be read after its end."""


class Supervisor:
    """Runs a configuration until it is told to stop.

    Args:
        config: what to serve.
        user_paths: put first on every replica's ``sys.path``.
        on_serving: called once, with the base URL and the signatures, when the first start of every deployment has
            been decided.
    """

    def __init__(
        self,
        config: Config,
        user_paths: tuple[str, ...],
        on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
    ) -> None:
        self._config = config
        self._user_paths = user_paths
        self._on_serving = on_serving
        # Loading is mostly imports and disk; more at once than cores only makes each slower.
        self.start_slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self.memory = ReplicaMemory.of(config.server)
        self._deployments = Deployments(config, self)
        self._sets = self._deployments.sets
        self._graphs = self._deployments.graphs
        self._lifecycle = Lifecycle(self._deployments, self)
        self._control = ControlServer(self._lifecycle.answer)
        self._autoscaler = Autoscaler(self._sets, self._loads, self._lifecycle.is_busy, self)
        self._children = Children()
        self._watch = ProcessWatch()
        self._guardians: dict[int, ReplicaProcess] = {}
        """By process id."""
        self._replicas: dict[str, ReplicaProcess] = {}
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._next_replica = 0
        self._is_announced = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = Path()
        self._observer = Observer(None)
        self._url = ""
        self._status = 0
        self._failure = ""
        """Why it ends by itself: every deployment has failed."""

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit status.

        Raises:
            StartError: the address can't be bound, or the runtime folder can't be made.
        """
        # Orphans of children that die unexpectedly come to us and can be reaped; as PID 1 they do anyway.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._children.reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        listener = self._listen()
        lock = self._make_folder()
        observing: asyncio.Task[None] | None = None
        try:
            host, port = listener.getsockname()[:2]
            scheme = "http" if self._config.server.tls is None else "https"
            self._url = f"{scheme}://{_url_host(host)}:{port}"
            logger.info("listening on %s", self._url)
            if not is_loopback(listener.getsockname()) and not keys_are_wanted(self._config.security.keys_file):
                logger.warning(
                    "%s is reached from other machines, and there are no API keys: whoever reaches it may use every "
                    "model; see security.keys_file", host,
                )  # fmt: skip
            await self._control.start(self._folder / "control")
            self._publish()
            observing = asyncio.create_task(self._observer.watch(self._replica_views))
            settings = WorkerSettings(
                control=str(self._folder / "control"),
                server=self._config.server.model_dump(mode="json"),
                security=self._config.security.model_dump(mode="json"),
            )
            for index in range(self._config.server.workers):
                self.spawn(self._keep_worker(index, listener, settings))
            for replicas in self._sets.values():
                replicas.start()
            watching = asyncio.create_task(self._watch_processes())
            watching.add_done_callback(self._on_task_done)
            self.spawn(self._autoscaler.run())
            await self._stop_requested.wait()
            listener.close()  # the workers have it too: with the last of them, connections are refused
            await self._stop()
            watching.cancel()
        finally:
            if observing is not None:
                observing.cancel()
            listener.close()
            await self._control.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(lock)
        if self._failure:  # last, where whoever started it looks first
            logger.critical("every deployment has failed: %s", self._failure)
        return self._status

    def _listen(self) -> socket.socket:
        server = self._config.server
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise StartError(
                f"server.host, server.port: can't listen on {server.host}:{server.port}: {error.strerror}; "
                "is another server running there? Choose another with --port"
            ) from error
        return listener

    def _make_folder(self) -> int:
        # A socket's path that is too long, for one, shows only when a model that says it is ready is called.
        for problem in (
            *security_problems(self._config),
            *runtime_dir_problems(self._config.server, self._sets),
            *tracing_problems(self._config.server),
        ):
            raise StartError(str(problem))
        parent = self._config.server.runtime_dir
        try:
            for stale in sweep_stale(parent):
                logger.warning("swept what an earlier instance left behind: %s", stale)
            # Triton's own message for it is a bus error.
            for problem in region_problems(self._config.all_deployments().values()):
                raise StartError(str(problem))
            self._folder, lock = make_instance_folder(parent)
            self._observer = Observer(self._folder / "metrics" if self._config.server.metrics else None)
        except OSError as error:
            raise StartError(f"server.runtime_dir: can't make a folder there: {error}") from error
        return lock

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """See `app.supervisor.host.Host`."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the supervisor can't go on", exc_info=error)
            self._status = 1
            self._stop_requested.set()

    # What its replica sets need

    @property
    def is_stopping(self) -> bool:
        """See `app.supervisor.host.Host`."""
        return self._stop_requested.is_set()

    async def wait_for_stop(self, timeout_s: float) -> None:
        """See `app.supervisor.host.Host`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop_requested.wait(), timeout_s)

    async def drain(self, name: str, timeout_s: float, replicas: list[str] | None) -> Drained:
        """See `app.supervisor.host.Host`."""
        return await self._control.drain(name, timeout_s, replicas)

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None]) -> Launched:
        """See `app.supervisor.host.Host`."""
        self._next_replica += 1
        id = f"{name}-{self._next_replica}"

        def progress(text: str) -> None:
            logger.info("%s: %s", id, text)
            on_progress(text)

        def log(line: str) -> None:
            replica_logger.info("%s", line, extra={"replica": id})

        # A folder's name is short, because sockets lie in it, whose paths must be.
        folder = self._folder / f"r{self._next_replica}"
        replica = ReplicaProcess(name, id, config, folder, self._user_paths, on_progress=progress, on_log=log)
        guardian = replica.start()
        exited = self._children.follow(guardian)
        self._guardians[guardian.pid] = replica
        self._watch.add(guardian.pid)
        exited.add_done_callback(lambda _: self._forget_guardian(guardian.pid))
        # A guardian says why it ends, unless it is killed: its last lines come first.
        loop = asyncio.get_running_loop()
        exited.add_done_callback(lambda _: loop.call_later(LAST_LINES_S, replica.mark_ending, GUARDIAN_LOST))
        self._replicas[id] = replica
        exited.add_done_callback(lambda _: self._replicas.pop(id))
        return Launched(replica, exited)

    def on_change(self) -> None:
        """See `app.supervisor.host.Host`."""
        self._publish()
        if not self._is_announced and all(one.is_decided for one in self._sets.values()):
            self._is_announced = True
            told = {name: self._sets.get(name) or self._graphs[name] for name in self._deployments.config.deployments}
            self._on_serving(self._url, [(name, item.signature, item.reason) for name, item in told.items()])
            signatures = {name: one.signature for name, one in self._sets.items() if one.signature is not None}
            for problem in shared_memory_warnings(self._config.all_deployments(), signatures):
                logger.warning("%s", problem)
        # A server of which every deployment has failed serves nobody: whoever started it should know.
        if all(map(self._has_given_up, self._deployments.config.deployments)) and not self._stop_requested.is_set():
            failed = {name: self._sets.get(name) or self._graphs[name] for name in self._deployments.config.deployments}
            self._failure = "; ".join(f"{name}: {one.failure or one.reason}" for name, one in failed.items())
            self._status = 1
            self._stop_requested.set()

    def _has_given_up(self, name: str) -> bool:
        """Whether a deployment has FAILED by itself, not by an operator's command, and none is about to change that."""
        if self._lifecycle.is_busy(name):
            return False
        graph = self._graphs.get(name)
        if graph is None:
            return self._sets[name].has_given_up
        steps = [self._sets[step] for step in graph.deployments.values()]
        by_command = graph.is_held or any(one.state is State.FAILED and not one.has_given_up for one in steps)
        return graph.state is State.FAILED and not by_command

    def _loads(self) -> dict[str, DeploymentLoad]:
        """What there is to do, over all gateway workers."""
        return together(self._control.loads())

    def _publish(self) -> None:
        workers = self._config.server.workers
        routes = [replicas.route(workers) for replicas in self._sets.values()]
        steps = {one.name: StepState(one.state, one.reason, one.signature, one.failure) for one in self._sets.values()}
        for graph in self._graphs.values():
            before = graph.state, graph.reason
            graph.update(steps)
            if graph.state is not before[0]:
                logger.info("%s: %s -> %s: %s", graph.name, before[0].value, graph.state.value, graph.reason)
                if graph.state is State.FAILED:
                    logger.error(
                        "%s: FAILED; correct it, and then load it or restart the server: %s", graph.name, graph.reason
                    )
            elif graph.reason != before[1] and graph.state is State.READY:
                logger.warning("%s: still READY: %s", graph.name, graph.reason)
            routes.append(graph.route(workers))
        order = {name: index for index, name in enumerate(self._deployments.config.deployments)}
        routes.sort(key=lambda route: (order[route.part_of or route.name], route.part_of is not None))
        self._control.publish(RoutingTable(tuple(routes), draining=self._stopping))
        self._observer.see_deployments(map(self._view, routes))

    def _view(self, route: DeploymentRoute) -> DeploymentView:
        replicas = self._sets.get(route.name)
        wanted = replicas.wanted if replicas is not None and not route.is_set_aside else 0
        return DeploymentView(route.name, route.state, len(route.replicas), wanted)

    def _replica_views(self) -> list[ReplicaView]:
        return [ReplicaView(one.id.rpartition("-")[0], one.id, one.group) for one in self._replicas.values()]

    # Gateway workers

    async def _keep_worker(self, index: int, listener: socket.socket, settings: WorkerSettings) -> None:
        """Keep one gateway worker running."""
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping:
            started = time.monotonic()
            try:
                process = self._start_worker(index, listener, settings)
            except OSError as error:
                logger.error("gateway worker %d can't be started: %s", index, error)
                backoff_s = await self._pause(backoff_s)
                continue
            exited = self._children.follow(process)
            self._workers[index] = process
            self._watch.add(process.pid)
            code = await exited
            self._watch.discard(process.pid)
            del self._workers[index]
            self._observer.end_worker(index)
            if self._stopping:
                return
            logger.error("gateway worker %d ended with %d; starting another", index, code)
            recorder().count("headwater_worker_restarts")
            if time.monotonic() - started > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            backoff_s = await self._pause(backoff_s)

    async def _pause(self, backoff_s: float) -> float:
        """Wait before another start, unless the server stops meanwhile. Returns how long to wait next time."""
        await self.wait_for_stop(backoff_s)
        return min(backoff_s * 2, LAST_BACKOFF_S)

    def _start_worker(self, index: int, listener: socket.socket, settings: WorkerSettings) -> subprocess.Popen[bytes]:
        path = self._folder / f"worker-{index}.json"
        path.touch(mode=0o600)
        own = msgspec.structs.replace(settings, index=index, metrics=self._observer.start_worker(index))
        path.write_bytes(msgspec.json.encode(own))
        return subprocess.Popen(
            [sys.executable, "-m", "app.gateway.worker", str(path), str(listener.fileno())],
            cwd=self._folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",  # batches of one
            },
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    # Processes that neither work nor end

    async def _watch_processes(self) -> None:
        """End guardians and workers that are stopped, and workers whose event loop hangs; others take their places."""
        for look in itertools.count():
            for pid in self._watch.look():
                guarded = self._guardians.get(pid)
                if guarded is not None:
                    guarded.mark_ending("its guardian is stopped")
                logger.error("%s (%d) is stopped: killing it", self._role(pid), pid)
                _signal(pid, signal.SIGKILL)
            if look % PING_EVERY == 0:
                self._end_silent_workers()
            await asyncio.sleep(WATCH_EVERY_S)

    def _end_silent_workers(self) -> None:
        timeout_s = self._config.server.worker_timeout_s
        workers = {process.pid for process in self._workers.values()}
        for pid, unanswered in self._control.ping().items():
            # In pings, not on a clock: while we are stopped ourselves, nobody can answer us.
            if pid in workers and unanswered * PING_EVERY * WATCH_EVERY_S >= timeout_s:
                logger.error(
                    "%s (%d) has given no sign of life for worker_timeout_s = %g s: killing it",
                    self._role(pid), pid, timeout_s,
                )  # fmt: skip
                _signal(pid, signal.SIGKILL)

    def _role(self, pid: int) -> str:
        guarded = self._guardians.get(pid)
        if guarded is not None:
            return f"the guardian of {guarded.id}"
        return next((f"gateway worker {index}" for index, one in self._workers.items() if one.pid == pid), "a process")

    def _forget_guardian(self, pid: int) -> None:
        self._watch.discard(pid)
        del self._guardians[pid]

    # The end

    def _on_stop_signal(self, number: int) -> None:
        if self._stop_requested.is_set():
            self._hurry.set()
            return
        logger.info("%s: stopping", signal.Signals(number).name)
        self._stop_requested.set()

    async def _stop(self) -> None:
        self._stopping = True
        self._publish()  # workers are then not ready, answer what they have, and end
        hurry = asyncio.create_task(self._hurry.wait())
        timeout_s = self._config.server.shutdown_timeout_s + WORKER_END_TIMEOUT_S
        await self._until(lambda: not self._workers, timeout_s, hurry)
        for worker in self._workers.values():
            _signal(worker.pid, signal.SIGKILL)
        for replica in self._replicas.values():
            replica.stop()
        await self._until(lambda: not self._replicas, REPLICA_END_TIMEOUT_S, hurry)
        for replica in self._replicas.values():
            replica.kill()
        await self._control.finish()
        await asyncio.gather(*self._tasks)
        hurry.cancel()
        logger.info("stopped")

    async def _until(self, condition: Callable[[], bool], timeout_s: float, hurry: asyncio.Task[Any]) -> None:
        """Wait until the condition holds, the time is over, or a second signal came."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline and not hurry.done():
            await asyncio.wait({hurry}, timeout=0.02)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
