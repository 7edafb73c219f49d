"""The supervisor: starts, watches and replaces replicas and gateway workers; holds no tensor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.check import runtime_dir_problems
from app.config import Config, Deployment
from app.control import ControlServer
from app.errors import StartError
from app.graph_state import GraphState, StepState
from app.replica_process import GUARDIAN_LOST, ReplicaProcess
from app.routing import DeploymentRoute, RoutingTable, State
from app.sweep import make_instance_folder, sweep_stale
from app.worker_settings import WorkerSettings
from inference.lm.reference import is_language_model
from inference.signature import Signature

__all__ = ["Supervisor"]

logger = logging.getLogger("headwater")

PR_SET_CHILD_SUBREAPER = 36
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
STEADY_AFTER_S = 60.0
"""A process that lived this long is replaced at once, without the backoff of earlier crashes."""
FAILED_STARTS_LIMIT = 5
"""Starts in a row that end before ready; then the deployment has failed."""
REPLICA_END_TIMEOUT_S = 20.0
WORKER_END_TIMEOUT_S = 5.0
"""How long a gateway worker may take to end once nothing is under way in it."""
LAST_LINES_S = 0.1
"""How long what a guardian wrote may take to be read after its end."""


class _Served:
    """What the supervisor knows of one deployment."""

    def __init__(self, name: str, config: Deployment) -> None:
        self.name = name
        self.config = config
        self.state = State.LOADING
        self.reason = "waiting to start"
        self.signature: Signature | None = None
        self.ready: dict[str, ReplicaProcess] = {}
        self.failed_slots = 0
        self.is_decided = False
        """Whether its first start has succeeded or failed."""


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
        self._served = {name: _Served(name, deployment) for name, deployment in config.all_deployments().items()}
        self._graphs = {
            name: GraphState(name, deployment)
            for name, deployment in config.deployments.items()
            if name not in self._served
        }
        self._pipelines = {
            step: graph.name
            for graph in self._graphs.values()
            for step in graph.deployments.values()
            if step not in config.deployments
        }
        """Of each deployment that is a step only: its pipeline."""
        self._control = ControlServer()
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._replicas: dict[str, ReplicaProcess] = {}
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._next_replica = 0
        self._is_announced = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = Path()
        self._url = ""
        self._status = 0
        # Loading is mostly imports and disk; more at once than cores only makes each slower.
        self._start_slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit status.

        Raises:
            StartError: the address can't be bound, or the runtime folder can't be made.
        """
        # Orphans of children that die unexpectedly come to us and can be reaped; as PID 1 they do anyway.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        listener = self._listen()
        lock = self._make_folder()
        try:
            host, port = listener.getsockname()[:2]
            self._url = f"http://{_url_host(host)}:{port}"
            logger.info("listening on %s", self._url)
            await self._control.start(self._folder / "control")
            self._publish()
            settings = WorkerSettings(
                control=str(self._folder / "control"), server=self._config.server.model_dump(mode="json")
            )
            for index in range(self._config.server.workers):
                self._spawn(self._keep_worker(index, listener, settings))
            for served in self._served.values():
                for slot in range(served.config.replicas):
                    self._spawn(self._keep_replica(served, slot))
            await self._stop_requested.wait()
            listener.close()  # the workers have it too: with the last of them, connections are refused
            await self._stop()
        finally:
            listener.close()
            await self._control.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(lock)
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
        for problem in runtime_dir_problems(self._config.server, self._served):
            raise StartError(str(problem))
        parent = self._config.server.runtime_dir
        try:
            for stale in sweep_stale(parent):
                logger.warning("swept what an earlier instance left behind: %s", stale)
            self._folder, lock = make_instance_folder(parent)
        except OSError as error:
            raise StartError(f"server.runtime_dir: can't make a folder there: {error}") from error
        return lock

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the supervisor can't go on", exc_info=error)
            self._status = 1
            self._stop_requested.set()

    # Children

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            exited = self._exits.pop(pid, None)
            if exited is not None and not exited.done():
                exited.set_result(os.waitstatus_to_exitcode(status))

    def _follow(self, process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """A future of the process's exit code; must be called in the same step as the process is started."""
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._exits[process.pid] = exited

        def note(future: asyncio.Future[int]) -> None:
            process.returncode = future.result()  # so that Popen doesn't look for a process that is reaped

        exited.add_done_callback(note)
        return exited

    # Replicas

    async def _keep_replica(self, served: _Served, slot: int) -> None:
        """Keep one replica of a deployment running."""
        backoff_s = FIRST_BACKOFF_S
        failed_starts = 0
        while not self._stopping:
            async with self._start_slots:
                if self._stopping:
                    return
                started = time.monotonic()
                try:
                    replica, exited = self._start_replica(served)
                except OSError as error:  # no space, processes or descriptors: it may pass, and others go on serving
                    logger.error("%s: a replica can't be started: %s", served.name, error)
                    backoff_s = await self._pause(backoff_s)
                    continue
                is_ready = await self._await_ready(served, replica)
            if is_ready:
                failed_starts = 0
                served.ready[replica.id] = replica
                served.signature = replica.signature
                self._set_state(served, State.READY, f"replica {replica.id} ready")
                logger.info(
                    "%s: ready after %.1f s on %s%s", replica.id, time.monotonic() - started,
                    replica.facts.get("device", "?"), _own_python(served.config, replica.facts),
                )  # fmt: skip
                await replica.ending.wait()
                del served.ready[replica.id]
                if not self._stopping:
                    logger.error("%s: lost: %s", replica.id, replica.reason)
                    if not served.ready:
                        self._set_state(served, State.UNAVAILABLE, replica.reason)
                    else:
                        self._publish()
            await exited
            await replica.ended()
            del self._replicas[replica.id]
            for leftover in replica.leftovers:
                logger.error("%s: could not be removed: %s", replica.id, leftover)
            if self._stopping:
                return
            if not is_ready:
                failed_starts += 1
                reason = replica.reason or "ended before it was ready"
                logger.error("%s: did not start (%d of %d): %s", replica.id, failed_starts, FAILED_STARTS_LIMIT, reason)
                if failed_starts >= FAILED_STARTS_LIMIT:
                    served.failed_slots += 1
                    if served.failed_slots == served.config.replicas:
                        self._set_state(served, State.FAILED, reason)
                        logger.error(
                            "%s: FAILED and not tried again; correct it and restart the server: %s", served.name, reason
                        )
                        self._end_if_nothing_is_left()
                    return
                if not served.ready and served.state is not State.UNAVAILABLE:
                    self._set_state(served, State.LOADING, f"trying again after: {reason}")
                self._decide(served)
            if time.monotonic() - started > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            backoff_s = await self._pause(backoff_s)

    def _end_if_nothing_is_left(self) -> None:
        """A server of which every deployment has failed serves nobody: whoever started it should know."""
        told = [self._served.get(name) or self._graphs[name] for name in self._config.deployments]
        if all(one.state is State.FAILED for one in told) and not self._stop_requested.is_set():
            logger.critical("every deployment has failed: stopping")
            self._status = 1
            self._stop_requested.set()

    async def _pause(self, backoff_s: float) -> float:
        """Wait before another start, unless the server stops meanwhile. Returns how long to wait next time."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop_requested.wait(), backoff_s)
        return min(backoff_s * 2, LAST_BACKOFF_S)

    def _start_replica(self, served: _Served) -> tuple[ReplicaProcess, asyncio.Future[int]]:
        self._next_replica += 1
        id = f"{served.name}-{self._next_replica}"

        def progress(text: str) -> None:
            logger.info("%s: %s", id, text)
            if served.state is State.LOADING:
                self._set_state(served, State.LOADING, text)

        def log(line: str) -> None:
            logger.info("%s | %s", id, line)

        # A folder's name is short, because sockets lie in it, whose paths must be.
        folder = self._folder / f"r{self._next_replica}"
        replica = ReplicaProcess(
            served.name, id, served.config, folder, self._user_paths, on_progress=progress, on_log=log
        )
        exited = self._follow(replica.start())
        # A guardian says why it ends, unless it is killed: its last lines come first.
        loop = asyncio.get_running_loop()
        exited.add_done_callback(lambda _: loop.call_later(LAST_LINES_S, replica.mark_ending, GUARDIAN_LOST))
        self._replicas[id] = replica
        return replica, exited

    async def _await_ready(self, served: _Served, replica: ReplicaProcess) -> bool:
        try:
            return await asyncio.wait_for(asyncio.shield(replica.ready), served.config.load_timeout_s)
        except asyncio.TimeoutError:
            replica.reason = f"not ready within load_timeout_s = {served.config.load_timeout_s:g} s"
            replica.kill()
            return False

    def _set_state(self, served: _Served, state: State, reason: str) -> None:
        if state is not served.state:
            logger.info("%s: %s -> %s: %s", served.name, served.state.value, state.value, reason)
        served.state, served.reason = state, reason
        self._publish()
        if state is not State.LOADING:
            self._decide(served)

    def _decide(self, served: _Served) -> None:
        """Note that a deployment's first start has succeeded or failed; with the last of them, say what is served."""
        served.is_decided = True
        if not self._is_announced and all(item.is_decided for item in self._served.values()):
            self._is_announced = True
            told = {name: self._served.get(name) or self._graphs[name] for name in self._config.deployments}
            self._on_serving(self._url, [(name, item.signature, item.reason) for name, item in told.items()])

    def _publish(self) -> None:
        workers = self._config.server.workers
        steps = {
            served.name: StepState(served.state, served.reason, served.signature) for served in self._served.values()
        }
        routes = []
        for served in self._served.values():
            batching = served.config.batching
            routes.append(
                DeploymentRoute(
                    name=served.name,
                    state=served.state,
                    reason=served.reason,
                    signature=served.signature,
                    replicas=tuple(replica.route() for replica in served.ready.values()),
                    max_queue_size=-(-batching.max_queue_size // workers),
                    max_queue_delay_ms=batching.max_queue_delay_ms,
                    max_in_flight=-(-batching.max_in_flight // workers),
                    timeout_s=served.config.timeout_s,
                    part_of=self._pipelines.get(served.name),
                    is_language_model=is_language_model(served.config.model or ""),
                )
            )
        for graph in self._graphs.values():
            before = graph.state, graph.reason
            graph.update(steps)
            if graph.state is not before[0]:
                logger.info("%s: %s -> %s: %s", graph.name, before[0].value, graph.state.value, graph.reason)
                if graph.state is State.FAILED:
                    logger.error("%s: FAILED; correct it and restart the server: %s", graph.name, graph.reason)
                    self._end_if_nothing_is_left()
            elif graph.reason != before[1] and graph.state is State.READY:
                logger.warning("%s: still READY: %s", graph.name, graph.reason)
            routes.append(graph.route(workers))
        order = {name: index for index, name in enumerate(self._config.deployments)}
        routes.sort(key=lambda route: (order[route.part_of or route.name], route.part_of is not None))
        self._control.publish(RoutingTable(tuple(routes), draining=self._stopping))

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
            exited = self._follow(process)
            self._workers[index] = process
            code = await exited
            del self._workers[index]
            if self._stopping:
                return
            logger.error("gateway worker %d ended with %d; starting another", index, code)
            if time.monotonic() - started > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            backoff_s = await self._pause(backoff_s)

    def _start_worker(self, index: int, listener: socket.socket, settings: WorkerSettings) -> subprocess.Popen[bytes]:
        path = self._folder / f"worker-{index}.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(settings))
        return subprocess.Popen(
            [sys.executable, "-m", "app.worker", str(path), str(listener.fileno())],
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
        await asyncio.gather(*self._tasks)
        hurry.cancel()
        logger.info("stopped")

    async def _until(self, condition: Callable[[], bool], timeout_s: float, hurry: asyncio.Task[Any]) -> None:
        """Wait until the condition holds, the time is over, or a second signal came."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline and not hurry.done():
            await asyncio.wait({hurry}, timeout=0.02)


def _own_python(deployment: Deployment, facts: Mapping[str, str]) -> str:
    """Which Python a replica runs under, and what it has there; empty if it is the one that we run under."""
    if deployment.python is None:
        return ""
    return f", under {deployment.python}: " + ", ".join(
        f"{name} {version}" for name, version in facts.items() if name != "device"
    )


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
