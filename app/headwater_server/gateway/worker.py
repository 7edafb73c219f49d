"""A gateway worker's process: FastAPI on uvicorn, on the socket that the supervisor listens on.

`headwater_server.supervisor.front` runs it as ``python -m headwater_server.gateway.worker CONTROL_SOCKET SETTINGS_FD
LISTENER_FD REASON_FD``. It ends when the supervisor does. If its exit status is 1, it has written the reason to
REASON_FD. CONTROL_SOCKET is not read: it shows in process lists which server a worker belongs to.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, cast

import anyio
import msgspec
import uvicorn

from headwater import tuning
from headwater.tuning import keep_freed_memory, switch_soon
from headwater.wire.open_requests import OpenRequests
from headwater_server.config.schema import Server
from headwater_server.config.sections import SecuritySection, Tls
from headwater_server.control.link import SupervisorLink
from headwater_server.control.messages import WorkerSettings
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.errors import ConfigError
from headwater_server.gateway.app import body_reader, create_app
from headwater_server.gateway.http.bounded_connection import BoundedConnection
from headwater_server.gateway.http.connections import Closable, Connections, allow_open_files
from headwater_server.gateway.http.entry import Entry
from headwater_server.gateway.http.tls_handshake import TlsAcceptor
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.gateway.routes.status import metrics_routes, status_routes
from headwater_server.gateway.sampler import LoadSampler, Sampler
from headwater_server.security.file_watch import FileWatch
from headwater_server.security.key_check import KeyRing
from headwater_server.security.keys_file import keys_are_wanted, known_keys
from headwater_server.security.operator import OperatorGuard, is_loopback
from headwater_server.security.peer_tls import PeerTls
from headwater_server.security.rate_limits import LimitFiles
from headwater_server.security.tls import Certificate
from headwater_server.telemetry import recorder, tracing
from headwater_server.telemetry.logs import count_dropped_lines, set_up_logging
from headwater_server.telemetry.store import Store

__all__ = ["main", "serve_beside"]

logger = logging.getLogger("headwater")

DRAIN_POLL_S = 0.02
GARBAGE_ALLOCATIONS = 10_000
"""Allocations between garbage collections; see `headwater.tuning`. Requests in flight hold more than Python's default
of 700, which would cause a collection every few requests. Requests free their objects without the collector."""
IDLE_TIMEOUT_S: Final = 75
"""Seconds that a connection may be without a request."""
LAST_ANSWERS_TIMEOUT_S = 2
"""Seconds that clients may take to read finished answers when the server stops."""


async def serve_beside(
    serve: Callable[[], Awaitable[None]], tasks: Sequence[Callable[[], Awaitable[None]]], stop: Callable[[], None]
) -> str:
    """Serve, and run background tasks meanwhile. A task that fails is logged, and ends the worker.

    Args:
        serve: answers requests.
        tasks: background tasks. A task may end before ``serve`` does; tasks still running after it are cancelled.
        stop: ends ``serve`` soon; called after a task has failed.

    Returns:
        The error of the first task that failed; empty: no task has failed.
    """
    reason = ""

    async def supervised(task: Callable[[], Awaitable[None]]) -> None:
        nonlocal reason
        try:
            await task()
        except Exception as error:
            logger.exception("a background task of the gateway worker failed: the worker ends")
            reason = reason or f"a background task failed: {_named(error)}"
            stop()

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(supervised, task)
        await serve()
        group.cancel_scope.cancel()
    return reason


class GatewayWorker:
    """A gateway worker: a server with the application, linked to the supervisor.

    Args:
        settings: the supervisor's settings for the worker.
        listener: the listening socket.

    Raises:
        ConfigError: the certificates can't be used.
    """

    def __init__(self, settings: WorkerSettings, listener: socket.socket) -> None:
        options = Server.model_validate(settings.server)
        self._settings = settings
        self._options = options
        self._listener = listener
        self._tasks: list[Callable[[], Awaitable[None]]] = []
        self._first_table = asyncio.Event()
        self._leaving = asyncio.Event()
        self._draining = asyncio.Event()
        peer_tls = None
        if settings.cluster_tls:
            peer_tls = PeerTls(Path(settings.cluster_tls), list(map(Path, settings.kept_cluster_tls)))
            self._tasks.append(functools.partial(FileWatch(peer_tls.paths).run, peer_tls.renew))
        rows, size_bytes = (-(-most // options.workers) for most in (options.max_queue_size, options.max_queue_bytes))
        folder = Path(settings.control).parent
        models = self._models = Models(
            budget=QueueBudget(rows, size_bytes),
            tls=peer_tls,
            folder=folder,
            open_requests=OpenRequests(str(folder), settings.index),
        )
        link = self._link = SupervisorLink(models.drain, models.quarantine, models.cancel_here)
        models.on_quarantined = link.report_quarantined
        models.on_lost = link.report_lost
        models.cancel_elsewhere = link.cancel_elsewhere
        ports = 1 if options.grpc_port is None else 2
        self._max_connections = allow_open_files(-(-options.max_connections // options.workers), ports)
        self._connections = Connections(self._max_connections)
        self._reader = body_reader(options)
        app = self._app = self._application()
        self._connection = functools.partial(
            BoundedConnection,
            head_timeout_s=options.client_timeout_s,
            connections=self._connections,
            records=app.records,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                interface="asgi3",
                proxy_headers=False,  # `Entry` reads them
                server_header=False,
                date_header=False,
                timeout_keep_alive=IDLE_TIMEOUT_S,
                timeout_graceful_shutdown=LAST_ANSWERS_TIMEOUT_S,
                ws="none",
                http=cast("type[asyncio.Protocol]", self._connection),
            )
        )
        self._acceptor: TlsAcceptor | None = None
        self._certificate: Certificate | None = None
        if options.tls is not None:
            watch = FileWatch([options.tls.certificate, options.tls.key])
            kept = dict(zip(("certificate", "key"), settings.kept_tls, strict=False))
            certificate = self._certificate = Certificate(options.tls, Tls.model_validate(kept) if kept else None)
            self._tasks.append(functools.partial(watch.run, certificate.renew))
            self._acceptor = TlsAcceptor(certificate.context, self._with_tls, self._connections)

    async def run(self) -> str:
        """Run the worker. Returns why it ends; empty: it was ordered to end, or the supervisor is gone."""
        load = LoadSampler(self._models, self._link.report, for_metrics=bool(self._settings.metrics))
        try:
            return await serve_beside(self._serve, [*self._tasks, self._follow, self._drain, load.run], self._stop)
        finally:
            self._models.close()
            if (traced := tracing.current()) is not None:
                traced.close()

    def _application(self) -> Entry:
        settings, options, models = self._settings, self._options, self._models
        security = SecuritySection.model_validate(settings.security)
        keys: KeyRing | None = None
        if keys_are_wanted(security.keys_file):
            limits = LimitFiles(Path(settings.control).parent / "limits", settings.index, options.workers)
            watch = FileWatch([] if security.keys_file is None else [security.keys_file])
            keys = KeyRing(lambda: known_keys(security.keys_file), limits)
            self._tasks.append(functools.partial(watch.run, keys.renew))
        operator = OperatorGuard(is_loopback(self._listener.getsockname()), has_keys=keys is not None)
        reader = self._reader
        sampler = Sampler(models)
        counts = Path(settings.metrics) if settings.metrics else None
        folder = None if counts is None else counts.parent
        store = Store(counts, call_soon=asyncio.get_running_loop().call_soon)
        recorder.use(store)
        count_dropped_lines(store)
        routers = [
            repository_routes(self._link.command, operator, reader, models),
            status_routes(models, folder, sampler),
        ]
        if folder is not None:
            routers.append(metrics_routes(models, folder, sampler))
            self._tasks.append(sampler.run)
        if options.tracing is not None:
            tracing.use(tracing.exporting(options.tracing))
        app = create_app(models, options, *routers, keys=keys, cors_origins=security.cors_origins, reader=reader)
        if app.records.log is not None:
            # The last requests may be logged after the event loop, and the log's timer with it, has ended.
            atexit.register(app.records.log.flush)
        return app

    def _with_tls(self, accepted: Closable) -> asyncio.Protocol:
        server = self._server
        return self._connection(
            config=server.config, server_state=server.server_state, app_state={}, _loop=None, accepted=accepted
        )

    def _stop(self) -> None:
        self._first_table.set()
        self._server.should_exit = True

    async def _follow(self) -> None:
        models = self._models
        async for table in self._link.tables(Path(self._settings.control)):
            models.update(table)
            self._connections.is_closing = models.is_leaving
            if models.is_leaving:
                self._leaving.set()
            self._first_table.set()
            if table.draining:
                self._draining.set()
        # Only the supervisor knows where the replicas are.
        logger.error("the supervisor is gone: stopping")
        self._server.force_exit = True
        self._stop()
        models.close()

    async def _drain(self) -> None:
        """Once the routing table is draining, answer the requests in flight, for at most ``shutdown_timeout_s``, then
        end. The dispatchers refuse new requests with 503."""
        await self._draining.wait()
        deadline_s = time.monotonic() + self._options.shutdown_timeout_s
        while not self._models.is_idle and time.monotonic() < deadline_s:  # noqa: ASYNC110 - polled only at the end
            await asyncio.sleep(DRAIN_POLL_S)
        self._models.close()
        self._server.should_exit = True

    async def _serve(self) -> None:
        await self._first_table.wait()
        if not self._server.should_exit:
            tuning.settle(GARBAGE_ALLOCATIONS)
            async with self._grpc():
                if self._acceptor is None:
                    await self._server.serve(sockets=[self._listener])
                    return
                accepting = asyncio.create_task(self._acceptor.run(self._listener))
                try:
                    await self._server.serve(sockets=[])
                finally:
                    accepting.cancel()
                    self._listener.close()

    @contextlib.asynccontextmanager
    async def _grpc(self) -> AsyncIterator[None]:
        """Serve gRPC meanwhile, if it is to be served. Once the server is leaving, clients have to connect elsewhere,
        and their calls in flight finish."""
        if self._options.grpc_port is None:
            yield
            return
        from headwater_server.gateway.grpc.rpc_server import GrpcServer  # imported only when needed: it takes memory

        server = GrpcServer(
            self._app, self._models, self._reader, self._options, self._certificate, self._max_connections
        )
        await server.start()

        async def send_clients_elsewhere() -> None:
            await self._leaving.wait()
            await server.stop(self._options.drain_delay_s + self._options.shutdown_timeout_s)

        leaving = asyncio.create_task(send_clients_elsewhere())
        try:
            yield
        finally:
            leaving.cancel()
            await server.stop(LAST_ANSWERS_TIMEOUT_S)


async def _run(settings: WorkerSettings, listener: socket.socket) -> str:
    return await GatewayWorker(settings, listener).run()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Entry point; see the module's docstring."""
    settings_fd, listener_fd, reason_fd = map(int, sys.argv[2:])
    try:
        reason = _main(settings_fd, listener_fd)
    except ConfigError as error:
        reason = str(error)
    except Exception as error:
        logger.exception("the gateway worker can't go on")
        reason = _named(error)
    os.write(reason_fd, reason.encode())
    sys.exit(1 if reason else 0)


def _main(settings_fd: int, listener_fd: int) -> str:
    """Run the worker with these descriptors. Returns the reason from `GatewayWorker.run`.

    Raises:
        ConfigError: as `GatewayWorker`.
    """
    keep_freed_memory()
    switch_soon()
    settings = msgspec.json.decode(Path(f"/proc/self/fd/{settings_fd}").read_bytes(), type=WorkerSettings)
    set_up_logging(settings.server["log_format"])
    listener = socket.socket(fileno=listener_fd)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(settings, listener))
    return uvloop.run(_run(settings, listener))


if __name__ == "__main__":
    main()
