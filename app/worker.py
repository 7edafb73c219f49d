"""A gateway worker's process: FastAPI on uvicorn, on the socket that the supervisor listens on.

Run by `app.supervisor` as ``python -m app.worker SETTINGS_FILE LISTENER_FD``. It ends when the supervisor does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path

import msgspec
import uvicorn

from app.config import Server
from app.control import receive_tables
from app.gateway import create_app
from app.logs import set_up_logging
from app.models import Models
from app.worker_settings import WorkerSettings

__all__ = ["main"]

logger = logging.getLogger("headwater")


async def _run(settings: WorkerSettings, listener: socket.socket) -> None:
    models = Models()
    options = Server.model_validate(settings.server)
    app = create_app(models, options)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(options.shutdown_timeout_s)),
            h11_max_incomplete_event_size=64 * 1024,
            ws="none",
        )
    )
    first_table = asyncio.Event()

    async def follow() -> None:
        async for table in receive_tables(Path(settings.control)):
            models.update(table)
            first_table.set()
        logger.error("the supervisor is gone: stopping")
        server.force_exit = True
        server.should_exit = True
        models.close()

    following = asyncio.create_task(follow())
    await first_table.wait()
    try:
        await server.serve(sockets=[listener])
    finally:
        following.cancel()
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
