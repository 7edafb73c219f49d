"""A gateway worker's process: FastAPI on uvicorn, on the socket that the supervisor listens on.

Run by `app.supervisor` as ``python -m app.worker SETTINGS_FILE LISTENER_FD``. It ends when the supervisor does.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvicorn
from sse_starlette.sse import AppStatus

from app.config import Server
from app.connection import BoundedConnection
from app.control import SupervisorLink
from app.gateway import create_app
from app.logs import set_up_logging
from app.models import Models
from app.operator_guard import OperatorGuard, is_loopback
from app.routes.repository import repository_routes
from app.worker_settings import WorkerSettings

__all__ = ["main"]

logger = logging.getLogger("headwater")

DRAIN_POLL_S = 0.02
LAST_ANSWERS_TIMEOUT_S = 2
"""How long clients may take to read the answers that are ready when the server stops."""


async def _run(settings: WorkerSettings, listener: socket.socket) -> None:
    models = Models()
    options = Server.model_validate(settings.server)
    # It would cut every stream off as soon as the server is told to exit. What ends them is `drain` below, and behind
    # that uvicorn's own timeout.
    AppStatus.enable_automatic_graceful_drain = False
    link = SupervisorLink(models.drain)
    operator = OperatorGuard(is_loopback(listener.getsockname()))
    app = create_app(models, options, repository_routes(link.command, operator, options))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=LAST_ANSWERS_TIMEOUT_S,
            ws="none",
            http=cast(
                "type[asyncio.Protocol]", functools.partial(BoundedConnection, head_timeout_s=options.body_timeout_s)
            ),
        )
    )
    first_table = asyncio.Event()
    draining = asyncio.Event()

    async def follow() -> None:
        async for table in link.tables(Path(settings.control)):
            models.update(table)
            first_table.set()
            if table.draining:
                draining.set()

    def on_supervisor_gone(following: asyncio.Task[None]) -> None:
        """Without a supervisor there is nobody to say where replicas are: end, however that came."""
        if following.cancelled():
            return
        logger.error("the supervisor is gone: stopping", exc_info=following.exception())
        first_table.set()
        server.force_exit = True
        server.should_exit = True
        models.close()

    async def drain() -> None:
        """Answer what is under way, and 503 to what still comes; then end."""
        await draining.wait()
        deadline_s = time.monotonic() + options.shutdown_timeout_s
        while not models.is_idle and time.monotonic() < deadline_s:  # noqa: ASYNC110 - only at the end
            await asyncio.sleep(DRAIN_POLL_S)
        models.close()
        server.should_exit = True

    following = asyncio.create_task(follow())
    following.add_done_callback(on_supervisor_gone)
    tasks = [following, asyncio.create_task(drain())]
    await first_table.wait()
    try:
        if not server.should_exit:
            await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        models.close()


def main() -> None:
    """Entry point; see the module's docstring."""
    set_up_logging()
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerSettings)
    listener = socket.socket(fileno=int(sys.argv[2]))
    try:
        import uvloop
    except ImportError:
        asyncio.run(_run(settings, listener))
    else:
        uvloop.run(_run(settings, listener))


if __name__ == "__main__":
    main()
