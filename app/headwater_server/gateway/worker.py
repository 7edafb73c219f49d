"""A gateway worker's process: FastAPI on uvicorn, on the socket that the supervisor listens on.

`headwater_server.supervisor.front` runs it as ``python -m headwater_server.gateway.worker CONTROL_SOCKET SETTINGS_FD
LISTENER_FD REASON_FD``. It ends when the supervisor does. If its exit status is 1, it has written the reason to
REASON_FD. CONTROL_SOCKET is not read: it shows in process lists which server a worker belongs to.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, cast

import anyio
import msgspec
import uvicorn

from headwater import tuning
from headwater.tuning import keep_freed_memory, switch_soon
from headwater_server.config.schema import Server
from headwater_server.config.sections import SecuritySection, Tls
from headwater_server.control.link import SupervisorLink
from headwater_server.control.messages import WorkerSettings
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.errors import ConfigError
from headwater_server.gateway.app import body_reader, create_app
from headwater_server.gateway.http.bounded_connection import BoundedConnection
from headwater_server.gateway.http.connections import Closable, Connections, allow_open_files
from headwater_server.gateway.http.tls_handshake import TlsAcceptor
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.gateway.routes.status import metrics_routes, status_routes
from headwater_server.gateway.sampler import SAMPLE_EVERY_S, LoadSampler, Sampler
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


async def _run(settings: WorkerSettings, listener: socket.socket) -> str:
    """Run the worker. Returns why it ends; empty: it was ordered to end, or the supervisor is gone.

    Raises:
        ConfigError: the certificates can't be used.
    """
    options = Server.model_validate(settings.server)
    budget = QueueBudget(-(-options.max_queue_size // options.workers), -(-options.max_queue_bytes // options.workers))
    tasks: list[Callable[[], Awaitable[None]]] = []
    peer_tls = None
    if settings.cluster_tls:
        peer_tls = PeerTls(Path(settings.cluster_tls), list(map(Path, settings.kept_cluster_tls)))
    if peer_tls is not None:
        tasks.append(functools.partial(FileWatch(peer_tls.paths).run, peer_tls.renew))
    models = Models(budget=budget, tls=peer_tls)
    link = SupervisorLink(models.drain, models.quarantine, models.cancel_here)
    models.on_quarantined = link.report_quarantined
    models.on_lost = link.report_lost
    models.cancel_elsewhere = link.cancel_elsewhere
    security = SecuritySection.model_validate(settings.security)
    keys: KeyRing | None = None
    if keys_are_wanted(security.keys_file):
        key_watch = FileWatch([] if security.keys_file is None else [security.keys_file])
        limits = LimitFiles(Path(settings.control).parent / "limits", settings.index, options.workers)
        keys = KeyRing(lambda: known_keys(security.keys_file), limits)
        tasks.append(functools.partial(key_watch.run, keys.renew))
    certificate: Certificate | None = None
    if options.tls is not None:
        certificate_watch = FileWatch([options.tls.certificate, options.tls.key])
        kept = dict(zip(("certificate", "key"), settings.kept_tls, strict=False))
        certificate = Certificate(options.tls, Tls.model_validate(kept) if kept else None)
        tasks.append(functools.partial(certificate_watch.run, certificate.renew))
    connections = Connections(allow_open_files(-(-options.max_connections // options.workers)))
    operator = OperatorGuard(is_loopback(listener.getsockname()), has_keys=keys is not None)
    reader = body_reader(options)
    routers = [repository_routes(link.command, operator, reader)]
    sampler = Sampler(models)
    counts = Path(settings.metrics) if settings.metrics else None
    folder = None if counts is None else counts.parent
    store = Store(counts, call_soon=asyncio.get_running_loop().call_soon)
    recorder.use(store)
    count_dropped_lines(store)
    routers.append(status_routes(models, folder, sampler))
    if folder is not None:
        routers.append(metrics_routes(models, folder, sampler))
    if options.tracing is not None:
        tracing.use(tracing.exporting(options.tracing))
    app = create_app(models, options, *routers, keys=keys, cors_origins=security.cors_origins, reader=reader)
    if app.records.log is not None:
        # The last requests may be logged after the event loop, and the log's timer with it, has ended.
        atexit.register(app.records.log.flush)
    connection = functools.partial(
        BoundedConnection, head_timeout_s=options.client_timeout_s, connections=connections, records=app.records
    )
    server = uvicorn.Server(
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
            http=cast("type[asyncio.Protocol]", connection),
        )
    )
    acceptor: TlsAcceptor | None = None
    if certificate is not None:

        def with_tls(accepted: Closable) -> asyncio.Protocol:
            return connection(
                config=server.config, server_state=server.server_state, app_state={}, _loop=None, accepted=accepted
            )

        acceptor = TlsAcceptor(certificate.context, with_tls, connections)
    first_table = asyncio.Event()
    draining = asyncio.Event()

    def stop() -> None:
        first_table.set()
        server.should_exit = True

    async def follow() -> None:
        async for table in link.tables(Path(settings.control)):
            models.update(table)
            connections.is_closing = models.is_leaving
            first_table.set()
            if table.draining:
                draining.set()
        # Only the supervisor knows where the replicas are.
        logger.error("the supervisor is gone: stopping")
        server.force_exit = True
        stop()
        models.close()

    async def drain() -> None:
        """Once the routing table is draining, answer the requests in flight, for at most ``shutdown_timeout_s``, then
        end. The dispatchers refuse new requests with 503."""
        await draining.wait()
        deadline_s = time.monotonic() + options.shutdown_timeout_s
        while not models.is_idle and time.monotonic() < deadline_s:  # noqa: ASYNC110 - polled only at the end
            await asyncio.sleep(DRAIN_POLL_S)
        models.close()
        server.should_exit = True

    async def sample() -> None:
        while True:
            sampler.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def serve() -> None:
        await first_table.wait()
        if not server.should_exit:
            tuning.settle(GARBAGE_ALLOCATIONS)
            if acceptor is None:
                await server.serve(sockets=[listener])
                return
            accepting = asyncio.create_task(acceptor.run(listener))
            try:
                await server.serve(sockets=[])
            finally:
                accepting.cancel()
                listener.close()

    tasks += [follow, drain, LoadSampler(models, link.report, for_metrics=bool(settings.metrics)).run]
    if settings.metrics:
        tasks.append(sample)
    try:
        return await serve_beside(serve, tasks, stop)
    finally:
        models.close()
        if (traced := tracing.current()) is not None:
            traced.close()


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
    """Run the worker with these descriptors. Returns the reason from `_run`, and raises its errors."""
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
